"""Screen 3: one operation on all ranks of its group: state, lag, sizes, dtype, call site, and the stacks that hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from textual.binding import Binding, BindingType

from titan_ckpt.debug.align import Lane
from titan_ckpt.debug.logs import user_frame
from titan_ckpt.debug.records import Frame, Operation
from titan_ckpt.tui.data_grid import usual_signature
from titan_ckpt.tui.data_incident import SITUATIONS, Incident
from titan_ckpt.tui.pane import Pane
from titan_ckpt.tui.rows import Role, Row, RowList, Rows, Target, head, ranks_text, row
from titan_ckpt.tui.session import Session


class CollectivePane(Pane):
    """One operation."""

    number = 3
    label = "Collective"
    keys = (("< >", "operation before, after"), ("d", "difference to the pinned rank"), ("enter", "the rank's waits"))
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("less_than_sign", "step(-1)", show=False), Binding("greater_than_sign", "step(1)", show=False),
        Binding("d", "difference", show=False),
    ]  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._tree_key: tuple[object, ...] = ()
        self._tree_rows: list[Row] = []

    def state(self) -> tuple[object, ...]:
        return (*super().state(), self.session.lane, self.session.seq)

    def title(self) -> str:
        incident = self.session.incident.value
        if incident is None or not incident.lanes:
            return "no operations were recorded"
        lane = current_lane(self.session, incident)
        return f"group {incident.run.groups[lane.group]} · operation #{current_seq(self.session, incident)}"

    def make_rows(self, width: int) -> Rows:
        incident = self.session.incident.value
        if incident is None or not incident.lanes:
            return RowList([row(self.session.incident.text if incident is None else "no operations were recorded")])
        rows = CollectiveRows(self.session, incident, self._tree(incident, width))
        return RowList(rows.row(i, width) for i in range(len(rows))) if self.filter_text else rows

    def _tree(self, incident: Incident, width: int) -> list[Row]:
        key = (self.session.incident.version, self.session.lane, width)
        if self._tree_key != key:
            members = current_lane(self.session, incident).members
            self._tree_key, self._tree_rows = key, list(tree_rows(incident, members, width))
        return self._tree_rows

    def select(self, target: Target) -> None:
        self.update_rows()
        rows = self.body.rows
        place = (
            rows.place_of_rank(target.rank) if isinstance(rows, CollectiveRows) and target.rank is not None else None
        )
        if place is not None:
            self.body.move_to(place)

    def action_step(self, by: int) -> None:
        incident = self.session.incident.value
        if incident is not None and incident.lanes:
            lane = current_lane(self.session, incident)
            last = lane.first_seq + lane.row.shape[1] - 1
            self.session.seq = max(lane.first_seq, min(current_seq(self.session, incident) + by, last))
            self.update_rows()

    def action_difference(self) -> None:
        incident, current, pinned = self.session.incident.value, self.body.current, self.session.pinned
        rank = current.target.rank if current and current.target else None
        if incident is None or rank is None or pinned is None or rank == pinned:
            self.post_message(self.Say("pin a rank with space, put the cursor on another one, then d"))
            return
        self.post_message(self.Say(difference(self.session, incident, pinned, rank)))


def current_lane(session: Session, incident: Incident) -> Lane:
    """The selected group."""
    return incident.lanes[session.lane % len(incident.lanes)]


def current_seq(session: Session, incident: Incident) -> int:
    """The selected operation; without one the first that not all members did."""
    lane = current_lane(session, incident)
    last = lane.first_seq + lane.row.shape[1] - 1
    if session.seq is not None:
        return int(max(lane.first_seq, min(session.seq, last)))
    missing = np.flatnonzero((lane.row < 0).any(axis=0))
    return lane.first_seq + int(missing[-1]) if len(missing) else int(last)


def operation_of(session: Session, incident: Incident, rank: int) -> Operation | None:
    """What a rank issued under the selected number."""
    lane, seq = current_lane(session, incident), current_seq(session, incident)
    at = int(lane.row[lane.members.index(rank), seq - lane.first_seq]) if rank in lane.members else -1
    return incident.run.operation(rank, at) if at >= 0 else None


class CollectiveRows:
    """A line per rank, made as it is painted, then the stacks as a tree."""

    def __init__(self, session: Session, incident: Incident, tree: list[Row]) -> None:
        lane = current_lane(session, incident)
        column = current_seq(session, incident) - lane.first_seq
        self._session, self._incident, self._members = session, incident, lane.members
        self._at, signature = lane.row[:, column], lane.signature[:, column]
        self._is_other = (signature >= 0) & (signature != usual_signature(signature))
        self._problems = np.flatnonzero(self._is_other | (self._at < 0)) + 1
        tables = (
            (incident.run.ranks[rank].operations, int(at)) for rank, at in zip(lane.members, self._at, strict=True)
        )
        times = (int(table["created_ns"][at]) for table, at in tables if at >= 0)
        self._first_ns = min((time for time in times if time), default=0)
        self._head = head(f"{'rank':>6}  {'state':<11} {'lag':>9}  what, where")
        self._tail = [row(), head("where they are"), *tree]

    def __len__(self) -> int:
        return 1 + len(self._members) + len(self._tail)

    def row(self, index: int, width: int) -> Row:  # noqa: ARG002 (the protocol's)
        place = index - 1
        if place < 0:
            return self._head
        if place >= len(self._members):
            return self._tail[place - len(self._members)]
        rank, at = self._members[place], int(self._at[place])
        op = self._incident.run.operation(rank, at) if at >= 0 else None
        return _rank_row(self._session, self._incident, rank, op, self._first_ns, bool(self._is_other[place]))

    def next_problem(self, index: int, direction: int) -> int | None:
        later = (
            self._problems[self._problems > index] if direction > 0 else self._problems[self._problems < index][::-1]
        )
        return int(later[0]) if len(later) else None

    def place_of_rank(self, rank: int) -> int | None:
        """The row of a rank."""
        return self._members.index(rank) + 1 if rank in self._members else None


def _rank_row(
    session: Session, incident: Incident, rank: int, op: Operation | None, first_ns: int, is_other: bool
) -> Row:
    mark = "*" if rank == session.pinned else " "
    target = Target(screen=6, rank=rank)
    if op is None:
        state = incident.states.get(rank)
        doing = SITUATIONS[state.kind][2] if state is not None else "unknown"
        place = f", {state.frame}" if state is not None and state.frame is not None else ""
        return row((f"{mark}{rank:>5}  ", "bold"), ("absent     ", "bad"), f"{'':>9}  {doing}{place}",
                   target=target, is_problem=True)  # fmt: skip
    lag = f"{(op.created_ns - first_ns) / 1e6:,.0f} ms" if first_ns and op.created_ns else ""
    role: Role = "bad" if is_other else "good" if not op.retired else ""
    frame = user_frame(op.frames, incident.run.wrappers)
    place = f"  {frame}" if frame is not None else ""
    state_text = "done" if op.retired or op.state == "completed" else op.state
    what: Role = "bad" if is_other else ""
    return row((f"{mark}{rank:>5}  ", "bold"), (f"{state_text:<11}", role), f"{lag:>9}  ",
               (" ".join(_signature(op)), what), (place, "dim"), target=target, is_problem=is_other)  # fmt: skip


def _signature(op: Operation) -> tuple[str, str, str]:
    return (op.op, op.sizes, op.dtypes)


def difference(session: Session, incident: Incident, a: int, b: int) -> str:
    """What two ranks did differently under this number."""
    first, second = operation_of(session, incident, a), operation_of(session, incident, b)
    if first is None or second is None:
        return f"rank {a if first is None else b} did not issue this operation"
    names = ("operation", "sizes", "dtype")
    pairs = zip(names, _signature(first), _signature(second), strict=True)
    other = [f"{name}: rank {a} {x}, rank {b} {y}" for name, x, y in pairs if x != y]
    places = [str(user_frame(op.frames, incident.run.wrappers) or "?") for op in (first, second)]
    other += [f"call site: rank {a} {places[0]}, rank {b} {places[1]}"] if places[0] != places[1] else []
    return "; ".join(other) or f"ranks {a} and {b} did the same"


def tree_rows(incident: Incident, members: tuple[int, ...], width: int) -> Iterator[Row]:
    """The main threads' stacks, outermost first, each node with the ranks that are there; ranks without a stack last."""
    stacks: dict[int, tuple[Frame, ...]] = {}
    for rank in members:
        snapshots = incident.run.ranks[rank].stacks
        main = snapshots[-1].main if snapshots else None
        if main is not None:
            stacks[rank] = tuple(reversed(main.frames))
    yield from _node_rows(stacks, 0, width)
    silent = [rank for rank in members if rank not in stacks]
    if silent:
        yield row(("  no stack: ", "warn"), f"ranks {ranks_text(silent)}")


def _node_rows(stacks: dict[int, tuple[Frame, ...]], depth: int, width: int) -> Iterator[Row]:
    nodes: dict[Frame, dict[int, tuple[Frame, ...]]] = defaultdict(dict)
    for rank, frames in stacks.items():
        if depth < len(frames):
            nodes[frames[depth]][rank] = frames
    for frame, below in sorted(nodes.items(), key=lambda node: min(node[1])):
        place = f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"
        ranks = ranks_text(sorted(below), 8)
        yield row(
            f"  {' ' * min(depth, 20)}{place}  ", (f"[{ranks}]", "note"), target=Target(screen=6, rank=min(below))
        )
        if frame.text:
            yield row((f"  {' ' * min(depth, 20)}  > {frame.text}"[:width], "dim"))
        yield from _node_rows(below, depth + 1, width)
