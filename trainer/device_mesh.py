"""From a MeshSpec to torch's DeviceMesh and the process groups of the trainer.

The world is one `arange(world).view(pp, dp_replicate, dp_shard, cp, ep, tp)`; a slice along an axis is a group. Weights are
sharded over dp_shard, cp and ep together, so those are one dimension of the mesh, named by the axes it folds ("dp_shard+cp").
Dimensions of degree 1 are left out, except the one FSDP shards over. Experts are cut by ep, or by cp and ep together, and sharded
over dp_shard and what is left of cp: they have a second mesh of the same ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import FOLD, MeshSpec

DATA_AXES = "dp_replicate+dp_shard+ep"  # ranks that read different samples
FSDP_AXES = "dp_shard+cp+ep"  # ranks that FSDP divides a weight over
EP_OVER_CP = "cp+ep"  # ranks that divide the experts where they are all those of cp, and maybe some of dp_shard
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
INTERFACES = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMesh:
    """The mesh as one rank sees it. `device_mesh` has the dimensions that weights are placed on, and pp.

    `expert_mesh` has those that experts are placed on, None without expert parallelism; `expert_axes` is the one that cuts them.
    """

    spec: MeshSpec
    rank: int
    device: torch.device
    device_mesh: DeviceMesh
    fsdp_axis: str
    cp_group: dist.ProcessGroup | None
    expert_mesh: DeviceMesh | None = None
    expert_axes: str = "ep"

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's coordinate on the mesh."""
        return self.spec.coordinate(self.rank)

    @property
    def data_rank(self) -> int:
        """Index of the data shard that this rank reads; ranks along cp, tp and pp share one."""
        return self.spec.fold(DATA_AXES, self.coordinate)

    @property
    def data_degree(self) -> int:
        """Number of data shards."""
        return self.spec.degree(DATA_AXES)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks along a dimension of the device mesh."""
        return self.device_mesh[axis].get_group()

    def fsdp_mesh(self) -> DeviceMesh:
        """One dimension to shard over, preceded by dp_replicate under HSDP."""
        return self.device_mesh[tuple(a for a in ("dp_replicate", self.fsdp_axis) if a in self.names)]

    def expert_fsdp_mesh(self) -> DeviceMesh:
        """As `fsdp_mesh`, for experts."""
        assert self.expert_mesh is not None
        names = self.expert_mesh.mesh_dim_names or ()
        return self.expert_mesh[tuple(a for a in names if a not in ("pp", self.expert_axes, "tp"))]

    def all_groups(self) -> list[dist.ProcessGroup]:
        """The process groups of all dimensions."""
        meshes = [mesh for mesh in (self.device_mesh, self.expert_mesh) if mesh is not None]
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        return groups if self.cp_group is None else [*groups, self.cp_group]

    def tp_mesh(self) -> DeviceMesh | None:
        """The tensor parallel dimension, None when its degree is 1."""
        return self.device_mesh["tp"] if "tp" in self.names else None

    @property
    def names(self) -> tuple[str, ...]:
        """The dimensions of `device_mesh`."""
        return self.device_mesh.mesh_dim_names or ()


def init_rank_mesh(spec: MeshSpec, device: torch.device, *, expert_axes: str = "ep") -> RankMesh:
    """Build the process groups; collective. Initialises torch.distributed itself on a mesh of one rank.

    `expert_axes`: the ranks that divide the experts, `ep` or `EP_OVER_CP`.
    """
    with one_thread_groups():
        return _init_rank_mesh(spec, device, expert_axes)


def _init_rank_mesh(spec: MeshSpec, device: torch.device, expert_axes: str) -> RankMesh:
    _ensure_process_group(spec, device)
    fsdp_axis = _folded(spec, FSDP_AXES, but=expert_axes)
    expert_mesh = None
    if spec.degree(expert_axes) > 1:
        left = "dp_shard" if expert_axes == EP_OVER_CP else "dp_shard+cp"
        expert_mesh = _device_mesh(spec, device, _folded(spec, left, but=expert_axes), expert_axes)
    return RankMesh(
        spec=spec,
        rank=dist.get_rank(),
        device=device,
        device_mesh=_device_mesh(spec, device, fsdp_axis),
        fsdp_axis=fsdp_axis,
        cp_group=_axis_group(spec, "cp") if spec.degree("cp") > 1 else None,
        expert_mesh=expert_mesh,
        expert_axes=expert_axes,
    )


def _folded(spec: MeshSpec, axes: str, *, but: str) -> str:
    """Those of the axes that have more than one rank, as one dimension; not those of `but` alone, which cut experts."""
    found = [axis for axis in axes.split(FOLD) if spec.degree(axis) > 1]
    is_taken = found == [axis for axis in but.split(FOLD) if spec.degree(axis) > 1]
    return FOLD.join(["dp_shard", *found] if is_taken else found) or "dp_shard"


def _device_mesh(spec: MeshSpec, device: torch.device, *sharding: str) -> DeviceMesh:
    """torch's mesh with these dimensions and, if they have more than one rank, pp, dp_replicate and tp."""
    names = [a for a in ("pp", "dp_replicate", *sharding, "tp") if spec.degree(a) > 1 or a in sharding]
    return init_device_mesh(device.type, tuple(map(spec.degree, names)), mesh_dim_names=tuple(names))


