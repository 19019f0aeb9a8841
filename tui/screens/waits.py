"""Screen 6: the wait graph as trees, rooted at ranks that wait for no other rank; then wait cycles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.kinds import RankState, VerdictKind
from titan_ckpt.debug.incident.records import Frame
from titan_ckpt.debug.incident.waits import Wait
from titan_ckpt.tui.data.grid import ENDED, ENDED_TEXT, GLYPHS
from titan_ckpt.tui.data.incident import HALTED, SITUATIONS, Incident, frame_text
from titan_ckpt.tui.data.standing import fault_elsewhere, kind_text
from titan_ckpt.tui.pictures.details import rank_rows
from titan_ckpt.tui.pictures.graph import graph_rows
from titan_ckpt.tui.rows import (
    CULPRIT,
    Role,
    Row,
    RowLink,
    RowList,
    Rows,
    counted,
    head,
    piece,
    ranks_begun,
    row,
    with_place,
)
from titan_ckpt.tui.widgets.pane import Pane
from titan_ckpt.tui.widgets.part import Part, Space

MAX_WAITERS = 200
LEAST_FOLDED = 5
_NARROW = 50
_ENDED = ((" open when recorded,", 5), (f" {GLYPHS[ENDED].label}", 0))  # `ENDED_TEXT`, as the parts of `with_place`


class WaitsPane(Pane):
    """The wait-for graph."""

    number = 6
    label = "Waits"
    purpose = "who waits for whom"
    keys = (("enter", "open the operation"), ("n", "next problem"), (":", "go to"), ("e", "edit"), ("w", "panes"))
    parts = (Part(name="graph", is_of_line=False), Part(name="details"))

    def part_rows(self, space: Space) -> Iterable[Row]:
        incident, current = self.session.incident.value, self.body.current
        if incident is None:
            return ()
        if space.name == "graph":
            return graph_rows(incident, incident.edges, space.width)
        rank = current.link.rank if current is not None and current.link is not None else None
        return rank_rows(incident, rank, space.width) if rank is not None else ()

    def title(self) -> str:
        incident = self.session.incident.value
        if incident is None:
            return ""
        if not incident.edges:
            return "no rank is seen to wait for another one"
        is_inferred = all(_is_inferred(incident, edge) for edge in incident.edges)
        origin = ", inferred from the verdict" if is_inferred else ""
        waiting = len({edge.waiter for edge in incident.edges})
        verb = "waited" if incident.is_past(edge.waiter for edge in incident.edges) else f"wait{'s' * (waiting == 1)}"
        return f"{counted(waiting, 'rank')} {verb} for others{origin} · causes first, waiting ranks below"

    def make_rows(self, width: int) -> Rows:
        incident = self.session.incident.value
        if incident is None:
            return self.no_incident(width)
        return RowList(wait_rows(incident, width))


def wait_rows(incident: Incident, width: int) -> Iterator[Row]:
    """A tree per rank that others wait for and that waits for none; then wait cycles; then ranks in no wait."""
    waiters: dict[int, list[Edge]] = defaultdict(list)
    edges = incident.edges
    for edge in edges:
        waiters[edge.awaited].append(edge)
    waiting = {edge.waiter for edge in edges}
    shown: set[int] = set()
    culprits = set(incident.top.culprits)
    for root in sorted(
        (rank for rank in waiters if rank not in waiting), key=lambda rank: (rank not in culprits, rank)
    ):
        yield from _tree(incident, root, waiters, shown, width)
    held_up = shown | incident.held_up_by(shown)
    cycles = sorted(waiting - held_up)
    if cycles:
        yield head("wait cycle: each rank waits for the one above it, the first for one below")
    for rank in cycles:
        if rank not in shown:
            yield from _tree(incident, rank, waiters, shown, width)
    yield from _rest_rows(incident, sorted(set(incident.states) - held_up - waiting), width)


def _rest_rows(incident: Incident, rest: list[int], width: int) -> Iterator[Row]:
    """Ranks in no wait for another one: those that wait all the same, then the others."""
    if not rest:
        return
    alone = {rank: wait for rank, wait in incident.wait_of.items() if incident.states[rank].kind not in HALTED}
    is_calm = incident.top.verdict in (VerdictKind.HEALTHY, VerdictKind.RUNNING)
    for is_waiting, title in ((True, "waiting, for whom is not known"), (False, "in no observed wait")):
        ranks = [r for r in rest if _waits_alone(incident, r) == is_waiting]
        if ranks:
            yield head("as last seen" if is_calm else title)
        yield from _alike_rows(incident, ranks, alone, width)


def _waits_alone(incident: Incident, rank: int) -> bool:
    """Whether a rank waits, as far as is known for nobody. One that is frozen or dead waits for nothing."""
    kind = incident.states[rank].kind
    return kind not in HALTED and (rank in incident.wait_of or kind.is_waiting)


def _alike_rows(incident: Incident, ranks: list[int], alone: Mapping[int, Wait], width: int) -> Iterator[Row]:
    """A line per rank, and one for many that were seen doing the same."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank in ranks:
        wait, state = alone.get(rank), incident.states[rank]
        is_culprit = rank in incident.top.culprits
        seen = (wait.text if wait else "", state.kind, state.detail, state.frame)
        alike[(rank,) if is_culprit else seen].append(rank)
    singles = sorted(rank for group in alike.values() if len(group) < LEAST_FOLDED for rank in group)
    for group in alike.values():
        if len(group) >= LEAST_FOLDED:
            state, wait = incident.states[group[0]], alone.get(group[0])
            glyph = SITUATIONS[state.kind]
            what = (
                incident.doing(group[0])
                if wait is None
                else f"{wait.text} {ENDED_TEXT}"
                if incident.is_over
                else f"{'waited' if incident.is_past(group) else 'wait'} in {wait.text}"
            )
            start = f"{glyph.char} {len(group):,} ranks: "
            text = _fitting([(f"{ranks_begun(group, 3)} · {what}", 0)], state.frame, width - len(start) - 2)
            yield row("  ", (start, glyph.role), text, link=RowLink(screen=2, rank=group[0]))
    for rank in singles[:MAX_WAITERS]:
        yield _rank_row(incident, rank, 0, None, width, alone.get(rank))
    if len(singles) > MAX_WAITERS:
        yield row((f"  and {counted(len(singles) - MAX_WAITERS, 'more rank')}", Role.DIM))


