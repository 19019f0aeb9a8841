"""The incidents and attempts of a folder, to choose one: each is judged in the background, the newest first."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import ModalScreen

from titan_ckpt.console import background
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.report.facts import moment
from titan_ckpt.errors import TitanError
from titan_ckpt.tui.data.content import Content
from titan_ckpt.tui.data.incident import NO_FAULT, load_incident
from titan_ckpt.tui.rows import Role, Row, RowList, TextSpan, head, in_cells, piece, row, truncate, truncate_start
from titan_ckpt.tui.widgets.key_bar import KeyBar
from titan_ckpt.tui.widgets.line_view import LineView

_NEWEST = "(newest attempt)"
_WITH_SECONDS, _WITH_TIME, _WITH_WHY, _LEAST_NAME = 90, 70, 60, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What an incident's verdict is: when the job stopped (""/unknown), its kind, how sure, and why in a line."""

    text: str
    role: Role
    moment: str = ""
    kind: str = ""
    confidence: str = ""


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
        yield KeyBar(self.app.simulate_key)

    def on_mount(self) -> None:
        view = self.query_one(LineView)
        view.border_title = "incidents"
        self.query_one(KeyBar).show_keys(
            "", (("enter", "open"), ("j k", "move"), ("h l", "scroll sideways"), ("esc", "close"))
        )
        self._paint(self._names.index(self._content.incident) + 1)
        view.focus()
        background.start("incidents", self._judge)

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
        view.styles.height = min(len(self._names) + 3, max(self.app.size.height * 7 // 10, 6))
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
        incident = load_incident(url, name)
    except TitanError as error:
        return Judged(text=f"nothing readable: {error}", role=Role.DIM)
    top, last_s = incident.top, incident.last_sign_ns / 1e9
    seen_s = last_s if incident.is_over or incident.is_slow else incident.stop_s or last_s
    calm: Role = Role.GOOD if top.verdict in (VerdictKind.HEALTHY, VerdictKind.RUNNING) else Role.WARN
    return Judged(
        text=top.headline,
        role=calm if top.verdict in NO_FAULT else Role.BAD,
        moment=moment(seen_s).removesuffix(" UTC") if seen_s else "",
        kind=top.verdict,
        confidence=f"{top.confidence:.0%}",
    )


def incident_rows(names: Sequence[str], shown: str, judged: Mapping[str, Judged], width: int) -> list[Row]:
    """A heading, and a line per incident, the newest first; `shown` is marked."""
    kinds = max([len("verdict"), *(len(found.kind) for found in judged.values())])
    room = max(width // 4, 16) if width >= _WITH_WHY else max(min(16, width - kinds - 4), _LEAST_NAME)
    longest = min(max(len("incident"), *(cell_len(name or _NEWEST) for name in names)), room)
    with_time = width >= _WITH_TIME
    time = slice(None) if width >= _WITH_SECONDS else slice(5, 16)  # without the year and the seconds
    stopped = f"{'when (UTC)':<{19 if width >= _WITH_SECONDS else 11}}  " if with_time else ""
    rows = [head(f"  {'incident':<{longest}}  {stopped}{'verdict':<{kinds}}  sure  why")]
    for name in names:
        found = judged.get(name)
        mark = "*" if name == shown else " "
        label = in_cells(truncate_start, name or _NEWEST, longest)
        spans: tuple[TextSpan, ...] = (
            (f"{mark} ", Role.BOLD),
            (piece(label, name or _NEWEST), Role.BOLD),
            ("  ", Role.BOLD),
        )
        if found is None:
            rows.append(row(*spans, ("judging ...", Role.DIM)))
            continue
        when = f"{found.moment[time]:<{len(stopped) - 2}}  " if with_time else ""
        facts = f"{found.kind:<{kinds}}  "
        room = width - longest - len(when) - len(facts) - 10
        rows.append(row(*spans, (when, Role.DIM), (facts, found.role), (f"{found.confidence:>4}  ", Role.DIM),
                        truncate(found.text, max(room, 12))))  # fmt: skip
    return rows
