"""Screen 6: the wait graph as trees, rooted at ranks that wait for no other rank; then wait cycles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from titan_ckpt.debug.diagnosis.wait_graph import Edge
from titan_ckpt.debug.incident.kinds import RankState
from titan_ckpt.tui.data.incident import SITUATIONS, Incident, frame_text
from titan_ckpt.tui.rows import Role, Row, RowLink, RowList, Rows, counted, head, row, truncate
from titan_ckpt.tui.widgets.pane import Pane

MAX_WAITERS = 200


class WaitsPane(Pane):
    """The wait-for graph."""

    number = 6
    label = "Waits"
    keys = (("enter", "open the operation"),)

    def title(self) -> str:
        incident = self.session.incident.value
        if incident is None:
            return ""
        origin = " inferred from the verdict" if incident.is_chain else ""
        return f"{counted(len(incident.edges), 'wait')}{origin} · causes first, waiting ranks below"

    def make_rows(self, width: int) -> Rows:
        incident = self.session.incident.value
        if incident is None:
            return self.no_incident(width)
        return RowList(wait_rows(incident, width))

    def select(self, link: RowLink) -> None:
        self.update_rows()
        self.move_to_rank(link.rank)


def wait_rows(incident: Incident, width: int) -> Iterator[Row]:
    """A tree per rank that others wait for and that waits for none; then wait cycles; then ranks in no wait."""
    waiters: dict[int, list[Edge]] = defaultdict(list)
    for edge in incident.edges:
        waiters[edge.awaited].append(edge)
    waiting = {edge.waiter for edge in incident.edges}
    shown: set[int] = set()
    for root in sorted(rank for rank in waiters if rank not in waiting):
        yield from _tree(incident, root, waiters, shown, width)
    held_up = _reached(waiters, shown)
    cycles = sorted(waiting - held_up)
    if cycles:
        yield head("wait cycle: each rank waits for the next")
    for rank in cycles:
        if rank not in shown:
            yield from _tree(incident, rank, waiters, shown, width)
    rest = sorted(set(incident.states) - held_up - waiting)
    if rest:
        yield head("in no observed wait")
    for rank in rest[:MAX_WAITERS]:
        yield _rank_row(incident, rank, 0, "", width)
    if len(rest) > MAX_WAITERS:
        yield row((f"  and {counted(len(rest) - MAX_WAITERS, 'more rank')}", Role.DIM))


def _reached(waiters: Mapping[int, list[Edge]], roots: set[int]) -> set[int]:
    """`roots` and all ranks that wait for one of them, directly or through others."""
    reached, left = set(roots), list(roots)
    while left:
        found = {edge.waiter for edge in waiters.get(left.pop(), ())} - reached
        reached |= found
        left += found
    return reached


def _tree(
    incident: Incident, root: int, waiters: Mapping[int, list[Edge]], shown: set[int], width: int
) -> Iterator[Row]:
    """Depth first, without recursion: a chain may contain every rank."""
    stack: list[tuple[int, int, str]] = [(root, 0, "")]
    while stack:
        rank, depth, why = stack.pop()
        if rank in shown:
            yield row(
                f"  {'  ' * min(depth, 12)}rank {rank} {why}", (" (above)", Role.DIM), link=RowLink(screen=6, rank=rank)
            )
            continue
        shown.add(rank)
        yield _rank_row(incident, rank, depth, why, width)
        edges = sorted(waiters.get(rank, []), key=lambda edge: -edge.waiter)
        if len(edges) > MAX_WAITERS:
            yield row((f"  {'  ' * (depth + 1)}and {counted(len(edges) - MAX_WAITERS, 'more rank')}", Role.DIM))
        stack += [(edge.waiter, depth + 1, _why(incident, edge)) for edge in edges[-MAX_WAITERS:]]


def _why(incident: Incident, edge: Edge) -> str:
    sure = " (inferred)" if edge.is_inferred else ""
    if incident.states[edge.waiter].kind == RankState.IN_INIT and edge.seq < 0:
        return f"waits in init{sure}"
    group = f" of group {incident.run.groups[edge.group]}" if edge.group >= 0 else ""
    kind = "send/recv" if edge.is_p2p else "collective"
    number = f" #{edge.seq}" if edge.seq >= 0 else ""
    return f"waits in {kind}{number}{group}{sure}"


def _rank_row(incident: Incident, rank: int, depth: int, why: str, width: int) -> Row:
    state = incident.states[rank]
    glyph = SITUATIONS[state.kind]
    detail = f" ({state.detail})" if state.detail else ""
    place = f"  {frame_text(state.frame)}" if state.frame else ""
    is_culprit = rank in incident.top.culprits
    indent = 2 * min(depth, 12)
    return row(" " * (indent + 2), (f"{glyph.char} rank {rank} ", glyph.role),
               ("culprit: " if is_culprit else "", Role.BAD),
               truncate(f"{why or glyph.label}{detail}{place}", max(width - 14 - indent - 9 * is_culprit, 20)),
               link=RowLink(screen=3, group=incident.top.group, seq=incident.top.seq, rank=rank),
               is_problem=is_culprit or (depth == 0 and glyph.role == Role.BAD))  # fmt: skip