def _tree(
    incident: Incident, root: int, waiters: Mapping[int, list[Edge]], shown: set[int], width: int
) -> Iterator[Row]:
    """Depth first, without recursion: a chain may contain every rank."""
    stack: list[tuple[int, int, Edge | None]] = [(root, 0, None)]
    while stack:
        rank, depth, edge = stack.pop()
        why = "".join(text for text, _ in _why(incident, edge)) if edge is not None else ""
        if rank in shown:
            yield row(
                f"{_indent(depth, width)}rank {rank} {why}", (" (above)", Role.DIM), link=RowLink(screen=6, rank=rank)
            )
            continue
        shown.add(rank)
        yield _rank_row(incident, rank, depth, edge, width)
        edges, folded = _folded(incident, waiters.get(rank, []), waiters)
        yield from (_fold_row(incident, alike, depth + 1, width) for alike in folded)
        shown.update(edge.waiter for alike in folded for edge in alike)
        if len(edges) > MAX_WAITERS:
            yield row((f"{_indent(depth + 1, width)}and {counted(len(edges) - MAX_WAITERS, 'more rank')}", Role.DIM))
        stack += [(edge.waiter, depth + 1, edge) for edge in edges[-MAX_WAITERS:]]


def _folded(
    incident: Incident, edges: list[Edge], waiters: Mapping[int, list[Edge]]
) -> tuple[list[Edge], list[list[Edge]]]:
    """The waits to show one by one, the highest rank first; and groups of many equal ones of ranks for which nobody waits."""
    alike: dict[tuple[object, ...], list[Edge]] = defaultdict(list)
    texts: dict[tuple[object, ...], tuple[object, ...]] = {}
    for edge in edges:
        state = incident.states[edge.waiter]
        is_leaf = edge.waiter not in waiters and edge.waiter not in incident.top.culprits
        facts = _facts_of(incident, edge) if is_leaf else ()
        if is_leaf and facts not in texts:
            texts[facts] = tuple(_why(incident, edge))
        alike[(edge.waiter,) if not is_leaf else (texts[facts], state.kind, state.frame)].append(edge)
    folded = [group for group in alike.values() if len(group) >= LEAST_FOLDED]
    single = (edge for group in alike.values() if len(group) < LEAST_FOLDED for edge in group)
    return sorted(single, key=lambda edge: -edge.waiter), folded


