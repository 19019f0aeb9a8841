"""The incidents and attempts of a folder, to choose one: each is judged in the background, the newest first."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import ModalScreen

from titan_ckpt.errors import TitanError
from titan_ckpt.tui.data.content import Content
from titan_ckpt.tui.data.incident import NO_FAULT, load_incident
from titan_ckpt.tui.rows import Role, Row, RowList, head, ranks_named, row, truncate
from titan_ckpt.tui.widgets.line_view import LineView

_NEWEST = "(newest attempt)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What an incident's verdict is, in a line, and whether it is a fault."""

    text: str
    role: Role


class IncidentsScreen(ModalScreen[str | None]):
    """A list over the screen; enter chooses, esc leaves."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,i", "dismiss(None)", "close", show=False)]

    @dataclass
    class Found(Message):
        """An incident was judged."""

        name: str
        judged: Judged

    def __init__(self, content: Content) -> None:
        super().__init__()
        self._content = content
        self._names = tuple(reversed(content.incidents))
        self._judged: dict[str, Judged] = {}
        self._is_closed = threading.Event()

    def compose(self) -> ComposeResult:
        yield LineView()

    def on_mount(self) -> None:
        view = self.query_one(LineView)
        view.border_title = "incidents: enter opens one"
        self._paint(self._names.index(self._content.incident) + 1)
        view.focus()
        threading.Thread(target=self._judge, name="tui: incidents", daemon=True).start()

    def on_unmount(self) -> None:
        self._is_closed.set()

    def _judge(self) -> None:
        """Judge one after the other, until the list is closed."""
        for name in self._names:
            if self._is_closed.is_set():
                return
            self.post_message(self.Found(name, judge(self._content.url, name)))

    def on_incidents_screen_found(self, message: IncidentsScreen.Found) -> None:
        self._judged[message.name] = message.judged
        self._paint(None)

    def _paint(self, cursor: int | None) -> None:
        view = self.query_one(LineView)
        view.set_rows(
            RowList(incident_rows(self._names, self._content.incident, self._judged, view.line_width)), cursor=cursor
        )

    def on_line_view_chosen(self, message: LineView.Chosen) -> None:
        message.stop()
        if message.index > 0:
            self.dismiss(self._names[message.index - 1])


def judge(url: str, name: str) -> Judged:
    """The verdict on one incident, or why it cannot be read."""
    try:
        top = load_incident(url, name).top
    except TitanError as error:
        return Judged(text=f"nothing readable: {error}", role=Role.DIM)
    ranks = f" · {ranks_named(top.culprits, 3)}" if top.culprits else ""
    return Judged(
        text=f"{top.verdict}{ranks} · {top.headline}", role=Role.PLAIN if top.verdict in NO_FAULT else Role.BAD
    )


def incident_rows(names: Sequence[str], shown: str, judged: Mapping[str, Judged], width: int) -> list[Row]:
    """A heading, and a line per incident, the newest first; `shown` is marked."""
    longest = max(len(name or _NEWEST) for name in names)
    rows = [head(f"  {'incident':<{longest}}  verdict")]
    for name in names:
        found = judged.get(name)
        text, role = (found.text, found.role) if found is not None else ("judging ...", Role.DIM)
        mark = "*" if name == shown else " "
        label = f"{mark} {name or _NEWEST:<{longest}}  "
        rows.append(row((label, Role.BOLD), (truncate(text, max(width - len(label), 12)), role)))
    return rows
