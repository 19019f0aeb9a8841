"""Do the ranks that share a mesh load at the same time? Only then may they call a collective: others may be in one of their own.

They meet through the key-value store of the job, not through the mesh's process groups. Those who meet form a generation. It
goes when all have arrived; it is void when the first of them has waited `PATIENCE_S`, and then each loads by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from titan_ckpt.state.exchange import Failure
from titan_ckpt.store.time_limit import on_a_thread

log = logging.getLogger(__name__)
PATIENCE_S = 30.0
LONGEST_NAP_S = 0.2
LONGEST_TELL_S = 10.0
SHOWN = 8
_GO, _VOID, _AGAIN = "go", "void", "again"


@dataclass(slots=True)
class _Calls:
    """The number of this process's next load."""

    next: int = 0


_calls = _Calls()


def begin() -> int:
    """The number of the load that begins on this rank. Ranks that do the same give it the same number."""
    _calls.next += 1
    return _calls.next - 1


def catch_up(call: int) -> None:
    """After a load together, in which another rank had the number `call`: count on from the higher one."""
    _calls.next = max(_calls.next, call + 1)


def tell(call: int, failure: Failure) -> None:
    """Let ranks that wait in `all_load` know that this rank's load `call` has failed: it may not even come to their mesh."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:

        def put() -> None:
            _failures(call).set(f"{failure.rank}", failure.text)
            _failures(call).set("any", "")

        done = on_a_thread(LONGEST_TELL_S, put)  # a store whose process is stopped never answers
        with suppress(RuntimeError):  # the store is gone: then all of the job is
            if done is not None:
                done.result()


def told(call: int, ranks: Sequence[int]) -> Failure | None:
    """The failure of the load `call` on one of `ranks`, if one told of it."""
    store = _failures(call)
    if not store.check(["any"]):
        return None
    failed = next((rank for rank in ranks if store.check([f"{rank}"])), None)
    return None if failed is None else Failure(failed, store.get(f"{failed}").decode())


def _failures(call: int) -> dist.Store:
    return dist.PrefixStore(f"titan_ckpt/load/failed/{call}", _get_default_store())


def all_load(mesh: DeviceMesh, call: int) -> bool:
    """Whether every rank of `mesh` is about to load; waits for them up to `PATIENCE_S`, then logs who is missing.

    It waits for no rank that has failed in the same load (`told`), and meets no rank that is in a later one for that reason.
    """
    meeting = _Meeting(mesh, call)
    while told(call, meeting.ranks) is None:
        verdict = meeting.verdict()
        if verdict != _AGAIN:
            return verdict == _GO
    return False


class _Meeting:
    """This rank's wait for the others, through one generation after the other."""

    def __init__(self, mesh: DeviceMesh, call: int) -> None:
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self._store = dist.PrefixStore(f"titan_ckpt/load/{self.ranks}/{list(mesh.mesh.shape)}", _get_default_store())
        self._call, self._give_up_at = call, time.monotonic() + PATIENCE_S

    def verdict(self) -> str:
        """Take part in the next generation: go, void, or again if it ended because a rank of it had failed."""
        generation = self._store.add("generation", 0)
        while (arrived := self._arrive(generation)) > len(self.ranks):
            generation += 1  # it went between the two calls
        if arrived == len(self.ranks):
            return self._decide(generation, _GO if self._are_all_current(generation) else _AGAIN)
        if self._is_decided_in_time(generation):
            return self._decide(generation, _VOID)
        if told(self._call, self.ranks) is not None:
            return self._decide(generation, _AGAIN)
        missing = [rank for rank in self.ranks if not self._store.check([f"{generation}/rank/{rank}"])]
        verdict = self._decide(generation, _VOID)
        if verdict == _VOID:
            log.warning(
                "%d of the %d ranks that share a mesh did not begin to load within %g s (%s%s): this rank loads by itself, and "
                "will not hear if another one fails. LoadPolicy(together=False) does not wait",
                len(missing), len(self.ranks), PATIENCE_S, ", ".join(map(str, missing[:SHOWN])),
                ", ..." if missing[SHOWN:] else "",
            )  # fmt: skip
        return verdict

    def _arrive(self, generation: int) -> int:
        """How many have arrived, with this rank; whoever counts them all finds the number of everyone's load."""
        self._store.set(f"{generation}/rank/{dist.get_rank()}", str(self._call))
        return self._store.add(f"{generation}/arrived", 1)

    def _are_all_current(self, generation: int) -> bool:
        """Whether no rank is still in a load in which another one has failed."""
        calls = {int(self._store.get(f"{generation}/rank/{rank}")) for rank in self.ranks}
        return all(told(call, self.ranks) is None for call in calls)

    def _decide(self, generation: int, verdict: str) -> str:
        """The verdict on a generation: this one, if it is the first. It ends the generation."""
        mine = f"{verdict} {dist.get_rank()}"
        found = self._store.compare_set(f"{generation}/verdict", "", mine).decode()
        if found == mine:
            self._store.add("generation", 1)
        return found.partition(" ")[0]

    def _is_decided_in_time(self, generation: int) -> bool:
        """Wait for a verdict, or for a rank that fails.

        Naps instead of `Store.wait`, which would keep other threads from the store.
        """
        nap_s = 0.001
        while not self._store.check([f"{generation}/verdict"]):
            if time.monotonic() > self._give_up_at or told(self._call, self.ranks) is not None:
                return False
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONGEST_NAP_S)
        return True