def _facts_of(incident: Incident, edge: Edge) -> tuple[object, ...]:
    """What the text of a wait follows from: thousands of ranks have equal ones."""
    rank = edge.waiter
    own = rank if rank in incident.failed else -1
    where = edge.awaited, edge.group, edge.seq, edge.is_p2p, edge.is_after, edge.is_inferred
    return *where, incident.states[rank].kind, id(incident.wait_of.get(rank)), incident.is_past((rank,)), own


def _fold_row(incident: Incident, edges: list[Edge], depth: int, width: int) -> Row:
    ranks = [edge.waiter for edge in edges]
    state = incident.states[ranks[0]]
    glyph = SITUATIONS[state.kind]
    start = f"{glyph.char} {len(ranks):,} ranks wait for {edges[0].awaited}: "
    indent = _indent(depth, width)
    parts = [(f"{ranks_begun(ranks, 3)} · ", 0), *_why(incident, edges[0])]
    text = _fitting(parts, state.frame, width - len(start) - len(indent))
    return row(indent, (start, glyph.role), text, link=_link_of(incident, edges[0]))


def _link_of(incident: Incident, edge: Edge) -> RowLink:
    """The operation that a rank waits in."""
    name = incident.group_name(edge.group, is_p2p=edge.is_p2p) if edge.group >= 0 else None
    if name is None or edge.is_p2p:
        return RowLink(screen=2, group=name, rank=edge.waiter)
    seq = edge.seq + edge.is_after if edge.seq >= 0 else None
    return RowLink(screen=3, group=name, seq=seq, rank=edge.waiter)


def _fitting(parts: Sequence[tuple[str, int]], frame: Frame | None, width: int) -> str:
    """A wait and the line of the program, in at most `width` characters; the function's name goes first."""
    if frame is None:
        return with_place(parts, "", max(width, 8))
    whole = f"{''.join(text for text, _ in parts)}  {frame_text(frame).rstrip()}"
    return whole if len(whole) <= width else piece(with_place(parts, frame.place, max(width, 8)), whole)


def _is_inferred(incident: Incident, edge: Edge) -> bool:
    """Whether nothing but the verdict shows a wait: a rank in `init_process_group` is seen there by its stack or its log."""
    return edge.is_inferred and incident.states[edge.waiter].kind != RankState.IN_INIT


def _why(incident: Incident, edge: Edge) -> list[tuple[str, int]]:
    """What a rank waits in, as the parts of `with_place`."""
    sure = [(" (inferred)", 3)] if _is_inferred(incident, edge) else []
    state = incident.states[edge.waiter]
    if state.kind == RankState.IN_INIT and edge.seq < 0:
        return [(f"{'waited' if incident.is_past((edge.waiter,)) else 'waits'} in init", 0), *sure]
    group = [_group_part(incident, incident.group_name(edge.group))] if edge.group >= 0 else []
    if edge.waiter in incident.failed:
        op = incident.run.operation(edge.waiter, incident.failed[edge.waiter])
        return [(f"failed in {op.op} #{op.seq}", 0), *group]
    if incident.is_slow and edge.waiter not in incident.wait_of:  # all that it waited in has ended
        return [(f"waited for rank {edge.awaited} again and again", 0), *group]
    number = "" if edge.seq < 0 or edge.is_p2p else f" after #{edge.seq}" if edge.is_after else f" #{edge.seq}"
    if incident.is_over:
        return [(f"{_operation(incident, edge)}{number}", 0), *_ENDED, *group, *sure]
    verb = "waited" if incident.is_past((edge.waiter,)) else "waits"
    return [(f"{verb} in ", 1), (f"{_operation(incident, edge)}{number}", 0), *group, *sure]


def _operation(incident: Incident, edge: Edge) -> str:
    """The name of the operation that a rank waits in, if it is recorded, or in the stack of one that waits in the same."""
    if edge.is_after:
        alike = (e.waiter for e in incident.edges if (e.group, e.seq, e.is_after) == (edge.group, edge.seq, True))
        return next(filter(None, (incident.states[rank].call for rank in alike)), "a collective")
    wait = incident.wait_of.get(edge.waiter)
    op = wait.operation if wait is not None else None
    if op is not None and edge.is_inferred and edge.seq < 0:
        return f"{op.op} #{op.seq}" if op.seq >= 0 else op.op
    if op is None or edge.group < 0 or op.group != incident.run.groups[edge.group] or op.seq != edge.seq:
        return "send/recv" if edge.is_p2p else "a collective"
    return op.op


