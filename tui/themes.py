"""The two themes of the screens, and the names by which one is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from textual.color import Color
from textual.theme import BUILTIN_THEMES, Theme

from titan_ckpt.tui.rows import Role
from titan_ckpt.tui.widgets.looks import edge_of, looks_of, raised_of, readable

# Colours of text that the style sheet names, and what they are in a theme of the terminal's own colours.
TEXTS: Mapping[str, Role] = {"text-dim": Role.DIM, "text-head": Role.HEAD, "text-bad": Role.BAD}
ANSI_TEXTS: Mapping[str, str] = {"text-dim": "ansi_default", "text-head": "ansi_default", "text-bad": "ansi_red"}

# Vermilion, yellow, sky blue, reddish purple and bluish green: hues of the Okabe-Ito palette, safe for colour-blind readers.
DARK = Theme(
    name="titan-dark",
    primary="#5ab8f0",
    secondary="#6fd3bd",
    warning="#f2c230",
    error="#ff7a45",
    success="#6fd3bd",
    accent="#e0a3d2",
    foreground="#d8e0ea",
    background="#0d1219",
    surface="#141b25",
    panel="#1a2330",
)
LIGHT = Theme(
    name="titan-light",
    primary="#00588c",
    secondary="#0b6355",
    warning="#6e5000",
    error="#a83200",
    success="#0b6355",
    accent="#82306a",
    foreground="#1b2430",
    background="#fcfcfb",
    surface="#f3f5f7",
    panel="#e4eaf0",
    dark=False,
)


def _with_readable_text(theme: Theme) -> Theme:
    """The theme with text that stands out from the line under the cursor too, as every role does."""
    if theme.ansi:
        return replace(theme, variables={**theme.variables, **ANSI_TEXTS})
    ink = Color.parse(theme.foreground or ("#e0e0e0" if theme.dark else "#202020"))
    theme = replace(theme, foreground=readable(ink, raised_of(theme), edge_of(theme)).hex6)
    roles = looks_of(theme).roles
    text = {name: roles[role].color for name, role in TEXTS.items()}
    return replace(
        theme, variables={**theme.variables, **{name: colour.name for name, colour in text.items() if colour}}
    )


THEMES: Mapping[str, Theme] = {
    theme.name: _with_readable_text(theme) for theme in (DARK, LIGHT, *BUILTIN_THEMES.values())
}
SHORT: Mapping[str, str] = {"dark": DARK.name, "light": LIGHT.name}


def theme_name(text: str) -> str:
    """The full name of a theme; `dark` and `light` are the screens' own.

    >>> theme_name("light"), theme_name("nord")
    ('titan-light', 'nord')
    """
    return SHORT.get(text, text)