def _ensure_process_group(spec: MeshSpec, device: torch.device) -> None:
    if not dist.is_initialized() and spec.world_size == 1:
        dist.init_process_group(BACKENDS[device.type], store=HashStore(), rank=0, world_size=1)
    world_size = dist.get_world_size()
    if world_size != spec.world_size:
        raise ConfigError(f"mesh {spec} is for {spec.world_size} ranks, but {world_size} are running")


def pipeline_ends(spec: MeshSpec) -> dist.ProcessGroup | None:
    """First and last rank of this rank's pipeline; None on the ranks between; collective."""
    ends = [sorted({line[0], line[-1]}) for line in _lines(spec, "pp")]
    with one_thread_groups():
        group, _ = dist.new_subgroups_by_enumeration(ends)  # type: ignore[no-untyped-call]
    assert group is None or isinstance(group, dist.ProcessGroup)
    return group


def _axis_group(spec: MeshSpec, axis: str) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration(_lines(spec, axis))  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup)
    return group


def _lines(spec: MeshSpec, axis: str) -> list[list[int]]:
    """The ranks along `axis`, one list for each coordinate on the other axes."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in range(spec.world_size):
        others = tuple(index for name, index in spec.coordinate(rank).items() if name != axis)
        lines.setdefault(others, []).append(rank)
    return list(lines.values())


@contextmanager
def one_thread_groups() -> Iterator[None]:
    """Give every gloo group created inside one thread; other backends are unaffected.

    torch gives a gloo group two threads per device. Both write the name of the last completed operation into one `std::string`,
    outside the group's lock (`ProcessGroupGloo::runLoop`, `lastCompletedWorkName`; in torch 2.13, the Flight Recorder on or
    off). Names too long for the small-string buffer, such as a functional all-gather's, are then sometimes freed twice: most
    loops of functional collectives died of SIGSEGV or SIGABRT within three million of them (`scripts/gloo_threads.py`), and a
    training run's rank about once in a thousand runs. One thread is one writer. torch passes options to NCCL groups only, so
    the class that creates gloo groups is replaced inside this context.
    """
    if not dist.is_gloo_available():
        yield
        return
    module: Any = distributed_c10d
    gloo = module.ProcessGroupGloo

    def start(group: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
        options = gloo._Options()
        options._threads, options._timeout, options._devices = 1, timeout, _devices(gloo)
        for name, value in more.items():  # torch 2.15: enable_reconfigure
            setattr(options, name, value)
        gloo.__init__(group, store, rank, size, options)

    module.ProcessGroupGloo = type("OneThreadGloo", (gloo,), {"__init__": start})
    try:
        yield
    finally:
        module.ProcessGroupGloo = gloo


def _devices(gloo: Any) -> list[Any]:
    """The devices that torch's own constructor picks when given no options."""
    named = [name for name in os.environ.get(INTERFACES, "").split(",") if name]
    return [gloo.create_device(interface=name) for name in named] or [gloo.create_default_device()]
