"""Screen 4: the process groups: members, progress, who is behind, and the mesh where it was recorded."""

from __future__ import annotations

from collections.abc import Iterator

from titan_ckpt.debug.align import Lane
from titan_ckpt.tui.data_incident import SITUATIONS, Incident
from titan_ckpt.tui.pane import Pane
from titan_ckpt.tui.rows import Part, Row, RowList, Rows, Target, head, ranks_text, row

MAX_MESH_RANKS = 4096


class GroupsPane(Pane):
    """All groups."""

    number = 4
    label = "Groups"
    keys = (("enter", "the group's grid"),)

    def title(self) -> str:
        incident = self.session.incident.value
        return "" if incident is None else f"{len(incident.lanes)} groups with recorded operations"

    def make_rows(self, width: int) -> Rows:  # noqa: ARG002 (the base's)
        incident = self.session.incident.value
        if incident is None:
            return RowList([row(self.session.incident.text)])
        return RowList([*group_rows(incident), row(), *mesh_rows(incident)])


def group_rows(incident: Incident) -> Iterator[Row]:
    """A line per group: how far its members are, and who is behind."""
    yield head(f"{'group':<22} {'ranks':<20} {'newest':>8}  behind")
    for lane in incident.lanes:
        group = incident.run.groups[lane.group]
        newest = max((int(n) for n in lane.last), default=-1)
        behind = [rank for rank, last in zip(lane.members, lane.last, strict=True) if int(last) < newest]
        parts: list[Part] = [(f"{str(group)[:22]:<22} ", "bold"), (f"{ranks_text(lane.members, 3)[:20]:<20} ", "")]
        parts.append((f"#{newest:>7}  ", ""))
        parts.append((_behind_text(lane, newest, behind), "bad" if behind else "dim"))
        origin = "members recorded" if group.members else "members from who used it"
        yield row(*parts, (f"   {origin}", "dim"), target=Target(screen=2, group=str(group)), is_problem=bool(behind))
    if not incident.lanes:
        yield row("no operations were recorded")


def _behind_text(lane: Lane, newest: int, behind: list[int]) -> str:
    if not behind:
        return "nobody"
    last = dict(zip(lane.members, lane.last, strict=True))
    furthest = newest - min(int(last[rank]) for rank in behind)
    return f"ranks {ranks_text(behind, 4)}, by up to {furthest}"


def mesh_rows(incident: Incident) -> Iterator[Row]:
    """The mesh as recorded: the last axis to the right, the others downwards; each rank with its state's glyph."""
    places = {rank: record.coordinates for rank, record in incident.run.ranks.items() if record.coordinates}
    if not places:
        yield row(("no mesh coordinates were recorded (titan_ckpt.debug.Recorder writes them)", "dim"))
        return
    axes = [axis for axis in next(iter(places.values())) if len({place.get(axis, 0) for place in places.values()}) > 1]
    yield head("mesh: " + " x ".join(f"{axis} {1 + max(p.get(axis, 0) for p in places.values())}" for axis in axes))
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(places)[:MAX_MESH_RANKS]:
        lines.setdefault(tuple(places[rank].get(axis, 0) for axis in axes[:-1]), []).append(rank)
    for key, ranks in sorted(lines.items()):
        label = " ".join(f"{axis}{place}" for axis, place in zip(axes[:-1], key, strict=True))
        parts: list[Part] = [(f"  {label:<20}", "dim")]
        for rank in ranks:
            glyph, role, _ = SITUATIONS[incident.states[rank].kind]
            parts.append((f" {rank}{glyph}", role))
        yield row(*parts, target=Target(screen=2, rank=ranks[0]))
    if len(places) > MAX_MESH_RANKS:
        yield row((f"  and {len(places) - MAX_MESH_RANKS:,} more ranks", "dim"))