def _rank_row(
    incident: Incident, rank: int, depth: int, edge: Edge | None, width: int, pending: Wait | None = None
) -> Row:
    """`pending`: what a rank waits in of which it is not known for whom it waits."""
    state = incident.states[rank]
    if edge is None and pending is None and state.kind in (RankState.IN_COLLECTIVE, RankState.IN_P2P):
        pending = incident.wait_of.get(rank)
    glyph, is_culprit = SITUATIONS[state.kind], rank in incident.top.culprits
    slow = next((e.text for e in incident.top.evidence if incident.is_slow and is_culprit and e.rank == rank), "")
    is_shown = (
        state.frame is not None and not state.kind.may_wait
    )  # by its glyph: on a narrow terminal the line is worth more
    what = (
        _doing_parts(slow or incident.doing(rank), int(is_shown))
        if pending is None
        else _pending_parts(incident, pending)
    )
    parts = [
        *(what if edge is None else _why(incident, edge)),
        (f" ({kind_text(state.detail)})" if state.detail else "", 2),
    ]
    wait = pending if pending is not None else incident.wait_of.get(rank)
    frame = state.frame if pending is None else None
    frame = frame if frame is not None or wait is None else _frame_of(wait)
    named = "" if width < _NARROW else f"culprit{_fault_text(incident, rank)}: "
    mark = f"{CULPRIT} {named}" if is_culprit else ""
    indent = _indent(depth, width)
    return row(indent, (f"{glyph.char} rank {rank} ", Role.BAD if is_culprit else glyph.role), (mark, Role.BAD),
               _fitting(parts, frame, width - 8 - len(str(rank)) - len(indent) - len(mark)),
               link=_link_of(incident, edge) if edge is not None else incident.link_of(incident.top, rank),
               is_problem=is_culprit or (depth == 0 and glyph.role == Role.BAD),
               at=(frame.file, frame.line) if frame else None)  # fmt: skip


def _indent(depth: int, width: int) -> str:
    """What stands before a rank, `depth` waits from the one that all wait for."""
    return " " * (2 + (1 if width < _NARROW else 2) * min(depth, 12))


def _doing_parts(text: str, number: int) -> list[tuple[str, int]]:
    """What a rank did, as the parts of `with_place`, its words of that `number`: before the file's name is cut, `was in` goes."""
    start = next((words for words in ("was in ", "in ") if text.startswith(words)), "")
    return [(start, number + 1), (text.removeprefix(start), number)]


def _fault_text(incident: Incident, rank: int) -> str:
    """The line of the fault, where the rank went on to another one."""
    found = fault_elsewhere(incident, rank)
    return "" if found is None else f", fault at {found[0].rpartition('/')[2]}:{found[1]}"


def _pending_parts(incident: Incident, wait: Wait) -> list[tuple[str, int]]:
    """An operation that did not end, as the parts of `with_place`."""
    op = wait.operation
    number = f" #{op.seq}" if op.seq >= 0 and not op.p2p else ""  # else it counts per pair; the grid counts per rank
    what = " ".join(part for part in (op.sizes, op.dtypes) if part)
    rest = [_group_part(incident, str(op.group)), (f" ({what})" if what else "", 3)]
    if incident.is_over:
        return [(f"{op.op}{number}", 0), *_ENDED, *rest]
    past = "failed" if incident.failed.keys() >= {*wait.ranks} else "waited"
    return [(f"{past if incident.is_past(wait.ranks) else 'waits'} in ", 1), (f"{op.op}{number}", 0), *rest]


def _group_part(incident: Incident, name: str) -> tuple[str, int]:
    """The group of a wait, as a part of `with_place`: the last to go where a rank took the wrong one."""
    return (f" · group {name}", 0) if incident.top.verdict == VerdictKind.WRONG_GROUP else (f" · {name}", 4)


def _frame_of(wait: Wait) -> Frame | None:
    return Frame(file=wait.file, line=wait.line, function="") if wait.file else None
