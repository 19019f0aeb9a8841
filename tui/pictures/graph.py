"""Who waits for whom as a small graph: the waiting on the left, arrows, the awaited on the right. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from titan_ckpt.console.ranks import ranks_text
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.tui.data.incident import Incident
from titan_ckpt.tui.rows import CULPRIT, Role, Row, TextSpan, piece, ranks_named, row, truncate

_MOST_LINES, _MOST_DEPTH, _FEW_LEAVES = 40, 12, 4
_CULPRIT = re.compile(rf"{CULPRIT}\d+")


def graph_rows(incident: Incident, edges: Sequence[Edge], width: int) -> Iterator[Row]:
    """A drawing for each rank that waits for no other, culprits first, then each cycle; the tree beside it has the reasons."""
    waiters: dict[int, set[int]] = defaultdict(set)
    for edge in edges:
        waiters[edge.awaited].add(edge.waiter)
    waiting = {edge.waiter for edge in edges}
    culprits = set(incident.top.culprits)
    roots = sorted((rank for rank in waiters if rank not in waiting), key=lambda rank: (rank not in culprits, rank))
    cycle_roots = sorted((rank for rank in waiters if rank in waiting), key=lambda rank: (rank not in culprits, rank))
    drawn: set[int] = set()
    lines: list[tuple[str, str]] = []
    for root in [*roots, *cycle_roots]:
        if root not in drawn and len(lines) < _MOST_LINES:
            before = set(drawn)
            drawing = _draw(root, waiters, culprits, drawn, 0)[0]
            words = _in_words(incident, waiters, drawn - before)
            lines += [*((line, words) for line in drawing), ("", "")]
    for line, words in lines[:_MOST_LINES]:
        yield row(*((piece(text, ""), role) for text, role in _coloured(truncate(line, width))), piece("", words))
    if not lines:
        yield row(("no rank is seen to wait for another", Role.DIM))


def _in_words(incident: Incident, waiters: Mapping[int, set[int]], ranks: Iterable[int]) -> str:
    """The waits of a drawing as text, for `y`: a line of a drawing says nothing without the others."""

    def words(rank: int, waiting: Sequence[int]) -> str:
        verb = "waited" if incident.is_past(waiting) else "waits" if len(waiting) == 1 else "wait"
        return f"{ranks_named(waiting, 8)} {verb} for rank {rank}"

    return "; ".join(words(rank, sorted(waiters[rank])) for rank in sorted(ranks) if waiters.get(rank))


def _draw(
    rank: int, waiters: dict[int, set[int]], culprits: set[int], drawn: set[int], depth: int
) -> tuple[list[str], int]:
    """Lines of equal length that end with `rank` on one of them, and which one that is."""
    drawn.add(rank)
    name = f"{CULPRIT if rank in culprits else ''}{rank}"
    before = waiters.get(rank, set())
    again = sorted(before & drawn)
    new = sorted(before - drawn) if depth < _MOST_DEPTH else []
    leaves = [other for other in new if other not in waiters]
    blocks = [
        _draw(other, waiters, culprits, drawn, depth + 1) for other in new if other in waiters and other not in drawn
    ]
    drawn.update(leaves)
    if len(leaves) <= _FEW_LEAVES:
        blocks += [([str(leaf)], 0) for leaf in leaves]
    else:
        blocks.append(([ranks_text(leaves, 3)], 0))
    if again:
        blocks.append(([f"{ranks_text(again, 3)} again"], 0))
    if not blocks:
        return [name], 0
    return _joined(blocks, name)


def _joined(blocks: Sequence[tuple[list[str], int]], name: str) -> tuple[list[str], int]:
    """Blocks below each other, their ends joined by a bracket that leads to `name`."""
    width = max(len(line) for lines, _ in blocks for line in lines)
    texts: list[str] = []
    ends: list[int] = []
    for lines, end in blocks:
        ends.append(len(texts) + end)
        texts += [line if i != end else f"{line} {'─' * (width - len(line))}" for i, line in enumerate(lines)]
    middle = (ends[0] + ends[-1]) // 2
    found = []
    for i, text in enumerate(texts):
        is_end, is_inside = i in ends, ends[0] <= i <= ends[-1]
        filled = f"{text:{'─' if is_end else ' '}<{width + 1}}"
        arrow = f"▶ {name}" if i == middle else " " * (len(name) + 2)
        found.append(f"{filled}{_joint(i, ends, is_end=is_end, is_inside=is_inside)}{arrow}")
    return found, middle


def _joint(line: int, ends: Sequence[int], *, is_end: bool, is_inside: bool) -> str:
    if len(ends) == 1:
        return "──" if is_end else "  "
    middle = (ends[0] + ends[-1]) // 2
    if not is_inside:
        return "  "
    if not is_end:
        return " ├" if line == middle else " │"
    corner = "┐" if line == ends[0] else "┘" if line == ends[-1] else "┤"
    return f"─{'┴' if line == middle == ends[-1] else '┬' if line == middle == ends[0] else '┼' if line == middle else corner}"


def _coloured(text: str) -> Iterator[TextSpan]:
    """The culprits in their colour, arrows dim."""
    at = 0
    for found in _CULPRIT.finditer(text):
        yield text[at : found.start()], Role.PLAIN
        yield found[0], Role.BAD
        at = found.end()
    yield text[at:], Role.PLAIN
