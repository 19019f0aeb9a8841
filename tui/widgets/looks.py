"""How roles look: colours for dark and for light backgrounds, and plain characters for terminals that have no others."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

from titan_ckpt.tui.rows import Role

# Vermilion, orange and sky blue of the Okabe-Ito palette, safe for colour-blind readers; darker ones on light backgrounds.
DARK: Mapping[Role, Style] = {
    Role.PLAIN: Style(),
    Role.DIM: Style(color="#8a8a8a"),
    Role.BOLD: Style(bold=True),
    Role.HEAD: Style(bold=True, underline=True),
    Role.BAD: Style(color="#ff7a33", bold=True),
    Role.WARN: Style(color="#e6b800"),
    Role.GOOD: Style(color="#56b4e9"),
    Role.NOTE: Style(color="#d8a0c0"),
    Role.SPOT: Style(bold=True, reverse=True),
}
LIGHT: Mapping[Role, Style] = {
    **DARK,
    Role.DIM: Style(color="#5f5f5f"),
    Role.BAD: Style(color="#a02d00", bold=True),
    Role.WARN: Style(color="#6b5000"),
    Role.GOOD: Style(color="#005a8c"),
    Role.NOTE: Style(color="#7a2a5a"),
}
CURSOR_DARK, CURSOR_LIGHT = Style(bold=True, bgcolor="#2c3544"), Style(bold=True, bgcolor="#d0dcec")

_BOX = {
    "▸": ">", "·": ".", "…": "~", "—": "-", "–": "-", "├": "|", "│": "|", "└": "`", "─": "-", "━": "-", "▔": "-", "▁": "_",
    "→": ">", "←": "<", "×": "x", "▊": "|", "▎": "|", "▌": "|", "▐": "|", "█": "#", "■": "#", "●": "*", "○": "o", "⭘": "o",
}  # fmt: skip
_ASCII = {
    **{ord(char): plain for char, plain in _BOX.items()},
    **dict.fromkeys(range(0x2801, 0x2900), "*"),  # dots of plots
    **dict.fromkeys(range(0x2580, 0x25A0), "#"),  # blocks, such as scroll bars
    0x2581: "_", 0x2594: "-",
}  # fmt: skip


def is_ascii_terminal() -> bool:
    """Whether the terminal's encoding has no characters but ASCII or those of one byte."""
    return not (getattr(sys.__stdout__, "encoding", "") or "ascii").lower().startswith("utf")


def is_light_terminal() -> bool:
    """Whether the terminal says that its background is light: `COLORFGBG=0;15`, as rxvt, Konsole and others set it."""
    ground = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return ground in ("7", "15")


class AsciiFilter(LineFilter):
    """Replaces every character that is not ASCII by one that looks like it, else by `?`."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        del background
        return [
            segment if segment.text.isascii() else Segment(to_ascii(segment.text), segment.style, segment.control)
            for segment in segments
        ]


def to_ascii(text: str) -> str:
    """
    >>> to_ascii("▸ a · b…")
    '> a . b~'
    """
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
