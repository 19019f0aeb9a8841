"""A load on the ranks that share a mesh: each reads its own parts, and if one fails, all raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import CheckpointError
from titan_ckpt.loading.meeting import all_load, begin, catch_up, tell, told
from titan_ckpt.state.exchange import Failure, failure_of, reason_of

T = TypeVar("T")


def run_together(
    prepare: Callable[[], T], fill: Callable[[T], None], tensors: Iterable[torch.Tensor], *, call: int
) -> T:
    """`prepare`, then `fill` with its result, on every rank of the meshes of `tensors`.

    If one rank fails, all raise: its own error there, CheckpointError on the others. No rank fills before all have prepared.
    The ranks of a mesh that do not all come soon run both each by itself (`loading.meeting`), unless one of them failed in the
    same `call` before it came. Returns what `prepare` returned.
    """
    groups, failure = _groups(tensors, call)
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


def is_alone() -> bool:
    """Whether this process is all of its job."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


def rank_here() -> int:
    """This process's rank in the job, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _groups(tensors: Iterable[torch.Tensor], call: int) -> tuple[list[dist.ProcessGroup], Failure | None]:
    """Groups through which a word reaches every rank: each dimension of each mesh whose ranks all load, in the same order.

    And the failure of a rank of such a mesh that will not come.
    """
    if is_alone():
        return [], None
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
