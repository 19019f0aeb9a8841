"""Screen 3: one operation on all ranks of its group: state, lag, sizes, dtype, call site, and the ranks' stacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from textual.binding import Binding, BindingType

from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.diagnosis.mismatches.splits import splits_text
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import RankState
from titan_ckpt.debug.incident.records import Frame, Operation
from titan_ckpt.tui.data.grid import ABSENT, ENDED, FAILED, GLYPHS, LATE, PENDING, usual_signature
from titan_ckpt.tui.data.incident import Incident
from titan_ckpt.tui.data.unseen import Unseen, unseen_operation
from titan_ckpt.tui.pictures.details import rank_rows, signature_text
from titan_ckpt.tui.rows import (
    CULPRIT,
    Glyph,
    Role,
    Row,
    RowLink,
    RowList,
    Rows,
    TextSpan,
    head,
    piece,
    place_text,
    row,
)
from titan_ckpt.tui.screens.collective_diff import rank_diff_rows
from titan_ckpt.tui.screens.grid_rows import no_lane_rows
from titan_ckpt.tui.screens.stack_tree import tree_rows
from titan_ckpt.tui.session.session import Session
from titan_ckpt.tui.widgets.line_view import MORE_RIGHT
from titan_ckpt.tui.widgets.pane import Pane
from titan_ckpt.tui.widgets.part import Part, Space

_WITH_LAG, _STATE = 50, 9
_NOT_YET = Glyph(char=" ", role=Role.DIM, label="not yet")


class CollectivePane(Pane):
    """One operation on all ranks of its group."""

    number = 3
    label = "Collective"
    purpose = "one operation, rank by rank, with merged stacks"
    parts = (Part(name="details"),)
    keys = (("d", "compare two ranks"), ("< >", "previous, next operation"), ("enter", "what the rank waits for"))
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("less_than_sign", "step(-1)", show=False), Binding("greater_than_sign", "step(1)", show=False),
        Binding("d", "difference", show=False),
    ]  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._tree_key: tuple[object, ...] = ()
        self._tree_rows: list[Row] = []
        self._compared: tuple[int, int] | None = None

    def state(self) -> tuple[object, ...]:
        return (*super().state(), self.session.lane, self.session.seq, self._compared)

    def part_rows(self, space: Space) -> Iterable[Row]:
        incident, current = self.session.incident.value, self.body.current
        rank = current.link.rank if current is not None and current.link is not None else None
        return rank_rows(incident, rank, space.width) if incident is not None and rank is not None else ()

    def title(self) -> str:
        incident = self.session.incident.value
        if incident is None or not incident.lanes:
            return "operation"
        lane, seq = current_lane(self.session, incident), current_seq(self.session, incident)
        unseen = unseen_operation(incident, lane)
        if unseen is not None and unseen.seq == seq:
            facts = [f"group {incident.name_of(lane)}", f"operation #{seq}", unseen.op, "seen in stacks"]
            return " · ".join(filter(None, facts))
        at, codes = lane.row[:, seq - lane.first_seq], lane.signature[:, seq - lane.first_seq]
        usual = usual_signature(codes)
        one = next((i for i, code in enumerate(codes.tolist()) if code == usual >= 0), None)
        op = incident.run.operation(lane.members[one], int(at[one])) if one is not None else None
        if incident.is_p2p(lane):
            return f"group {incident.name_of(lane)} · {incident.number_of(lane, seq)} of each rank"
        what = [signature_text(op)] if op is not None else []
        others = int(((codes >= 0) & (codes != usual)).sum())
        facts = [f"group {incident.name_of(lane)}", f"operation #{seq}"]
        unknown = int((lane.is_silent & (at < 0)).sum())
        unheard = f", {unknown:,} unknown" if unknown else ""
        facts += [f"{int((at >= 0).sum()):,}/{len(lane.members):,} issued{unheard}{_differ_text(others)}", *what]
        return " · ".join(facts)

    def make_rows(self, width: int) -> Rows:
        incident = self.session.incident.value
        if incident is None or not incident.lanes:
            return self.no_incident(width) if incident is None else RowList(no_lane_rows(incident, width))
        if self._compared is not None:
            lane, seq = current_lane(self.session, incident), current_seq(self.session, incident)
            return RowList(rank_diff_rows(incident, lane, seq, self._compared, width))
        rows = CollectiveRows(self.session, incident, self._tree(incident, width))
        return RowList(rows.row(i, width) for i in range(len(rows))) if self.filter_text else rows

    def _tree(self, incident: Incident, width: int) -> list[Row]:
        key = (self.session.incident.version, self.session.lane, width)
        if self._tree_key != key:
            members = current_lane(self.session, incident).members
            self._tree_key, self._tree_rows = key, list(tree_rows(incident, members, width))
        return self._tree_rows

    def go_back(self) -> bool:
        if super().go_back():
            return True
        if self._compared is None:
            return False
        rank, self._compared = self._compared[1], None
        self.select(RowLink(screen=self.number, rank=rank))
        return True

    def select(self, link: RowLink) -> None:
        self._compared = None
        self.update_rows()
        self.move_to_rank(link.rank)

    def move_to_rank(self, rank: int | None) -> None:
        rows = self.body.rows
        place = rows.place_of_rank(rank) if isinstance(rows, CollectiveRows) and rank is not None else None
        if place is not None:
            self.body.move_to(place)

    def action_step(self, by: int) -> None:
        incident = self.session.incident.value
        if incident is not None and incident.lanes:
            lane = current_lane(self.session, incident)
            here = current_seq(self.session, incident)
            unseen = unseen_operation(incident, lane)
            last = lane.last_issued if unseen is None else unseen.seq
            self.session.seq = max(lane.first_seq, min(here + by, max(last, here)))
            self.update_rows()

    def action_difference(self) -> None:
        """Compare the rank under the cursor with the pinned one, else with a rank that issued the usual operation, else any."""
        incident, current = self.session.incident.value, self.body.current
        rank = current.link.rank if current and current.link else None
        if incident is None or not incident.lanes or rank is None or self._compared is not None:
            self.post_message(
                self.ShowStatus("move the cursor to a rank and press d; space pins the rank to compare with")
            )
            return
        lane = current_lane(self.session, incident)
        other = rank_to_compare(lane, current_seq(self.session, incident), rank, self.session.pinned)
        if other is None or rank not in lane.members:
            self.post_message(self.ShowStatus("no other rank to compare with"))
            return
        self._compared = (other, rank)
        self.update_rows()
        self.body.move_to(0)


def rank_to_compare(lane: Lane, seq: int, rank: int, pinned: int | None) -> int | None:
    """The rank to compare `rank` with; None if it is the only one."""
    if pinned in lane.members and pinned != rank:
        return pinned
    if seq - lane.first_seq >= lane.row.shape[1]:
        return None
    column = lane.signature[:, seq - lane.first_seq]
    usual = usual_signature(column)
    others = [
        (code != usual, member) for member, code in zip(lane.members, column.tolist(), strict=True) if member != rank
    ]
    return min(others)[1] if others else None


def _differ_text(count: int) -> str:
    return "" if not count else ", 1 differs" if count == 1 else f", {count:,} differ"


def current_lane(session: Session, incident: Incident) -> Lane:
    """The selected group."""
    return incident.lanes[session.lane % len(incident.lanes)]


def current_seq(session: Session, incident: Incident) -> int:
    """The selected operation, else the one in which the group stands."""
    lane = current_lane(session, incident)
    unseen = unseen_operation(incident, lane)
    last = lane.first_seq + lane.row.shape[1] - 1 if unseen is None else unseen.seq
    wanted = session.seq if session.seq is not None else last if unseen is not None else incident.stands_at(lane)
    return int(max(lane.first_seq, min(wanted, last)))


class CollectiveRows:
    """A line per rank, built when painted, then the stacks as a tree."""

    def __init__(self, session: Session, incident: Incident, tree: list[Row]) -> None:
        lane = current_lane(session, incident)
        column = current_seq(session, incident) - lane.first_seq
        self._unseen = unseen_operation(incident, lane) if column == lane.row.shape[1] else None
        self._session, self._incident, self._members = session, incident, lane.members
        self._state_width = len(GLYPHS[ENDED].label) + 2 if incident.is_over else _STATE
        self._key = lane.group, current_seq(session, incident)
        none = np.full(len(lane.members), -1)
        self._at, signature = (lane.row[:, column], lane.signature[:, column]) if self._unseen is None else (none, none)
        self._is_other = (signature >= 0) & (signature != usual_signature(signature))
        self._is_recorded = bool((self._at >= 0).any()) or self._unseen is not None
        self._is_unknown = (self._at < 0) & lane.is_silent
        is_absent = (self._at < 0) & ~lane.is_silent & self._is_recorded
        if self._unseen is not None:
            is_absent &= np.isin(lane.members, list(self._unseen.awaited))
        self._is_p2p = incident.is_p2p(lane)
        if self._is_p2p:  # a rank may have fewer sends and receives than others
            is_absent = np.zeros(len(self._at), bool)
            places = incident.left_out(lane)
            is_absent[[place for place, at in places.items() if at == column]] = True
        self._is_absent, self._is_mixed = is_absent, bool(self._is_other.any())
        self._problems = np.flatnonzero(self._is_other | (is_absent & (not incident.is_running))) + 1
        tables = (
            (incident.run.ranks[rank].operations, int(at)) for rank, at in zip(lane.members, self._at, strict=True)
        )
        self._ahead_ns = incident.clock_offsets(lane)
        times = (
            int(table["created_ns"][at] - ahead)
            for (table, at), ahead in zip(tables, self._ahead_ns, strict=True)
            if at >= 0 and table["created_ns"][at]
        )
        self._first_ns = min(times, default=0)
        self._tail = [row(), head("merged stacks"), *tree]

    def __len__(self) -> int:
        return 1 + len(self._members) + len(self._tail)

    def row(self, index: int, width: int) -> Row:
        place = index - 1
        if place < 0:
            return head(f"{'rank':>6}  {'state':<{self._state_width}}{self._lag('lag', width)}    operation, call site")
        if place >= len(self._members):
            return self._tail[place - len(self._members)]
        rank, at = self._members[place], int(self._at[place])
        op = self._incident.run.operation(rank, at) if at >= 0 else None
        if not self._is_recorded:
            return row(f" {rank:>5}  not recorded on any rank", link=RowLink(screen=6, rank=rank))
        if self._unseen is not None and rank in self._unseen.waiters:
            return self._unseen_row(rank, self._unseen, width)
        if op is None and not self._is_absent[place]:
            is_at_fault = rank in self._incident.top.culprits
            what: TextSpan = ("unknown", Role.WARN) if self._is_unknown[place] else ("none", Role.PLAIN)
            state = self._incident.states.get(rank)
            if self._is_unknown[place] and state is not None and state.kind in (RankState.DEAD, RankState.FROZEN):
                what = (f"unknown, {state.kind}", Role.BAD)
            mark = (f"{CULPRIT if is_at_fault else ' '}{rank:>5}  ", Role.BAD if is_at_fault else Role.PLAIN)
            return row(mark, what, link=RowLink(screen=6, rank=rank))
        return self._rank_row(place, op, width)

    def _rank_row(self, place: int, op: Operation | None, width: int) -> Row:
        incident, rank, is_other = self._incident, self._members[place], bool(self._is_other[place])
        first_ns = self._first_ns + self._ahead_ns[place]
        is_at_fault = rank in incident.top.culprits
        mark = "*" if rank == self._session.pinned else CULPRIT if is_at_fault else " "
        mark_role: Role = Role.BAD if is_at_fault else Role.BOLD
        link = RowLink(screen=6, rank=rank)
        if op is None:
            return self._absent_row(rank, (mark, mark_role), width)
        lag = self._lag(
            f"{round((op.created_ns - first_ns) / 1e6):,} ms" if self._first_ns and op.created_ns else "", width
        )
        state_text = incident.word_of(rank, int(self._at[place]))
        is_failed = state_text == GLYPHS[FAILED].label
        role: Role = (
            Role.BAD
            if is_other
            else Role.WARN
            if is_failed
            else Role.PLAIN
            if op.retired or incident.is_over
            else Role.GOOD
        )
        splits = incident.run.ranks[rank].splits.get(self._key)
        shown = "" if splits is None else f"  {splits_text(splits)}"
        other = "  # " if is_other else "    "
        frame = user_frame(op.frames, incident.run.wrappers)
        room = width - 8 - self._state_width - len(lag) - len(other)
        what, line = _what_and_place(op, frame, room, is_whole=is_other or self._is_mixed)
        return row((f"{mark}{rank:>5}  ", mark_role), (f"{state_text:<{self._state_width}}", role), lag,
                   (f"{other}{what}", role if is_other else Role.PLAIN), (line, Role.DIM), (shown, Role.DIM), link=link,
                   is_problem=is_other, at=_at(frame))  # fmt: skip

    def _unseen_row(self, rank: int, unseen: Unseen, width: int) -> Row:
        """A rank whose stack alone shows that it waits in the operation."""
        state = self._incident.states.get(rank)
        frame = state.frame if state is not None else None
        start = f"{self._lag('', width)}    {unseen.op}"
        room = width - 8 - self._state_width - len(start)
        line = _place(frame, room) or _cut(frame, room)
        glyph = GLYPHS[PENDING]
        return row((f" {rank:>5}  ", Role.PLAIN), (f"{glyph.label:<{self._state_width}}", glyph.role), start,
                   (line, Role.DIM), link=RowLink(screen=6, rank=rank), at=_at(frame))  # fmt: skip

    def _absent_row(self, rank: int, mark: TextSpan, width: int) -> Row:
        """A rank that has not issued the operation: of a slow job it is late, of one that goes on it will, else it is absent."""
        state = self._incident.states.get(rank)
        frame = state.frame if state is not None else None
        glyph = _NOT_YET if self._incident.is_running else GLYPHS[LATE if self._incident.is_slow else ABSENT]
        wait, does = self._incident.wait_of.get(rank), self._incident.doing(rank)
        if wait is not None and state is not None and state.kind == RankState.IN_COLLECTIVE and not wait.operation.p2p:
            number = f" #{wait.operation.seq}" if wait.operation.seq >= 0 else ""
            verb = "failed" if rank in self._incident.failed else "was" if self._incident.is_past((rank,)) else ""
            does = f"{verb} in {wait.operation.op}{number}".strip()
        start = f"{self._lag('', width)}    {does}"
        line = _place(frame, width - 8 - self._state_width - len(start))
        if frame is not None and not line:  # the state's words go before the line of a rank that others wait for
            start = f"{self._lag('', width)}  "
            line = _place(frame, width - 8 - self._state_width - len(start))
        label = f"{glyph.label:<{self._state_width}}"
        return row((f"{mark[0]}{rank:>5}  ", mark[1]), (label, glyph.role), start, (line, Role.DIM),
                   link=RowLink(screen=6, rank=rank), is_problem=glyph is not _NOT_YET, at=_at(frame))  # fmt: skip

    def _lag(self, text: str, width: int) -> str:
        """The column of lags, for which a narrow terminal has room only where they are the fault."""
        return f"{text:>9}" if width >= _WITH_LAG or self._incident.is_slow else ""

    def next_problem(self, index: int, direction: int) -> int | None:
        later = (
            self._problems[self._problems > index] if direction > 0 else self._problems[self._problems < index][::-1]
        )
        return int(later[0]) if len(later) else None

    def place_of_rank(self, rank: int) -> int | None:
        """Row index of a rank."""
        return self._members.index(rank) + 1 if rank in self._members else None


def _at(frame: Frame | None) -> tuple[str, int] | None:
    return None if frame is None else (frame.file, frame.line)


def _place(frame: Frame | None, room: int) -> str:
    """A call site: in full, else without its folder, its function, the start of its name; all of it is copied."""
    if frame is None:
        return ""
    short = f"  {frame.file.rpartition('/')[2]}:{frame.line} in {frame.function}"
    fits = next((text for text in (f"  {frame}", short) if len(text) <= room), None)
    return piece(
        fits if fits is not None else f"  {place_text(frame.place.rpartition('/')[2], room - 2)}".rstrip(), f"  {frame}"
    )


def _cut(frame: Frame | None, room: int) -> str:
    """The mark of a call site for which there is no room."""
    return piece(f"{MORE_RIGHT:>{max(room, 2)}}", f"  {frame}") if frame is not None else ""


def _what_and_place(op: Operation, frame: Frame | None, room: int, *, is_whole: bool) -> tuple[str, str]:
    """The operation and its call site: unless `is_whole`, dtype and sizes, which the title has, go before the line's number."""
    whole = signature_text(op)
    for what in (whole,) if is_whole or frame is None else (whole, whole.removesuffix(f" {op.dtypes}"), op.op):
        place = _place(frame, room - len(what))
        if frame is None or f"{frame.file.rpartition('/')[2]}:{frame.line}" in place:
            return piece(what, whole), place
    return piece(what, whole), place or _cut(frame, room - len(what))
