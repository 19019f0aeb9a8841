"""How roles look: colours by theme, and plain characters for terminals that have no others."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter
from textual.theme import Theme

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
_ANSI: Mapping[Role, Style] = {
    **DARK,
    Role.DIM: Style(dim=True),
    Role.BAD: Style(color="red", bold=True),
    Role.WARN: Style(color="yellow"),
    Role.GOOD: Style(color="cyan"),
    Role.NOTE: Style(color="magenta"),
}
_OWN = ("textual-dark", "textual-light")
_READABLE = 4.5  # WCAG 2.1, 1.4.3: contrast of text


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """The style of each role, and of the line under the cursor."""

    roles: Mapping[Role, Style]
    cursor: Style


_known: dict[str, Looks] = {}


def looks_of(theme: Theme) -> Looks:
    """The looks of a theme: our own palette on Textual's two, else the theme's colours, made readable on its background."""
    if theme.name not in _known:
        _known[theme.name] = _looks(theme)
    return _known[theme.name]


def _looks(theme: Theme) -> Looks:
    if theme.ansi:
        return Looks(roles=_ANSI, cursor=Style(bold=True, reverse=True))
    if theme.name in _OWN:
        ground = Style(bold=True, bgcolor="#2c3544" if theme.dark else "#d0dcec")
        return Looks(roles=DARK if theme.dark else LIGHT, cursor=ground)
    ground_colour = Color.parse(theme.background or ("#121212" if theme.dark else "#ffffff"))
    ink = Color.parse(theme.foreground or ("#e0e0e0" if theme.dark else "#202020"))
    edge = Color.parse("#ffffff" if theme.dark else "#000000")
    raised = ground_colour.blend(Color.parse(theme.primary), 0.2)

    def style(colour: str | None, default: str, *, bold: bool = False) -> Style:
        return Style(color=readable(Color.parse(colour or default), raised, edge).hex6, bold=bold or None)

    roles = {
        **(DARK if theme.dark else LIGHT),
        Role.DIM: Style(color=readable(ink.blend(ground_colour, 0.4), raised, edge).hex6),
        Role.BAD: style(theme.error, "#ff7a33", bold=True),
        Role.WARN: style(theme.warning, "#e6b800"),
        Role.GOOD: style(theme.primary, "#56b4e9"),
        Role.NOTE: style(theme.accent, "#d8a0c0"),
    }
    return Looks(roles=roles, cursor=Style(bold=True, bgcolor=raised.hex6))


def readable(colour: Color, ground: Color, edge: Color) -> Color:
    """`colour`, blended with `edge` (white or black) until its contrast to `ground` suffices."""
    for part in range(11):
        mixed = colour.blend(edge, part / 10)
        if contrast(mixed, ground) >= _READABLE:
            return mixed
    return edge


def contrast(a: Color, b: Color) -> float:
    """Contrast of two colours, 1 to 21 (WCAG 2.1).

    >>> round(contrast(Color.parse("#000000"), Color.parse("#ffffff")))
    21
    """
    lights = sorted(_luminance(colour) for colour in (a, b))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _luminance(colour: Color) -> float:
    """Relative luminance, 0 to 1 (WCAG 2.1)."""
    parts = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in colour.normalized]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


_BOX = {
    "▸": ">", "·": ".", "…": "~", "—": "-", "–": "-", "├": "|", "│": "|", "└": "`", "─": "-", "━": "-", "▔": "-", "▁": "_",
    "→": ">", "←": "<", "×": "x", "▊": "|", "▎": "|", "▌": "|", "▐": "|", "█": "#",
    "╭": "+", "╮": "+", "╰": "+", "╯": "+", "┬": "+", "┴": "+", "┼": "+", "╎": ":", "╌": "-", "›": ">", "‹": "<", "▼": "v",
    "▶": ">", "┐": "+", "┘": "+", "┤": "+", "░": ":",
    "■": "#", "●": "*", "○": "o", "⭘": "o",
}  # fmt: skip
_ASCII = {
    **dict.fromkeys(range(0x2801, 0x2900), "*"),  # dots of plots
    **dict.fromkeys(range(0x2580, 0x25A0), "#"),  # blocks, such as scroll bars
    **{ord(char): plain for char, plain in _BOX.items()},
}  # fmt: skip


_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")


def is_ascii_terminal() -> bool:
    """Whether the locale is C, or the terminal's encoding has no characters but ASCII or those of one byte.

    In the locale C Python writes UTF-8 all the same (PEP 540), and sets LC_CTYPE (PEP 538). Without any locale UTF-8 is assumed.
    """
    names = ("LC_ALL", "LANG") if os.environ.get("LC_CTYPE") in _COERCED else ("LC_ALL", "LC_CTYPE", "LANG")
    if next((value for name in names if (value := os.environ.get(name))), "") in ("C", "POSIX"):
        return True
    return not (getattr(sys.__stdout__, "encoding", "") or "ascii").lower().startswith("utf")


class ColourlessFilter(LineFilter):
    """For NO_COLOR: bold, underline and reverse are left; the terminal's own colours are. Textual alone would paint greys."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        del background
        return [Segment(text, style and style.without_color, control) for text, style, control in segments]


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
    >>> to_ascii("▸ a · b…"), to_ascii("━░█▁")
    ('> a . b~', '-:#_')
    """
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
