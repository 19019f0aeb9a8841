"""Read once, broadcast to the replicas: along `dp_replicate`, only the first rank reads from the store."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_ckpt.state.exchange import Failure, raise_failures
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


def read_and_send(tensors: Mapping[str, torch.Tensor], read: Callable[[], None]) -> None:
    """Run `read`, which fills the tensors that this rank reads, then send each to its replicas.

    If a reader fails, every rank of its group raises, so that none waits for bytes that never come.
    """
    groups = {id(group): group for t in tensors.values() if (group := replica_group(t)) is not None}
    error: BaseException | None = None
    failure: Failure | None = None
    try:
        read()
    except Exception as caught:  # noqa: BLE001  (raised below, once the replicas know)
        error, failure = caught, Failure(dist.get_rank() if dist.is_initialized() else 0, traceback.format_exc())
    failures: list[Failure | None] = [failure]
    for group in groups.values():
        answers: list[Failure | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, failure, group=group)
        failures += answers
    if error is not None:
        raise error
    raise_failures(failures, "loading")
    for name in sorted(tensors):
        group = replica_group(tensors[name])
        if group is not None:
            local = detached_shard(tensors[name])
            sent = local.contiguous()
            dist.broadcast(sent, group=group, group_src=0)
            local.copy_(sent)
