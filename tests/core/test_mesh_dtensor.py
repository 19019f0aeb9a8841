"""Our boxes match torch's: DTensor's arithmetic for any mesh and placements, and fully_shard on 4 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from titan_ckpt.sharding.box_columns import overlaps, shard_columns
from titan_ckpt.sharding.mesh import AXES, MeshSpec
from titan_ckpt.sharding.placement import Box, Placements, Shape, Shard, box_at, shard_box, shard_boxes
from titan_ckpt.state.state_dict import cut_order
from tools.rank_pool import RankPool

DEGREES = st.integers(1, 4)
SHAPES = st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple)


def torch_box(global_shape: Shape, degrees: list[int], place: list[int], placements: list[Any]) -> Box:
    sizes, offsets = _compute_local_shape_and_global_offset(global_shape, degrees, lambda dim: place[dim], placements)
    return Box(tuple(offsets), tuple(sizes))


def coordinate(**places: int) -> dict[str, int]:
    return dict.fromkeys(AXES, 0) | places


def assert_same(ours: Box, theirs: Box) -> None:
    """Equal sizes, and equal offsets unless empty (torch puts an empty shard at the end of the tensor)."""
    assert ours.sizes == theirs.sizes
    if ours.num_elements:
        assert ours == theirs


@settings(max_examples=300, deadline=None)
@given(shape=SHAPES, dp=DEGREES, tp=DEGREES, dp_dim=st.integers(0, 2), tp_dim=st.integers(0, 2), data=st.data())
def test_plain_shards_are_cut_as_dtensor_cuts_them(
    shape: Shape, dp: int, tp: int, dp_dim: int, tp_dim: int, data: st.DataObject
) -> None:
    dp_dim, tp_dim = dp_dim % len(shape), tp_dim % len(shape)
    place = [data.draw(st.integers(0, dp - 1)), data.draw(st.integers(0, tp - 1))]
    theirs = torch_box(shape, [dp, tp], place, [TorchShard(dp_dim), TorchShard(tp_dim)])
    placements: Placements = {"dp_shard": Shard(dp_dim), "tp": Shard(tp_dim)}
    mesh = MeshSpec.of({"dp_shard": dp, "tp": tp})
    assert_same(box_at(shape, placements, mesh, coordinate(dp_shard=place[0], tp=place[1])), theirs)


@settings(max_examples=300, deadline=None)
@given(shape=SHAPES, dp=DEGREES, tp=DEGREES, dim=st.integers(0, 2), data=st.data())
def test_fsdp_over_tp_cuts_each_shard_as_fully_shard_does(
    shape: Shape, dp: int, tp: int, dim: int, data: st.DataObject
) -> None:
    """`fully_shard` chunks the local tensor of tensor parallelism. DTensor's `_StridedShard` agrees if both degrees divide
    the dimension; otherwise its arithmetic can differ from the bytes that FSDP2 actually holds."""
    dim %= len(shape)
    place = [data.draw(st.integers(0, dp - 1)), data.draw(st.integers(0, tp - 1))]
    mesh = MeshSpec.of({"dp_shard": dp, "tp": tp})
    ours = box_at(shape, {"tp": Shard(dim), "dp_shard": Shard(dim)}, mesh, coordinate(dp_shard=place[0], tp=place[1]))
    rows = torch.arange(shape[dim])
    mine = _chunk_with_empty(_chunk_with_empty(rows, tp, 0)[place[1]], dp, 0)[place[0]]
    assert mine.tolist() == list(range(ours.offsets[dim], ours.offsets[dim] + ours.sizes[dim]))
    if shape[dim] % (dp * tp) == 0:
        assert_same(ours, torch_box(shape, [dp, tp], place, [_StridedShard(dim, split_factor=tp), TorchShard(dim)]))


@settings(max_examples=200, deadline=None)
@given(
    shape=SHAPES,
    degrees=st.fixed_dictionaries({axis: st.integers(1, 3) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}),
    data=st.data(),
)
def test_all_shards_at_once_are_the_shards_one_by_one(
    shape: Shape, degrees: dict[str, int], data: st.DataObject
) -> None:
    mesh = MeshSpec.of(degrees)
    axes = data.draw(st.lists(st.sampled_from(["tp", "dp_shard+cp", "dp_replicate"]), unique=True))
    placements = {axis: Shard(data.draw(st.integers(0, len(shape) - 1))) for axis in axes}
    all_at_once = shard_columns(shape, placements, mesh)
    stage = data.draw(st.integers(0, degrees["pp"] - 1)) * (mesh.world_size // degrees["pp"])
    seen = {}
    for offsets, sizes, rank in zip(all_at_once.offsets, all_at_once.sizes, all_at_once.ranks, strict=True):
        for replica in all_at_once.replica_ranks.tolist():
            seen[int(rank) + replica + stage] = Box(tuple(offsets.tolist()), tuple(sizes.tolist()))
    boxes = {
        rank: shard_box(shape, placements, mesh, rank)
        for rank in range(stage, stage + mesh.world_size // degrees["pp"])
    }
    expected = {rank: box for rank, box in boxes.items() if box.num_elements}
    if 0 not in shape:
        assert seen == expected
        assert list(shard_boxes(shape, placements, mesh)) == list(
            map(Box, map(tuple, all_at_once.offsets.tolist()), map(tuple, all_at_once.sizes.tolist()))
        )
        assert sum(box.num_elements for box in shard_boxes(shape, placements, mesh)) == Box.whole(shape).num_elements


BOXES = st.lists(
    st.tuples(st.tuples(st.integers(0, 6), st.integers(0, 6)), st.tuples(st.integers(1, 5), st.integers(1, 5))),
    min_size=1,
)


@settings(max_examples=200, deadline=None)
@given(a=BOXES, b=BOXES)
def test_overlaps_finds_what_intersecting_every_pair_finds(
    a: list[tuple[Shape, Shape]], b: list[tuple[Shape, Shape]]
) -> None:
    columns = [np.array(side, dtype=np.int64) for side in (a, b)]
    i, j = overlaps(columns[0][:, 0], columns[0][:, 1], columns[1][:, 0], columns[1][:, 1])
    expected = {(x, y) for x, box in enumerate(a) for y, other in enumerate(b) if Box(*box).intersect(Box(*other))}
    assert set(zip(i.tolist(), j.tolist(), strict=True)) == expected
    assert len(i) == len(expected)


class Block(nn.Module):
    """Deliberately uneven dimensions: 10 and 7 are not divisible by 2 x 2."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 10)
        self.down = nn.Linear(10, 7)
        self.norm = nn.LayerNorm(7)
        self.tiny = nn.Linear(3, 1)


