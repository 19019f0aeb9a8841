"""Two tiers: checkpoints are saved to a fast store and mirrored from there to a safe one in the background.

`Saver` writes the fast tier. `Mirror` copies each commit, every rank its own files, and the coordinator commits the copy when all
ranks are done. A job resumes from the nearest tier in which every rank finds the newest checkpoint whole.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import NotCommittedError, TitanError
from titan_ckpt.format.commit import find_commit, read_commit
from titan_ckpt.format.names import data_file
from titan_ckpt.location import redact_text
from titan_ckpt.saving.options import GIVE_UP_AT
from titan_ckpt.state.exchange import Failure, RankGroup, raise_failures
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.store.time_limit import run_until
from titan_ckpt.upkeep.copy import Copier

log = logging.getLogger(__name__)
MAX_BEHIND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorMetrics:
    """Counters of a mirror: the last step that is committed in the second tier, and the number of steps waiting."""

    last_mirrored_step: int | None
    waiting: int


class Mirror:
    """Copies commits from one store to another. Made, used and closed by all ranks together; every rank adds every commit."""

    def __init__(self, source: Store, target: str | Store, *, timeout_s: float) -> None:
        self._source, self._target = source, target if isinstance(target, Store) else open_store(target)
        self._give_up_s = GIVE_UP_AT * timeout_s
        self._ranks = RankGroup(timeout_s=timeout_s)
        self._steps: queue.Queue[int | None] = queue.Queue(MAX_BEHIND)
        self._error: BaseException | None = None
        self._last: int | None = None
        self._waiting: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="titan-ckpt-mirror", daemon=True)
        self._thread.start()

    def add(self, step: int) -> None:
        """Mirror a committed step; blocks while `MAX_BEHIND` others are waiting.

        Never raises: one rank may know of an error before the others, and all of them must mirror the same steps.
        """
        self._waiting.add(step)
        self._steps.put(step)

    def check(self) -> None:
        """Raise the mirror's first error, once; mirroring continues with the next step."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def metrics(self) -> MirrorMetrics:
        """Counters for a training log."""
        return MirrorMetrics(last_mirrored_step=self._last, waiting=len(self._waiting))

    def waiting(self) -> frozenset[int]:
        """Steps that the first tier must keep because they are not copied yet."""
        return frozenset(self._waiting)

    def close(self) -> None:
        """Mirror the waiting steps, release the thread and the process group, raise the first error."""
        self._steps.put(None)
        self._thread.join()
        self._ranks.close()
        self.check()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._mirror(step)
                self._last = step
            except BaseException as error:  # noqa: BLE001  (raised by the next check)
                log.error("step %d was not mirrored to %s: %s", step, self._target, error)
                self._error = self._error or error
            self._waiting.discard(step)

    def _mirror(self, step: int) -> None:
        started = time.perf_counter()
        outcome = next((f for f in self._ranks.gather(self._in_time(self._copy_own, step)) if f is not None), None)
        if self._ranks.is_coordinator and outcome is None:
            outcome = self._in_time(self._commit, step)
        raise_failures([self._ranks.broadcast(outcome)], f"mirroring step {step} to {self._target}")
        log.info("step %d is mirrored to %s (%.1f s)", step, self._target, time.perf_counter() - started)

    def _in_time(self, action: Callable[[int, Store, Store], None], step: int) -> Failure | None:
        """Run `action` on the two stores; an error becomes a Failure for the other ranks."""
        what = f"mirroring step {step}"
        try:
            run_until(self._give_up_s, partial(action, step), self._source, self._target, what=what)
        except Exception:  # noqa: BLE001  (raised on every rank)
            return Failure(self._ranks.rank, redact_text(traceback.format_exc()))
        return None

    def _copy_own(self, step: int, source: Store, target: Store) -> None:
        checkpoint = open_checkpoint(source.url, step=step, store=source)
        copier = Copier(checkpoint, target, lambda _: None)
        for file in checkpoint.manifest.files:
            if file.path.endswith(data_file("", self._ranks.rank)):
                copier.copy_file(file, trust_size=True)

    def _commit(self, step: int, source: Store, target: Store) -> None:
        """Commit the copy, after copying the files that no current rank owns (an incremental save may refer to them)."""
        checkpoint = open_checkpoint(source.url, step=step, store=source)
        copier = Copier(checkpoint, target, lambda _: None)
        for file in checkpoint.manifest.files:
            copier.copy_file(file, trust_size=True)
        is_committed = find_commit(target, step) is not None
        copier.copy_small(read_commit(source, step), is_committed=is_committed)


def open_nearest(urls: Sequence[str], *, all_steps: Callable[[int], list[int]] | None = None) -> Checkpoint:
    """Open the newest whole checkpoint of several tiers, from the first tier that has it.

    `all_steps` gathers every rank's newest step, so that all ranks of a job open the same checkpoint: a tier whose newest step
    differs between ranks (say, a machine's local disk) is skipped. NotCommittedError if no tier is left.
    """
    found: list[Checkpoint] = []
    problems: list[str] = []
    for url in urls:
        mine: Checkpoint | None = None
        try:
            mine = open_checkpoint(url)
        except TitanError as error:
            problems.append(str(error))
        step = -1 if mine is None else mine.step
        if set(all_steps(step) if all_steps else [step]) == {step} and mine is not None:
            found.append(mine)
    if not found:
        raise NotCommittedError(f"no tier holds a checkpoint that every rank sees whole: {'; '.join(problems) or urls}")
    return max(found, key=lambda checkpoint: checkpoint.step)
