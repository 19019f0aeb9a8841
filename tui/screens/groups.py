"""Screen 4: the process groups: members, progress, ranks that are behind, and the recorded mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from titan_ckpt.console.ranks import ranks_text
from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.incident.kinds import RankState, VerdictKind
from titan_ckpt.tui.data.arrays import Ints
from titan_ckpt.tui.data.grid import DONE, ENDED, ENDED_TEXT, GLYPHS, PENDING, SILENT, usual_signature
from titan_ckpt.tui.data.incident import P2P_NAME, SITUATIONS, Incident
from titan_ckpt.tui.data.p2p import different_halves, missing_halves, ordinal
from titan_ckpt.tui.rows import (
    CULPRIT,
    Role,
    Row,
    RowLink,
    RowList,
    Rows,
    TextSpan,
    counted,
    fitted,
    head,
    ranks_named,
    row,
    truncate,
    wrapped,
)
from titan_ckpt.tui.screens.grid_rows import no_lane_rows
from titan_ckpt.tui.widgets.pane import Pane
from titan_ckpt.tui.widgets.part import Part, Space

MAX_MESH_RANKS = 4096
MAX_MEMBERS = 256
NEWEST = 256
_NARROW = 50


class GroupsPane(Pane):
    """All process groups, and the mesh."""

    number = 4
    label = "Groups"
    purpose = "process groups, the mesh, ranks that are behind"
    keys = (("enter", "open the group's grid"),)
    parts = (Part(name="mesh", is_of_line=False), Part(name="details"))

    def part_rows(self, space: Space) -> Iterable[Row]:
        """The mesh, and the members of the group under the cursor."""
        incident, current = self.session.incident.value, self.body.current
        if incident is None:
            return ()
        if space.name == "mesh":
            return mesh_rows(incident, space.width)
        group = current.link.group if current is not None and current.link is not None else None
        if group is None and incident.lanes:
            group = incident.name_of(incident.lanes[0])
        return member_rows(incident, group, space.width) if group is not None else ()

    def title(self) -> str:
        incident = self.session.incident.value
        return "" if incident is None else f"groups with recorded operations: {len(incident.lanes):,}"

    def begin(self) -> None:
        """Start on the verdict's group, else on the first."""
        incident, rows = self.session.incident.value, self.body.rows
        groups = [link.group if (link := rows.row(i, 80).link) else None for i in range(len(rows))]
        place = incident.lane_of_verdict(incident.top) if incident is not None else None
        wanted = incident.names[place] if incident is not None and place is not None else ""
        self.body.move_to(groups.index(wanted) if wanted in groups else 1)

    def make_rows(self, width: int) -> Rows:
        incident = self.session.incident.value
        if incident is None:
            return self.no_incident(width)
        mesh = () if self.has_parts else (row(), *mesh_rows(incident, width))
        return RowList([*group_rows(incident, width), *mesh])


def collective_lanes(incident: Incident) -> list[Lane]:
    """The lanes of the groups' collectives."""
    return [lane for lane in incident.lanes if not incident.is_p2p(lane)]


