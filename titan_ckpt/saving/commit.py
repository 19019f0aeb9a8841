"""Commit a save on all ranks together. Everything that the coordinator writes here has a time limit.

`Committer` claims the run, commits uploads and applies retention. A store call that hangs is abandoned early enough for the
coordinator to report it to the other ranks while they still wait.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from titan_ckpt.checkpoint.commit_proved import commit_checkpoint
from titan_ckpt.format.commit import Before
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.names import parse_step
from titan_ckpt.saving.merge_parts import merge_parts
from titan_ckpt.saving.options import COMMIT_BY, GIVE_UP_AT, SaveAttempt, SaveOptions, no_steps
from titan_ckpt.saving.second_tier import Mirror
from titan_ckpt.saving.upload import RankPart
from titan_ckpt.saving.writers import Share
from titan_ckpt.state.exchange import Failure, RankGroup, failure_of, raise_failures, reason_of, shortened, text_of
from titan_ckpt.store.base import Store
from titan_ckpt.store.time_limit import run_until
from titan_ckpt.upkeep.deletion import apply_retention
from titan_ckpt.upkeep.ownership import check_claim, claim

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """This rank's finished upload, or the error that ended it.

    `share` is set on the coordinator only, as is `replaces`, what was there when the save began. `started_s` is a
    `time.perf_counter()`.
    """

    attempt: SaveAttempt
    part: RankPart | Failure
    share: Share | None
    replaces: Before | None
    started_s: float


class Committer:
    """Claims a run and commits its saves. Made and called by all ranks together; only the coordinator writes.

    The `mirror` hears of a step before its COMMIT, and says which ones retention must keep.
    """

    def __init__(self, store: Store, ranks: RankGroup, options: SaveOptions, *, mirror: Mirror | None) -> None:
        self._store, self._ranks, self._options, self._mirror = store, ranks, options, mirror
        self._own_steps: list[int] = []  # committed by this job, in order
        self.end()
        self._claim = self._claim_run() if options.is_exclusive else None

    def _claim_run(self) -> str | None:
        """The coordinator's claim. A store that cannot be written fails here, on every rank."""
        token: str | None = None
        failure: Failure | None = None
        error: BaseException | None = None
        if self._ranks.is_coordinator:
            try:
                token = run_until(GIVE_UP_AT * self._options.timeout_s, claim, self._store, what="claiming the run")
            except BaseException as caught:  # noqa: BLE001  (raised below, once the other ranks know)
                error, failure = caught, failure_of(self._ranks.rank, caught)
        outcome = self._ranks.broadcast(failure)
        if error is not None:
            raise error
        raise_failures([outcome], f"the first write to {self._store}")
        return token

    def commit(self, upload: Upload) -> Failure | None:
        """Commit once every rank has uploaded, then apply retention.

        If any rank failed, nothing is committed and every rank gets the failure. `is_committed` says it too, should this raise.
        """
        parts = self._ranks.gather(upload.part)
        self._are_parts_sent = True
        is_coordinator = self._ranks.is_coordinator
        outcome = self._ranks.broadcast(self._commit_in_time(upload, parts) if is_coordinator else None)
        self._is_over, self.is_committed = True, outcome is None
        if outcome is None and is_coordinator:
            if not self._own_steps:
                self._look_for_newer(upload.attempt.step)
            self._own_steps.append(upload.attempt.step)
            self._apply_retention(upload.attempt.step)
        return outcome

    def finish(self, failure: Failure, step: int) -> None:
        """Take part in what is left of a commit that this rank cannot go on with, so that the others learn of it at once."""
        if self._is_over:
            return
        if not self._are_parts_sent:
            self._ranks.gather(failure)
        outcome = self._ranks.broadcast(failure)
        log.error("the save of step %d failed: %s", step, reason_of(outcome.text))

    def end(self) -> None:
        """Forget how far the commit came: its save is over."""
        self._are_parts_sent = self._is_over = self.is_committed = False

    def _commit_in_time(self, upload: Upload, parts: list[RankPart | Failure]) -> Failure | None:
        """Commit in what is left of the time limit; an error is returned, so that every rank learns of it."""
        timeout_s = self._options.timeout_s
        used_s = time.perf_counter() - upload.started_s
        rest_s = max(COMMIT_BY * timeout_s - used_s, (COMMIT_BY - GIVE_UP_AT) * timeout_s)
        what = f"committing step {upload.attempt.step}, which may still appear"
        try:
            return run_until(rest_s, partial(self._commit, upload, parts), self._store, what=what)
        except BaseException as error:  # noqa: BLE001  (reported to every rank)
            return failure_of(self._ranks.rank, error)

    def _commit(self, upload: Upload, parts: list[RankPart | Failure], store: Store) -> Failure | None:
        failures = [part for part in parts if isinstance(part, Failure)]
        if failures:
            return _first(failures)
        assert upload.share is not None
        manifest = merge_parts(upload.attempt, [part for part in parts if isinstance(part, RankPart)], upload.share)
        if self._claim is not None:
            check_claim(store, self._claim)
        with nullcontext() if self._mirror is None else self._mirror.expected(upload.attempt.step):
            commit_checkpoint(store, manifest, dcp_metadata(manifest), replaces=upload.replaces)
        return None

    def _look_for_newer(self, step: int) -> None:
        """Warn, at the first commit, of steps with higher numbers: they are of another job, or this one went back."""
        try:
            steps = run_until(GIVE_UP_AT * self._options.timeout_s, _steps, self._store, what="listing the run")
        except BaseException as error:  # noqa: BLE001  (the save is committed, on every rank)
            log.warning("step %d was saved, but the run cannot be listed: %s", step, text_of(error))
            return
        if steps and max(steps) > step:
            log.warning(
                "%s has steps up to %d, higher than step %d that this job has just saved: until it passes them, a resume "
                "without a step opens step %d. Save a new training to a URL of its own; after going back to step %d on purpose, "
                "resume with URL@STEP",
                self._store, max(steps), step, max(steps), step,
            )  # fmt: skip

    def _apply_retention(self, step: int) -> None:
        if self._options.retention is None:
            return
        try:
            not_mirrored = no_steps() if self._mirror is None else self._mirror.due()
            if not_mirrored is None:
                return
            own = self._own_steps[
                -self._options.retention.keep_last :
            ]  # newest, though the run may have higher numbers
            keep = not_mirrored | self._options.in_use() | {*own}
            action = partial(apply_retention, policy=self._options.retention, now_s=time.time(), keep=keep)
            run_until(GIVE_UP_AT * self._options.timeout_s, action, self._store, what="deleting old checkpoints")
        except BaseException as error:  # noqa: BLE001  (the save is committed, on every rank)
            log.warning("step %d was saved, but deleting old checkpoints failed: %s", step, text_of(error))


def _steps(store: Store) -> list[int]:
    """The steps of a run, by the names of their folders."""
    return [step for name in store.folders() if (step := parse_step(name)) is not None]


def _first(failures: list[Failure]) -> Failure:
    """All failures as one of the first rank."""
    return Failure(failures[0].rank, shortened("\n".join(failure.text for failure in failures)))
