"""Sends, receives and groups that do not fit."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tools.hangs.incident import GROUP, NO_FAULT, PEER, SKIPPED, STUCK, incident
from tools.hangs.parts import log, reduce_steps

PIECE = 300_000


def _exchange(rank: int, size: int) -> None:
    """A ring, in which even ranks send first."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for direction in (0, 1) if rank % 2 == 0 else (1, 0):
        if direction == 0:
            dist.send(torch.ones(PIECE), after)
        else:
            dist.recv(torch.empty(PIECE), before)


@incident(4, {1, 2}, PEER)
def stages_receive_first(rank: int) -> None:
    """Two neighbouring pipeline stages both receive first."""
    _exchange(rank, 4)
    reduce_steps()
    if rank in (1, 2):
        other = 3 - rank
        dist.recv(torch.empty(PIECE), other)  # CULPRIT
        dist.send(torch.ones(PIECE), other)
    dist.barrier()


@incident(4, {1}, PEER)
def send_to_the_wrong_stage(rank: int) -> None:
    """A stage sends its activations past the next one."""
    reduce_steps()
    for step in range(4):
        activations = torch.ones(PIECE)
        if rank > 0:
            dist.recv(activations, rank - 1)
        if rank < 3:
            target = rank + 2 if (rank, step) == (1, 2) else rank + 1
            dist.send(activations, target)  # CULPRIT
        log.info("micro batch %d", step)
    dist.barrier()


@incident(3, {2}, PEER)
def batch_without_its_recv(rank: int) -> None:
    """One rank leaves the recv out of its batch of sends and receives."""
    reduce_steps()
    for step in range(3):
        operations = [dist.P2POp(dist.isend, torch.ones(PIECE), (rank + 1) % 3)]
        if (rank, step) != (2, 2):
            operations.append(dist.P2POp(dist.irecv, torch.empty(PIECE), (rank - 1) % 3))
        for work in dist.batch_isend_irecv(operations):
            work.wait()  # CULPRIT
        log.info("exchanged %d", step)
    dist.barrier()  # CULPRIT


@incident(3, {1}, PEER)
def larger_micro_batch(rank: int) -> None:
    """A stage sends a larger micro batch than the next one expects."""
    for step in range(4):
        rows = 2 * PIECE if (rank, step) == (1, 3) else PIECE
        if rank > 0:
            dist.recv(torch.empty(PIECE), rank - 1)
        if rank < 2:
            dist.send(torch.ones(rows), rank + 1)  # CULPRIT
        log.info("micro batch %d", step)
        dist.barrier()


@incident(4, {2}, GROUP | SKIPPED)
def groups_in_another_order(rank: int) -> None:
    """A rank makes the same groups in another order, so that names and members do not agree."""
    reduce_steps()
    members = [[0, 2], [1, 2, 3]]
    order = (1, 0) if rank == 2 else (0, 1)
    groups = {}
    for number in order:
        groups[number] = dist.new_group(members[number])  # CULPRIT
    for number, group in sorted(groups.items()):
        if rank in members[number]:
            dist.all_reduce(torch.ones(8), group=group)  # CULPRIT
        log.info("group %d done", number)
    dist.barrier()


@incident(4, {1}, GROUP | SKIPPED)
def default_group_inside_stage(rank: int) -> None:
    """A rank forgets `group=`, and reduces over all ranks what the others reduce over their pair."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    for step in range(4):
        value = torch.ones(16)
        if (rank, step) == (1, 3):
            dist.all_reduce(value)  # CULPRIT
        else:
            dist.all_reduce(value, group=mine)
        log.info("step %d", step)
    dist.barrier()


@incident(4, set(), NO_FAULT)
def axes_in_another_order(rank: int) -> None:
    """One rank reduces over its data group before its tensor group: the others wait a little, and nothing hangs."""
    rows, columns = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tensor, data = rows[rank // 2], columns[rank % 2]
    for step in range(4):
        value = torch.ones(16)
        first, second = (data, tensor) if (rank, step) == (3, 3) else (tensor, data)
        dist.all_reduce(value, group=first)
        dist.all_reduce(value, group=second)
        log.info("step %d", step)


@incident(3, {0, 1}, STUCK | frozenset({"PG_INIT_HANG", "WAIT_CHAIN"}), any_of=True)
def store_key_that_nobody_sets(rank: int) -> None:
    """One rank waits in the store for a key that another one spelled differently."""
    reduce_steps()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("model_ready", "1")
    if rank == 1:
        store.wait(["model-ready"])  # CULPRIT
    dist.barrier()
