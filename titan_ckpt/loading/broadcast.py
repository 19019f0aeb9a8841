"""Read once, broadcast to the replicas: along `dp_replicate`, only the first rank reads from the store."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import CheckpointError
from titan_ckpt.location import redact_text
from titan_ckpt.state.exchange import Failure, reason_of
from titan_ckpt.state.state_dict import detached_shard

AXIS = "dp_replicate"


def replica_group(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks with replicas of this rank's shard along `dp_replicate`; None if there are none."""
    if not isinstance(tensor, DTensor) or AXIS not in (tensor.device_mesh.mesh_dim_names or ()):
        return None
    dim = (tensor.device_mesh.mesh_dim_names or ()).index(AXIS)
    if not tensor.placements[dim].is_replicate() or tensor.device_mesh.size(dim) == 1:
        return None
    return tensor.device_mesh.get_group(AXIS)


def is_reader(tensor: torch.Tensor) -> bool:
    """Whether this rank reads `tensor` itself."""
    group = replica_group(tensor)
    return group is None or dist.get_rank(group) == 0


@contextmanager
def raised_together(tensors: Iterable[torch.Tensor], *, is_world: bool) -> Iterator[None]:
    """Run the block on every rank of the meshes of `tensors`, or of the job (`is_world`); if one fails, all raise.

    A rank's own error is raised there, CheckpointError on the others. A collective call, in the order of the meshes' ranks.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:  # noqa: BLE001  (raised below, once the other ranks know)
        error = caught
    failure = None if error is None else described(error)
    for group in _groups(tensors, is_world=is_world):
        answers: list[Failure | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, failure, group=group)
        failure = failure or next((answer for answer in answers if answer is not None), None)
    if error is not None:
        raise error
    if failure is not None:
        raise CheckpointError(f"nothing was loaded, since rank {failure.rank} failed: {reason_of(failure.text)}")


def described(error: BaseException) -> Failure:
    """An error as the other ranks hear of it."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return Failure(rank, redact_text("".join(traceback.format_exception(error))))


def _groups(tensors: Iterable[torch.Tensor], *, is_world: bool) -> Iterator[dist.ProcessGroup]:
    """Groups through which a word reaches every rank: along each dimension of each mesh, in the same order everywhere."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if is_world and dist.group.WORLD is not None:
        yield dist.group.WORLD
        return
    meshes = {
        (tuple(mesh.mesh.flatten().tolist()), mesh.mesh.shape, mesh.mesh_dim_names or ()): mesh
        for tensor in tensors
        if isinstance(tensor, DTensor)
        for mesh in [tensor.device_mesh]
    }
    for _, mesh in sorted(meshes.items(), key=lambda item: item[0]):
        if mesh.get_coordinate() is not None:
            yield from (mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1)


def send_to_replicas(tensors: Mapping[str, torch.Tensor]) -> None:
    """Send each tensor from the rank that read it to its replicas."""
    for name in sorted(tensors):
        group = replica_group(tensors[name])
        if group is not None:
            local = detached_shard(tensors[name])
            sent = local.contiguous()
            dist.broadcast(sent, group=group, group_src=0)
            local.copy_(sent)
