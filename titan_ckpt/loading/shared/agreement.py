"""Agreement of all ranks on how a step of a load ended, through the key-value store of the job, within a time limit."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from titan_ckpt.errors import CheckpointError
from titan_ckpt.state.exchange import MAX_LINE, RankGroup, failure_of, reason_of, text_of
from titan_ckpt.store.time_limit import on_a_thread

GRACE_S, LONGEST_NAP_S, SHOWN = 10.0, 0.2, 8
"""Seconds that a rank which is late, or hears of a failure, gives the others to tell what they know."""
T = TypeVar("T")


class UnsentError(CheckpointError):
    """Bytes did not come from another rank, which knows why."""


class Agreement:
    """All ranks of the job, at one step of a load after the other. Creating it is a collective call."""

    def __init__(self, ranks: RankGroup, give_up_at: float) -> None:
        self._ranks, self._last_word_at = ranks, give_up_at + 2 * GRACE_S
        token = ranks.broadcast(secrets.token_hex(8))
        self._store = dist.PrefixStore(f"titan_ckpt/load/{token}", _get_default_store())

    def on(self, step: str, outcome: str, action: Callable[[], T]) -> T:
        """The result of `action`, once it has ended well on every rank.

        If not: its own error here, CheckpointError with `outcome` on the others.
        """
        try:
            result = action()
        except BaseException as error:
            other = self._told(step, outcome, error)
            if isinstance(error, UnsentError):
                raise CheckpointError(f"{outcome}, since " + (f"{other}; {error}" if other else str(error))) from error
            raise
        other = self._told(step, outcome, None)
        if other is not None:
            raise CheckpointError(f"{outcome}, since {other}")
        return result

    def _told(self, step: str, outcome: str, error: BaseException | None) -> str | None:
        """Tell how `step` ended here; why it failed on another rank, if it did."""
        rank, store = self._ranks.rank, self._store

        def tell() -> str | None:
            if error is not None and not isinstance(error, UnsentError):
                store.set(f"{step}/failed/{rank}", failure_of(rank, error).text)
            if error is not None:
                store.add(f"{step}/failures", 1)
            store.set(f"{step}/ended/{rank}", "")
            store.add(f"{step}/ended", 1)
            return self._wait(step)

        patience_s = max(self._last_word_at - time.monotonic(), 0.0) + GRACE_S
        # On a thread, since a store whose process is stopped never answers.
        done = on_a_thread(min(patience_s, threading.TIMEOUT_MAX), tell)
        try:
            if done is not None:
                return done.result()
            reason, cause = "no answer", None
        except RuntimeError as lost:
            reason, cause = text_of(lost, MAX_LINE), lost
        if error is not None:
            return None
        raise CheckpointError(
            f"{outcome}: rank {rank} cannot reach the key-value store of the job: {reason}. It is in the process of rank 0 or of "
            "the launcher, which may be stopped or gone: restart the job"
        ) from cause

    def _wait(self, step: str) -> str | None:
        """Wait until every rank has told, or for a moment more once one has failed. Why the first one failed."""
        store, world_size, nap_s = self._store, self._ranks.world_size, 0.001
        until, has_failed = self._last_word_at, False
        while store.add(f"{step}/ended", 0) < world_size and time.monotonic() < until:
            if not has_failed and store.add(f"{step}/failures", 0):
                until, has_failed = min(until, time.monotonic() + GRACE_S), True
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONGEST_NAP_S)
        if not store.add(f"{step}/failures", 0) and store.add(f"{step}/ended", 0) == world_size:
            return None
        failed = [rank for rank in range(world_size) if store.check([f"{step}/failed/{rank}"])]
        if failed:
            return f"rank {failed[0]} failed: {reason_of(store.get(f'{step}/failed/{failed[0]}').decode())}"
        silent = [str(rank) for rank in range(world_size) if not store.check([f"{step}/ended/{rank}"])]
        if not silent:
            return None
        shown = ", ".join(silent[:SHOWN]) + (", ..." if silent[SHOWN:] else "")
        return (
            f"{len(silent)} of {world_size} ranks (rank {shown}) did not come to the end of their part and do not say why: they "
            "are stopped, gone or very slow (LoadPolicy(timeout_s=))"
        )