def shard_for_real(_rank: int, mesh_text: str, fsdp_dim: str) -> list[tuple[str, bool, list[tuple[str, int]] | None]]:
    """For each parameter: name, whether our box has exactly this rank's values, and the placements that we derive."""
    spec = MeshSpec.parse(mesh_text)
    names = tuple(axis for axis, _ in spec.items() if axis not in ("dp_shard", "cp"))
    names = tuple(sorted({*names, fsdp_dim}, key=lambda name: AXES.index(name.split("+")[0])))
    mesh = init_device_mesh("cpu", tuple(spec.degree(name) for name in names), mesh_dim_names=names)
    torch.manual_seed(0)
    module = Block()
    whole = {name: value.detach().clone() for name, value in module.named_parameters()}
    if "tp" in names:
        parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(module, mesh=mesh[("dp_replicate", fsdp_dim)] if "dp_replicate" in names else mesh[fsdp_dim])
    answers = []
    rank = torch.distributed.get_rank()
    for name, value in module.named_parameters():
        assert isinstance(value, DTensor)
        placements = cut_order(value.device_mesh, value.placements)
        box = shard_box(tuple(value.shape), placements or {}, spec, rank)
        place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        is_same = torch.equal(value.to_local(), whole[name][place])
        answers.append((name, is_same, None if placements is None else [(a, s.dim) for a, s in placements.items()]))
    return answers


def distribute_for_real(_rank: int, shape: Shape, dims: tuple[int | None, int | None]) -> bool:
    """Whether `distribute_tensor` gives this rank our box of a tensor on dp_shard=2,tp=2."""
    spec = MeshSpec.parse("dp_shard=2,tp=2")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    whole = torch.arange(Box.whole(shape).num_elements).reshape(shape)
    placements = [Replicate() if dim is None else TorchShard(dim) for dim in dims]
    local = distribute_tensor(whole, mesh, placements).to_local()
    ours = {axis: Shard(dim) for axis, dim in zip(("dp_shard", "tp"), dims, strict=True) if dim is not None}
    box = shard_box(shape, ours, spec, torch.distributed.get_rank())
    return torch.equal(local, whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))])


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mesh", "fsdp_dim", "up_cut"),
    [
        ("dp_shard=4", "dp_shard", [("dp_shard", 0)]),
        ("dp_shard=2,tp=2", "dp_shard", [("tp", 0), ("dp_shard", 0)]),
        ("dp_replicate=2,dp_shard=2", "dp_shard", [("dp_shard", 0)]),
        ("dp_shard=2,cp=2", "dp_shard+cp", [("dp_shard+cp", 0)]),
    ],
)
def test_fully_shard_gives_each_rank_the_box_we_compute(
    ranks: RankPool, mesh: str, fsdp_dim: str, up_cut: list[tuple[str, int]]
) -> None:
    for answers in ranks.run(shard_for_real, mesh, fsdp_dim):
        assert [name for name, is_same, _ in answers if not is_same] == []
        assert {name: cuts for name, _, cuts in answers}["up.weight"] == up_cut


@pytest.mark.dist
@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0), (None, 1), (0, None), (None, None)])
def test_distribute_tensor_gives_ranks_the_box_we_compute(ranks: RankPool, dims: tuple[int | None, int | None]) -> None:
    for shape in [(8, 8), (5, 3), (1, 7), (2, 1), (3, 2, 4)]:
        assert all(ranks.run(distribute_for_real, shape, dims)), shape
