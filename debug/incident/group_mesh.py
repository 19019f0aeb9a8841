"""The mesh of a job without recorded coordinates, from its groups: an axis is a name whose groups divide the ranks. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from titan_ckpt.debug.incident.records import Array, Run

_MOST_AXES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """`places`: of each rank its place in its group of this name; `stride`: the distance of neighbours."""

    name: str
    size: int
    stride: int
    places: Array


def with_coordinates(run: Run) -> Run:
    """The run with the coordinates that its groups show; as it is where they are recorded or no mesh explains them.

    The axes must tell all ranks apart and leave no place empty. Of several such meshes the one with the most axes is taken: the
    others are made of its axes, flattened.
    """
    ranks = sorted(run.ranks)
    if any(record.coordinates for record in run.ranks.values()) or ranks != list(range(run.world_size)):
        return run
    axes = sorted(_axes(run), key=lambda axis: -axis.stride)[:_MOST_AXES]
    for count in range(len(axes), 1, -1):
        for chosen in itertools.combinations(axes, count):
            if _is_mesh(chosen, len(ranks)):
                records = run.ranks.items()
                placed = {rank: replace(record, coordinates=_place(chosen, rank)) for rank, record in records}
                return replace(run, ranks=placed)
    return run


def _axes(run: Run) -> Iterator[_Axis]:
    """Names whose groups, of one size, hold each rank once."""
    named: dict[str, list[tuple[int, ...]]] = {}
    for group in run.groups:
        if len(group.members) > 1:
            named.setdefault(str(group), []).append(tuple(sorted(group.members)))
    for name, groups in named.items():
        members = sorted(set(groups))
        sizes = {len(group) for group in members}
        if len(sizes) > 1 or len(members) < 2 or sum(map(len, members)) != run.world_size:
            continue
        places = np.full(run.world_size, -1, np.int64)
        places[np.array(members)] = np.arange(len(members[0]))
        if (places >= 0).all():
            stride = members[0][1] - members[0][0]
            yield _Axis(name=name.removeprefix("mesh_"), size=len(members[0]), stride=stride, places=places)


def _is_mesh(axes: Sequence[_Axis], num_ranks: int) -> bool:
    if math.prod(axis.size for axis in axes) != num_ranks:
        return False
    flat = np.zeros(num_ranks, np.int64)
    for axis in axes:
        flat = flat * axis.size + axis.places
    return len(np.unique(flat)) == num_ranks


def _place(axes: Sequence[_Axis], rank: int) -> Mapping[str, int]:
    return {axis.name: int(axis.places[rank]) for axis in axes}
