"""The two lines above the screens: their names, and the verdict. A click on each does what it says."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import App
from textual.message import Message

from titan_ckpt.console.units import format_age
from titan_ckpt.tui.data.standing import Standing, damage_facts, standing, ticking
from titan_ckpt.tui.rows import Role
from titan_ckpt.tui.screens import PANES
from titan_ckpt.tui.session.session import Session
from titan_ckpt.tui.widgets.looks import looks_of
from titan_ckpt.tui.widgets.one_line import OneLine
from titan_ckpt.tui.widgets.pane import Pane


class TabBar(OneLine):
    """The names of the screens."""

    class Clicked(Message):
        """The tab of screen `number` was clicked."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

    def __init__(self) -> None:
        super().__init__(id="tabs")
        self._current = 1

    def show_tabs(self, current: int, empty: Container[int] = ()) -> None:
        """Name the screens, the current one on a ground of its own; those that are `empty` are dim.

        Its brackets are in the colour of the ground; they show where a terminal has no colours."""
        self._current = current
        text = tabs_text(current, self.app.size.width)
        tabs, start, stop = Text(text, no_wrap=True), text.index("["), text.index("]") + 1
        looks = looks_of(self.app.current_theme)
        roles = looks.roles
        for tab in re.finditer(r"(\d)(?: [A-Z]\w*)?", text):
            is_empty = int(tab[1]) in empty
            tabs.stylize(roles[Role.DIM if is_empty else Role.GOOD], *tab.span(0 if is_empty else 1))
        tabs.stylize(looks.tab, start, stop)
        for place in (start, stop - 1) if looks.tab.bgcolor else ():
            tabs.stylize(Style(color=looks.tab.bgcolor), place, place + 1)
        self.show_text(tabs)

    def on_click(self, event: events.Click) -> None:
        number = tab_at(tabs_text(self._current, self.app.size.width), event.x)
        if number is not None:
            self.post_message(self.Clicked(number))


class VerdictBar(OneLine):
    """The bar on top of every screen; hidden where there is no incident."""

    class Clicked(Message):
        """The bar was clicked."""

    def __init__(self) -> None:
        super().__init__(id="verdict")

    def show_verdict(self, session: Session) -> None:
        """The verdict as of the last look, and of a job that lived then, or is followed, how long ago that was."""
        incident, steps = session.incident.value, session.checkpoints.value
        damage = damage_facts(steps)
        self.display = incident is not None or bool(damage)
        if incident is None and damage:
            self.set_classes(Role.BAD)
            self.show(f" {Standing(word='CHECKPOINTS', role=Role.BAD, facts=damage).text(self.app.size.width - 2)}")
        if incident is not None:
            is_live = session.is_following or bool(ticking(incident, session.seen_s))
            age = format_age(session.clock() - session.seen_s)
            found, width = standing(incident, session.seen_s).beside(steps), self.app.size.width - 2
            forms = (f"   looked {age} ago", f"   {age} ago") if is_live else ()
            looked = next((form for form in forms if len(found.foremost) + len(form) <= width), "")
            self.set_classes(found.role or "plain")
            self.show(f" {found.text(width - len(looked))}{looked}")

    def on_click(self) -> None:
        self.post_message(self.Clicked())


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


def paint_bars(app: App[Any], session: Session) -> None:
    """The bars on top of every screen; none any more while the program ends, no tab while another session is opened."""
    for pane in app.query(Pane):
        for tabs in app.query(TabBar) if pane.display else ():
            tabs.show_tabs(pane.number, session.empty_screens)
    for bar in app.query(VerdictBar):
        bar.show_verdict(session)
