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

_PLAIN: Mapping[Role, Style] = {
    Role.PLAIN: Style(),
    Role.BOLD: Style(bold=True),
    Role.SPOT: Style(bold=True, reverse=True),
}
# Of the terminal's own colours only red and magenta can be read on white and on black.
_ANSI: Mapping[Role, Style] = {
    **_PLAIN,
    Role.DIM: Style(dim=True),
    Role.HEAD: Style(bold=True, underline=True),
    Role.BAD: Style(color="red", bold=True),
    Role.SPOT_BAD: Style(color="red", bold=True, reverse=True),
    Role.WARN: Style(color="magenta"),
    Role.GOOD: Style(),
    Role.NOTE: Style(color="magenta"),
}
_READABLE = 4.5  # WCAG 2.1, 1.4.3: contrast of text
_RAISED = 0.2  # share of the first colour in the ground of the line under the cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """The style of each role, of the line under the cursor, and of the tab of the screen that is shown."""

    roles: Mapping[Role, Style]
    cursor: Style
    tab: Style


_known: dict[str, Looks] = {}


def looks_of(theme: Theme) -> Looks:
    """The looks of a theme: its colours, made readable on its background."""
    if theme.name not in _known:
        _known[theme.name] = _looks(theme)
    return _known[theme.name]


def _looks(theme: Theme) -> Looks:
    if theme.ansi:
        inverse = Style(bold=True, reverse=True)
        return Looks(roles=_ANSI, cursor=inverse, tab=inverse)
    assert theme.foreground is not None
    ground, raised, ink = ground_of(theme), raised_of(theme), Color.parse(theme.foreground)

    def fitted(colour: Color) -> Color:
        return readable(colour, raised, edge_of(theme))

    def style(colour: str | None, *, bold: bool = False) -> Style:
        return Style(color=(fitted(Color.parse(colour)) if colour else ink).hex6, bold=bold or None)

    dim = fitted(ink.blend(ground, 0.4))
    is_behind = contrast(dim, raised) < contrast(ink, raised)

    roles = {
        **_PLAIN,
        Role.DIM: Style(color=(dim if is_behind else ink).hex6),
        Role.HEAD: style(theme.secondary, bold=True),
        Role.BAD: style(theme.error, bold=True),
        Role.SPOT_BAD: style(theme.error, bold=True) + Style(reverse=True),
        Role.WARN: style(theme.warning),
        Role.GOOD: style(theme.primary),
        Role.NOTE: style(theme.accent),
    }
    tab = Style(bold=True, color=ground.hex6, bgcolor=style(theme.primary).color)
    return Looks(roles=roles, cursor=Style(bold=True, bgcolor=raised.hex6), tab=tab)


def ground_of(theme: Theme) -> Color:
    """The colour behind the text."""
    return Color.parse(theme.background or ("#121212" if theme.dark else "#ffffff"))


def raised_of(theme: Theme) -> Color:
    """The colour behind the line under the cursor, where every text is read too."""
    return ground_of(theme).blend(Color.parse(theme.primary), _RAISED)


def edge_of(theme: Theme) -> Color:
    """White or black: the end of the scale on which colours stand out from the ground."""
    return Color.parse("#ffffff" if theme.dark else "#000000")


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
    "→": ">", "←": "<", "×": "x", "▊": "|", "▎": "|", "▌": "|", "▐": "|", "█": "#", "═": "=",
    "╭": "+", "╮": "+", "╰": "+", "╯": "+", "┬": "+", "┴": "+", "┼": "+", "╎": "|", "╌": "-", "›": ">", "‹": "<", "▼": "v",
    "▶": ">", "┐": "+", "┘": "+", "┤": "+", "░": ":",
    "╍": "=", "■": "#", "●": "*", "○": "o", "⭘": "o",
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
