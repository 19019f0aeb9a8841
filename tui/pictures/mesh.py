"""Rank states laid out by mesh coordinate: the last axis across, the one before it in blocks, the others down. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from titan_ckpt.tui.data.incident import SITUATIONS, Incident
from titan_ckpt.tui.rows import CULPRIT, Role, Row, RowLink, TextSpan, row, truncate

_MOST_RANKS = 4096
MOST_NUMBERED = 64  # ranks


def mesh_axes(incident: Incident) -> list[str]:
    """The axes along which ranks differ, slowest first; [] where the mesh is not known of every rank."""
    places = [record.coordinates for record in incident.run.ranks.values()]
    if not places or not all(places) or len(places) > _MOST_RANKS:
        return []
    return [axis for axis in places[0] if len({place.get(axis, 0) for place in places}) > 1]


def mesh_rows(incident: Incident, width: int) -> Iterator[Row]:
    """A line per combination of the slower axes: `pp0  wwww wwww`; nothing where the mesh is not known."""
    axes = mesh_axes(incident)
    if not axes:
        return
    blocks: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for rank, record in sorted(incident.run.ranks.items()):
        place = tuple(record.coordinates.get(axis, 0) for axis in axes)
        block = place[-2] if len(place) > 1 else 0
        blocks.setdefault(place[:-2], {}).setdefault(block, []).append(rank)
    sizes = " x ".join(
        f"{axis} {1 + max(r.coordinates.get(axis, 0) for r in incident.run.ranks.values())}" for axis in axes
    )
    how = f"{axes[-1]} across{f', a block per {axes[-2]}' if len(axes) > 1 else ''}"
    if len(sizes) + len(how) + 2 > width:
        yield row((truncate(sizes, width), Role.BOLD))
        yield row((truncate(how, width), Role.DIM))
    else:
        yield row((sizes, Role.BOLD), (f"  {how}", Role.DIM))
    labels = {key: " ".join(f"{axis}{i}" for axis, i in zip(axes[:-2], key, strict=True)) for key in blocks}
    before = max(map(len, labels.values())) + 2 if any(labels.values()) else 0
    digits = len(str(max(incident.run.ranks)))
    longest = max(sum((digits + 2) * len(ranks) + 1 for ranks in of_key.values()) for of_key in blocks.values())
    if len(incident.run.ranks) <= MOST_NUMBERED and before + longest <= width:
        for key, of_key in sorted(blocks.items()):
            blank: TextSpan = (" ", Role.PLAIN)
            cells = (span for ranks in of_key.values() for span in (*numbered(incident, ranks, digits), blank))
            first = next(iter(of_key.values()))[0]
            yield row((f"{labels[key]:<{before}}", Role.DIM), *cells, link=RowLink(screen=4, rank=first))
        return
    for key, of_key in sorted(blocks.items()):
        yield from _line(incident, labels[key], before, of_key, width)


def _line(incident: Incident, label: str, before: int, blocks: Mapping[int, list[int]], width: int) -> Iterator[Row]:
    spans: list[TextSpan] = []
    used, first = before, None
    for ranks in blocks.values():
        if used + len(ranks) > width and spans:
            yield row((f"{label:<{before}}", Role.DIM), *spans, link=RowLink(screen=4, rank=first))
            spans, used, label, first = [], before, "", None
        first = ranks[0] if first is None else first
        spans += [cell(incident, rank) for rank in ranks]
        spans.append((" ", Role.PLAIN))
        used += len(ranks) + 1
    yield row((f"{label:<{before}}", Role.DIM), *spans, link=RowLink(screen=4, rank=first))


def numbered(incident: Incident, ranks: Iterable[int], digits: int) -> Iterator[TextSpan]:
    """Ranks with their numbers, each before the character of its state: `0w 1! `."""
    for rank in ranks:
        char, role = cell(incident, rank)
        is_marked = rank in incident.top.culprits
        yield f"{rank:>{digits}}", role if is_marked else Role.DIM
        yield f"{char} ", role


def cell(incident: Incident, rank: int) -> TextSpan:
    """A rank's state as one character; a culprit's is its mark."""
    if rank in incident.top.culprits:
        return CULPRIT, Role.BAD
    glyph = SITUATIONS[incident.states[rank].kind]
    return glyph.char, glyph.role


def strip_cells(incident: Incident, num_cells: int) -> list[TextSpan]:
    """A glyph per rank, the mark of a culprit in place of its own; with more ranks than cells, each cell shows the worst of
    several ranks."""
    culprits = set(incident.top.culprits)
    order = list(SITUATIONS)
    ranks = sorted(incident.states)
    per_cell = max(1, -(-len(ranks) // max(num_cells, 1)))
    cells: list[TextSpan] = []
    for start in range(0, len(ranks), per_cell):
        kinds = [incident.states[rank].kind for rank in ranks[start : start + per_cell]]
        worst = SITUATIONS[min(kinds, key=order.index)]
        is_at_fault = not culprits.isdisjoint(ranks[start : start + per_cell])
        cells.append((CULPRIT, Role.BAD) if is_at_fault else (worst.char, worst.role))
    return cells