def group_rows(incident: Incident, width: int) -> Iterator[Row]:
    """A line per group: progress of its members, ranks that are behind, and ranks that issued something else."""
    lanes, is_narrow = incident.lanes, width < _NARROW
    names = [str(incident.run.groups[lane.group]) + P2P_NAME * incident.is_p2p(lane) for lane in lanes]
    is_named = is_narrow and len(set(names)) == len(names)  # no room for the ranks of groups that have their own names
    longest = min(max([5, *map(len, names)]), (15 if is_named else 10) if is_narrow else 24)
    most = max([5, *(len(ranks_text(lane.members, 4)) for lane in lanes)])
    for_ranks = 0 if is_named else 6 if is_narrow else min(most, max(width // 4, 10))
    columns, numbers = (longest, for_ranks), "" if is_narrow else f"{'all done':>9} {'newest':>7}  "
    yield head(f"{''.join(text for text, _ in _beginning('group', 'ranks', columns))}{numbers}outliers")
    for lane, name in zip(lanes, names, strict=True):
        group = incident.name_of(lane)
        odd = lane_outliers(incident, lane)
        if incident.is_p2p(lane):  # their operations have no common number
            yield row(*_beginning(name, ranks_text(lane.members, 4), columns), " " * len(numbers),
                      *(odd or [("none", Role.DIM)]), link=RowLink(screen=2, group=group),
                      is_problem=any(role == Role.BAD for _, role in odd))  # fmt: skip
            continue
        newest = max((int(n) for n in lane.last), default=-1)
        everybody = min((int(n) - (not done) for n, done in zip(lane.last, lane.done, strict=True)), default=-1)
        last = (GLYPHS[ENDED].label if is_narrow else ENDED_TEXT) if incident.is_over and newest > everybody else "none"
        done = "" if is_narrow else f"{f'#{everybody}' if everybody >= lane.first_seq else '-':>9} {f'#{newest}':>7}  "
        yield row(*_beginning(name, ranks_text(lane.members, 4), columns), done,
                  *(odd or [(last, Role.DIM)]), link=RowLink(screen=2, group=group),
                  is_problem=bool(odd) and not incident.is_running)  # fmt: skip
    if collective_lanes(incident):
        seen = [incident.name_of(lane) for lane in collective_lanes(incident)
                if not incident.run.groups[lane.group].members]  # fmt: skip
        if seen:
            yield row()
            text = f"members not recorded, so these are the ranks seen to use the group: {', '.join(seen)}"
            yield from (row((line, Role.DIM)) for line in wrapped(text, width))
    elif not incident.lanes:
        yield from no_lane_rows(incident, width)


def _beginning(name: str, ranks: str, columns: tuple[int, int]) -> list[tuple[str, Role]]:
    """The name of a group, and its ranks where they have a column."""
    found: list[tuple[str, Role]] = [(fitted(name, columns[0]), Role.BOLD), (" ", Role.PLAIN)]
    return [*found, (fitted(ranks, columns[1]), Role.PLAIN), (" ", Role.PLAIN)] if columns[1] else found


def lane_outliers(incident: Incident, lane: Lane) -> list[TextSpan]:
    """The ranks of a lane that did not do what the others did; of a job that was only slow, those that came late."""
    late = [rank for rank in incident.top.culprits if rank in lane.members] if incident.is_late_in(lane) else []
    odd: list[TextSpan] = [(f"{CULPRIT} {ranks_named(late, 4)} late", Role.BAD)] if late else []
    if incident.is_over:
        return odd
    newest = max((int(n) for n in lane.last), default=-1)
    found = _p2p_outliers(incident, lane) if incident.is_p2p(lane) else outliers(lane, newest, incident)
    return [*odd, *_culprits_first(incident, lane, found)]


def _p2p_outliers(incident: Incident, lane: Lane) -> list[TextSpan]:
    """The ranks that wait in sends and receives, or left one out."""
    awaited = (lane.members[place] for place in missing_halves(lane, incident.edges))
    missing = [rank for rank in awaited if rank in incident.top.culprits]
    waiting = [rank for rank in lane.members if incident.states[rank].kind == RankState.IN_P2P]
    did = "wait for each other" if incident.top.verdict == VerdictKind.P2P_CYCLE else "left one out"
    odd: list[TextSpan] = [(f"{ranks_named(missing, 4)} {did}", Role.BAD)] * bool(missing)
    for place, column in different_halves(incident.run, lane, incident.top).items():
        missing.append(lane.members[place])
        odd.append((f"{ranks_named(missing[-1:])} differs at {ordinal(lane.first_seq + column)}", Role.BAD))
    waiting = [rank for rank in waiting if rank not in missing]
    role: Role = Role.PLAIN if missing else Role.WARN
    return odd + [(f"{ranks_named(waiting, 4)} wait{'s' * (len(waiting) == 1)}", role)] * bool(waiting)


def _culprits_first(incident: Incident, lane: Lane, odd: Sequence[TextSpan]) -> list[TextSpan]:
    """The outliers of a group with those at fault marked, in front: an outlier that is them, else one more."""
    culprits = [rank for rank in incident.top.culprits if rank in lane.members and not incident.is_slow]
    parts = list(odd)
    if culprits:
        name = ranks_named(culprits, 4)
        own = next((part for part in parts if part[0].startswith(f"{name} ")), (f"{name} at fault", Role.BAD))
        parts = [(f"{CULPRIT} {own[0]}", Role.BAD), *(part for part in parts if part != own)]
    return [span for part in parts for span in (("; ", Role.DIM), part)][1:]


def outliers(lane: Lane, newest: int, incident: Incident) -> list[TextSpan]:
    """Ranks that are behind, ranks that issued another operation than most, and ranks of which nothing is known. Only those at
    fault have the colour of a fault; all of them where nobody is known to be, unless the job goes on."""
    culprits = incident.top.culprits

    def role_of(ranks: Sequence[int]) -> Role:
        is_fault = bool(set(ranks) & set(culprits)) if culprits else not incident.is_running
        return Role.BAD if is_fault else Role.PLAIN

    named = partial(ranks_named, limit=4)
    last = {rank: max(int(last), lane.first_seq - 1) for rank, last in zip(lane.members, lane.last, strict=True)}
    silent = [rank for rank, is_silent in zip(lane.members, lane.is_silent, strict=True) if is_silent]
    behind = [rank for rank in sorted(set(last) - set(silent)) if last[rank] < newest]
    parts: list[TextSpan] = []
    if behind:
        parts.append((f"{named(behind)} behind by {newest - min(last[rank] for rank in behind)}", role_of(behind)))
    column = first_mixed(lane.signature[:, -NEWEST:])
    if column is not None:
        codes = lane.signature[:, column]
        other = np.flatnonzero((codes >= 0) & (codes != usual_signature(codes)))
        seq = lane.first_seq + lane.signature.shape[1] + column
        differing = [lane.members[i] for i in other]
        parts.append((f"{named(differing)} differ{'s' * (len(other) == 1)} at #{seq}", role_of(differing)))
    if silent:
        parts.append((f"{named(silent)} unknown", GLYPHS[SILENT].role))
    return parts


def first_mixed(signature: Ints) -> int | None:
    """The first column, counted from the end (-1, -2, ...), in which signatures differ; None if all agree."""
    if not signature.size:
        return None
    most = np.iinfo(signature.dtype).max
    mixed = np.flatnonzero(np.where(signature < 0, most, signature).min(axis=0) < signature.max(axis=0))
    return int(mixed[0]) - int(signature.shape[1]) if len(mixed) else None


def member_rows(incident: Incident, group: str, width: int) -> Iterator[Row]:
    """The members of a group, each with its newest operation and its state."""
    lane = incident.lanes[incident.lane_of(group)]
    yield row((group, Role.BOLD), f"  {counted(len(lane.members), 'rank')}: {ranks_text(lane.members, 6)}")
    for line in wrapped("".join(text for text, _ in lane_outliers(incident, lane)), width - 2):
        yield row("  ", (line, Role.NOTE))
    shown = lane.members[:MAX_MEMBERS]
    texts = [_newest_text(incident, lane, place) for place in range(len(shown))]
    column = max(map(len, texts), default=0) + 2
    for rank, newest in zip(shown, texts, strict=True):
        glyph = SITUATIONS[incident.states[rank].kind]
        link, mark = RowLink(screen=6, rank=rank), CULPRIT if rank in incident.top.culprits else " "
        yield row((f"{mark}{rank:>6}  ", Role.BAD if mark == CULPRIT else Role.PLAIN), f"{newest:<{column}}",
                  (truncate(f"{glyph.char} {incident.doing(rank)}", width - 9 - column), glyph.role), link=link)  # fmt: skip
    if len(lane.members) > MAX_MEMBERS:
        yield row((f"  and {counted(len(lane.members) - MAX_MEMBERS, 'more rank')}", Role.DIM))


def _newest_text(incident: Incident, lane: Lane, place: int) -> str:
    """The newest operation of a member, and what became of it."""
    last, is_done = int(lane.last[place]), bool(lane.done[place])
    if incident.is_p2p(lane):
        return f"{last} issued"
    if last < 0:
        return "unknown" if lane.is_silent[place] else "nothing issued"
    at = int(lane.row[place, last - lane.first_seq])
    if (at >= 0 and not is_done) or incident.failed.get(lane.members[place]) == at:
        return f"#{last} {incident.word_of(lane.members[place], at)}"
    return f"#{last} {GLYPHS[DONE if is_done else PENDING].label}"


def mesh_rows(incident: Incident, width: int) -> Iterator[Row]:
    """The recorded mesh: the last axis horizontal, the others vertical; each rank with the glyph of its state."""
    places = {rank: record.coordinates for rank, record in incident.run.ranks.items() if record.coordinates}
    if not places:
        text = "no mesh coordinates recorded (titan_ckpt.debug.Recorder writes them)"
        yield from (row((line, Role.DIM)) for line in wrapped(text, width))
        return
    axes = [axis for axis in next(iter(places.values())) if len({place.get(axis, 0) for place in places.values()}) > 1]
    yield head("mesh: " + " x ".join(f"{axis} {1 + max(p.get(axis, 0) for p in places.values())}" for axis in axes))
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(places)[:MAX_MESH_RANKS]:
        lines.setdefault(tuple(places[rank].get(axis, 0) for axis in axes[:-1]), []).append(rank)
    digits = len(str(max(places)))
    labels = {key: " ".join(f"{axis}{place}" for axis, place in zip(axes[:-1], key, strict=True)) for key in lines}
    before, needed = max(map(len, labels.values())) + 1, max(map(len, lines.values())) * (digits + 2) - 1
    indent = min(max(width - before - needed, 0), 2)
    room = max((width - before - indent + 1) // (digits + 2), 1)  # no blank after the last one
    for key, ranks in sorted(lines.items()):
        label = labels[key]
        for start in range(0, len(ranks), room):
            *cells, (last, role) = (_cell(incident, rank, digits) for rank in ranks[start : start + room])
            yield row((f"{'':<{indent}}{label if start == 0 else '':<{before}}", Role.DIM), *cells, (last.rstrip(), role),
                      link=RowLink(screen=2, rank=ranks[start]))  # fmt: skip
    fault = f"{CULPRIT} at fault   " if incident.top.culprits else ""
    kinds = {incident.states[rank].kind for rank in places}
    legend = "   ".join(f"{glyph.char} {glyph.label}" for kind, glyph in SITUATIONS.items() if kind in kinds)
    yield row((f"  rank states: {fault}{legend}", Role.DIM))
    if len(places) > MAX_MESH_RANKS:
        yield row((f"  and {counted(len(places) - MAX_MESH_RANKS, 'more rank')}", Role.DIM))


def _cell(incident: Incident, rank: int, digits: int) -> TextSpan:
    glyph = SITUATIONS[incident.states[rank].kind]
    is_at_fault = rank in incident.top.culprits
    return (f"{rank:>{digits}}{CULPRIT if is_at_fault else glyph.char} ", Role.BAD if is_at_fault else glyph.role)
