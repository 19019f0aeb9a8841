"""From a MeshSpec to torch's DeviceMesh and the process groups that the trainer uses.

The world is one `arange(world).view(pp, dp_replicate, dp_shard, cp, tp)`; a slice along an axis is a group. Weights are sharded
over dp_shard and cp together, so those two are one dimension of the mesh, named by the axes it folds ("dp_shard+cp").
Dimensions of degree 1 are left out, except that FSDP always has one to shard over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import FOLD, MeshSpec
from titan_ckpt.trainer.gloo import one_thread_groups

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMesh:
    """The mesh as one rank sees it. `device_mesh` has the dimensions that weights are placed on, and pp."""

    spec: MeshSpec
    rank: int
    device: torch.device
    device_mesh: DeviceMesh
    fsdp_axis: str
    cp_group: dist.ProcessGroup | None

    @property
    def coordinate(self) -> dict[str, int]:
        """Where this rank stands on each axis."""
        return self.spec.coordinate(self.rank)

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank reads; ranks along cp, tp and pp share it."""
        return self.spec.fold("dp_replicate+dp_shard", self.coordinate)

    @property
    def data_degree(self) -> int:
        """Parts that the data is read in."""
        return self.spec.degree("dp_replicate+dp_shard")

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks along a dimension of the device mesh."""
        return self.device_mesh[axis].get_group()

    def fsdp_mesh(self) -> DeviceMesh:
        """One dimension to shard over, preceded by dp_replicate under HSDP."""
        return self.device_mesh[tuple(a for a in ("dp_replicate", self.fsdp_axis) if a in self.names)]

    def tp_mesh(self) -> DeviceMesh | None:
        """The tensor parallel dimension, None when it is 1."""
        return self.device_mesh["tp"] if "tp" in self.names else None

    @property
    def names(self) -> tuple[str, ...]:
        """The dimensions of `device_mesh`."""
        return self.device_mesh.mesh_dim_names or ()


def init_rank_mesh(spec: MeshSpec, device: torch.device) -> RankMesh:
    """Build the groups; collective. Starts a group of one by itself when torch.distributed was not started."""
    with one_thread_groups():
        return _init_rank_mesh(spec, device)


def _init_rank_mesh(spec: MeshSpec, device: torch.device) -> RankMesh:
    _ensure_process_group(spec, device)
    fsdp_axis = FOLD.join(axis for axis in ("dp_shard", "cp") if spec.degree(axis) > 1) or "dp_shard"
    names = [a for a in ("pp", "dp_replicate", fsdp_axis, "tp") if spec.degree(a) > 1 or a == fsdp_axis]
    degrees = tuple(spec.degree(name) for name in names)
    return RankMesh(
        spec=spec,
        rank=dist.get_rank(),
        device=device,
        device_mesh=init_device_mesh(device.type, degrees, mesh_dim_names=tuple(names)),
        fsdp_axis=fsdp_axis,
        cp_group=_axis_group(spec, "cp") if spec.degree("cp") > 1 else None,
    )


def _ensure_process_group(spec: MeshSpec, device: torch.device) -> None:
    if not dist.is_initialized() and spec.world_size == 1:
        dist.init_process_group(BACKENDS[device.type], store=HashStore(), rank=0, world_size=1)
    world_size = dist.get_world_size()
    if world_size != spec.world_size:
        raise ConfigError(f"mesh {spec} is for {spec.world_size} ranks, but {world_size} are running")


def pipeline_ends(spec: MeshSpec) -> dist.ProcessGroup | None:
    """First and last rank of this rank's pipeline; None on the ranks between; collective."""
    pp = spec.degree("pp")
    ends: dict[tuple[int, ...], list[int]] = {}
    for rank in range(spec.world_size):
        place = spec.coordinate(rank)
        if place["pp"] in (0, pp - 1):
            ends.setdefault(tuple(p for axis, p in place.items() if axis != "pp"), []).append(rank)
    with one_thread_groups():
        group, _ = dist.new_subgroups_by_enumeration(list(ends.values()))  # type: ignore[no-untyped-call]
    assert group is None or isinstance(group, dist.ProcessGroup)
    return group


def _axis_group(spec: MeshSpec, axis: str) -> dist.ProcessGroup:
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in range(spec.world_size):
        place = spec.coordinate(rank)
        lines.setdefault(tuple(p for a, p in place.items() if a != axis), []).append(rank)
    group, _ = dist.new_subgroups_by_enumeration(list(lines.values()))  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup)
    return group
