"""The line of the screens' names: what it says, and where a click on it leads."""

from __future__ import annotations

import re

from titan_ckpt.tui.screens import PANES


def tab_at(text: str, x: int) -> int | None:
    """The number of the tab at a column of `tabs_text`.

    >>> tab_at("1 2 [3 Collective] 4", 8), tab_at("1 2 [3 Collective] 4", 1)
    (3, None)
    """
    found = (match for match in re.finditer(r"\[?(\d)(?: [A-Z]\w*\]?)?", text) if match.start() <= x < match.end())
    return next((int(match[1]) for match in found), None)


def tabs_text(current: int, width: int) -> str:
    """The screens' names, the current one in brackets: in full, shortened, or only its own.

    >>> tabs_text(3, 40)
    '1 2 [3 Collective] 4 5 6 7 8'
    """
    short = {"Checkpoints": "Ckpts", "Collective": "Coll", "Training": "Train"}
    for labels in ({}, short, {pane.label: "" for pane in PANES}):
        names = (
            f"[{p.number} {p.label}]" if p.number == current else f"{p.number} {labels.get(p.label, p.label)}".strip()
            for p in PANES
        )
        text = " ".join(names)
        if len(text) <= width:
            break
    return text
