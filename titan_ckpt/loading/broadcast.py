"""Read once, broadcast to the replicas: along `dp_replicate`, only the first rank reads from the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import CheckpointError
from titan_ckpt.loading.meeting import all_load, begin, catch_up, tell, told
from titan_ckpt.state.exchange import Failure, failure_of, reason_of
from titan_ckpt.state.state_dict import detached_shard, has_part_of

AXIS = "dp_replicate"
T = TypeVar("T")


def replica_group(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks with replicas of this rank's shard along `dp_replicate`; None if there are none."""
    if (
        not isinstance(tensor, DTensor)
        or not has_part_of(tensor)
        or AXIS not in (tensor.device_mesh.mesh_dim_names or ())
    ):
        return None
    dim = (tensor.device_mesh.mesh_dim_names or ()).index(AXIS)
    if not tensor.placements[dim].is_replicate() or tensor.device_mesh.size(dim) == 1:
        return None
    return tensor.device_mesh.get_group(AXIS)


def is_reader(tensor: torch.Tensor) -> bool:
    """Whether this rank reads `tensor` itself."""
    group = replica_group(tensor)
    return group is None or dist.get_rank(group) == 0


def run_together(
    prepare: Callable[[], T], fill: Callable[[T], None], tensors: Iterable[torch.Tensor], *, call: int, is_world: bool
) -> T:
    """`prepare`, then `fill` with its result, on every rank of the meshes of `tensors`, or of the job (`is_world`).

    If one rank fails, all raise: its own error there, CheckpointError on the others. No rank fills before all have prepared.
    The ranks of a mesh that do not all come soon run both each by itself (`loading.meeting`), unless one of them failed in the
    same `call` before it came; with `is_world`, all must come. Returns what `prepare` returned.
    """
    groups, failure = _groups(tensors, call, is_world=is_world)
    prepared = _on_all(prepare, groups, call, failure, "nothing was loaded")
    _on_all(
        partial(fill, prepared), groups, call, None, "some tensors are not loaded: load again before you use the state"
    )
    return prepared


def _on_all(
    action: Callable[[], T], groups: Iterable[dist.ProcessGroup], call: int, failure: Failure | None, outcome: str
) -> T:
    """The result of `action`, once it has ended well on every rank of `groups`; `failure` is one that is known already."""
    error: BaseException | None = None
    result: T | None = None
    if failure is None:
        try:
            result = action()
        except BaseException as caught:  # noqa: BLE001  (raised below, once the other ranks know)
            error = caught
            failure = failure_of(rank_here(), error)
    for group in groups:
        answers: list[tuple[int, Failure | None]] = [(call, None)] * dist.get_world_size(group)
        dist.all_gather_object(answers, (call, failure), group=group)
        failure = failure or next((answer for _, answer in answers if answer is not None), None)
        catch_up(max(number for number, _ in answers))
    if error is not None:
        raise error
    if failure is not None:
        raise CheckpointError(f"{outcome}, since rank {failure.rank} failed: {reason_of(failure.text)}")
    return cast(T, result)


@contextmanager
def failures_told() -> Iterator[int]:
    """The number of this load; if it fails, ranks that still wait for this one to begin hear of it."""
    call = begin()
    try:
        yield call
    except BaseException as error:
        tell(call, failure_of(rank_here(), error))
        raise


def rank_here() -> int:
    """This process's rank in the job, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _groups(
    tensors: Iterable[torch.Tensor], call: int, *, is_world: bool
) -> tuple[list[dist.ProcessGroup], Failure | None]:
    """Groups through which a word reaches every rank: each dimension of each mesh whose ranks all load, in the same order.

    And the failure of a rank of such a mesh that will not come.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [], None
    if is_world and dist.group.WORLD is not None:
        return [dist.group.WORLD], None
    meshes = {
        (tuple(mesh.mesh.flatten().tolist()), mesh.mesh.shape, mesh.mesh_dim_names or ()): mesh
        for tensor in tensors
        if isinstance(tensor, DTensor)
        for mesh in [tensor.device_mesh]
    }
    groups: list[dist.ProcessGroup] = []
    failure: Failure | None = None
    for _, mesh in sorted(meshes.items(), key=lambda item: item[0]):
        if mesh.get_coordinate() is None or mesh.size() == 1:
            continue
        if all_load(mesh, call):
            groups += [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        else:
            failure = failure or told(call, mesh.mesh.flatten().tolist())
    return groups, failure


def send_to_replicas(tensors: Mapping[str, torch.Tensor]) -> None:
    """Send each tensor from the rank that read it to its replicas."""
    for name in sorted(tensors):
        group = replica_group(tensors[name])
        if group is not None:
            local = detached_shard(tensors[name])
            sent = local.contiguous()
            dist.broadcast(sent, group=group, group_src=0)
            local.copy_(sent)
