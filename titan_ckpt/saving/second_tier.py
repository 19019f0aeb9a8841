"""Two tiers: checkpoints are saved to a fast store and mirrored from there to a safe one in the background.

`Saver` writes the fast tier. `Mirror` copies each commit, every rank its own files, and the coordinator commits the copy when all
ranks are done. A job resumes from the nearest tier in which every rank finds the newest checkpoint whole.

A step is due from before its COMMIT until its copy is committed. A copy that failed is tried again after the next step, when the
saver is closed, and when the next job starts. Until then the fast tier keeps it: `Mirror.due` tells retention, the file
`unmirrored.txt` tells `prune` and later jobs, also of a job that was killed. No step is copied while an older one is due and not
in that file: so the steps that a later job must copy are in it, or are newer than all that the safe tier has.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import CheckpointError, NotCommittedError, StoreError, TitanError
from titan_ckpt.format.commit import commit_version, found_before, read_commit
from titan_ckpt.format.names import UNMIRRORED, data_file
from titan_ckpt.location import redact
from titan_ckpt.saving.options import GIVE_UP_AT, SaveOptions
from titan_ckpt.saving.pace import Pace, fitting_pace
from titan_ckpt.state.exchange import Failure, RankGroup, failure_of, save_error
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.store.time_limit import run_until
from titan_ckpt.upkeep.copy import Copier
from titan_ckpt.upkeep.deletion import find_unmirrored, read_unmirrored
from titan_ckpt.upkeep.due import left_over, mark_unmirrored
from titan_ckpt.upkeep.ownership import check_claim, claim, join_tiers

log = logging.getLogger(__name__)
MAX_BEHIND = 2
LONGEST_LOOK_S, LONGEST_NOTE_S = 10.0, 30.0
NOTHING, UNKNOWN = -1, -2  # in place of the newest step of a tier


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorMetrics:
    """Counters of a mirror: the last step that is committed in the second tier, and the number of steps waiting."""

    last_mirrored_step: int | None
    waiting: int


class Mirror:
    """Copies commits from one store to another. Made, used and closed by all ranks together; every rank adds every commit."""

    def __init__(self, source: Store, target: str | Store, options: SaveOptions) -> None:
        self._source, self._target = source, target if isinstance(target, Store) else open_store(target)
        self._give_up_s = GIVE_UP_AT * options.timeout_s
        self._ranks = RankGroup(timeout_s=options.timeout_s)
        self._bytes_per_s, self._pace, self._said = options.upload_bytes_per_s, Pace(), set[str]()
        self._steps: queue.Queue[int | None] = queue.Queue(MAX_BEHIND)
        self._error: BaseException | None = None
        self._last: int | None = None
        self._lock, self._file_lock = threading.Lock(), threading.Lock()
        self._waiting: set[int] = set()
        self._added: set[int] = set()  # all steps of this job
        self._due: set[int] = set()  # the coordinator's; complete once it is known what earlier jobs left
        self._ahead: set[int] = set()  # due steps whose round has not come: not committed yet, or in the queue
        self._unwritten: set[int] = set()  # steps whose line in `unmirrored.txt` is still to be written, or removed
        self._failed: dict[int, int] = {}  # how many copies had failed when that of this step did last
        self._trusts_list = True
        self._gone: set[int] = set()  # due steps that the first tier does not show
        self._is_known, self._why_unknown, self._has_looked = False, "", threading.Event()
        self._is_exclusive, self._is_joined = options.is_exclusive, False  # the second is the coordinator's
        self._claim: str | None = None  # the coordinator's
        # Of the round: the step that is new, those left to do once they are named, whether this rank has told of the first.
        self._new: int | None = None
        self._left: list[int] | None = None
        self._is_sent = False
        self._thread = threading.Thread(target=self._run, name="titan-ckpt-mirror", daemon=True)
        self._thread.start()

    @contextmanager
    def expected(self, step: int) -> Iterator[None]:
        """On the coordinator, around the COMMIT of `step`: first its copy is due, in the file too, lest somebody delete it.

        Not if the COMMIT fails; but an earlier save of the step that is due stays so.
        """
        with self._lock:
            is_new = step not in self._due
            self._ahead |= {step}
        self._note(step, is_due=True)
        try:
            yield
        except BaseException:
            with self._lock:
                self._ahead -= {step}
            if is_new:
                self._note(step, is_due=False)
            raise

    def add(self, step: int) -> None:
        """Mirror a committed step; blocks while `MAX_BEHIND` others are waiting.

        Never raises: one rank may know of an error before the others, and all of them must mirror the same steps.
        """
        with self._lock:
            if self._waiting:  # the copy under way is behind
                self._pace.lift()
            self._waiting.add(step)
            self._added.add(step)
        self._steps.put(step)

    def check(self) -> None:
        """Raise the mirror's first error, once; mirroring continues with the next step."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def metrics(self) -> MirrorMetrics:
        """Counters for a training log."""
        return MirrorMetrics(last_mirrored_step=self._last, waiting=len(self._waiting))

    def due(self) -> frozenset[int] | None:
        """On the coordinator, steps that the first tier must keep because they are not copied yet; None while that is unknown."""
        self._has_looked.wait(LONGEST_LOOK_S)
        with self._lock:
            return frozenset(self._waiting | self._due) if self._is_known else None

    def close(self) -> None:
        """Mirror the waiting and the due steps, release the thread and the process group, raise the first error."""
        with self._lock:
            self._bytes_per_s = None
            self._pace.lift()
        self._steps.put(None)
        self._thread.join()
        self._ranks.close()
        self.check()

    def _run(self) -> None:
        """One round for what earlier jobs left, one after each step, one at the end; each also tries what is due.

        Whatever fails in a round on one rank, `_finish` takes part in the rest of it, or the others would wait for this rank.
        """
        for step in chain([None], iter(self._steps.get, None), [None]):
            self._left, self._is_sent = None, False
            try:
                self._round(step)
            except BaseException as error:  # noqa: BLE001  (raised by the next check)
                self._finish(step, error)
            self._has_looked.set()
            if step is not None:
                with self._lock:
                    self._waiting.discard(step)

    def _round(self, step: int | None) -> None:
        """Mirror `step` and what is due. The coordinator names the steps, so that all ranks copy the same."""
        todo = self._todo(step) if self._ranks.is_coordinator else []
        self._announce(step, todo, self._refusal(todo))
        while self._left:
            self._agree(self._in_time(self._copy_own, self._left[0]))
        if step is None:
            self._note_again()

    def _refusal(self, todo: list[int]) -> Failure | None:
        """Why nothing may be copied; on the coordinator, which joins the two tiers before the first copy."""
        if not todo:
            return None
        older = sorted(step for step in self._unwritten & self._due if step < max(todo))
        if not self._is_known or older:
            why = f"{UNMIRRORED} was not written for {older}" if older else self._why_unknown
            return Failure(self._ranks.rank, f"{why}; until then a copy could make an older step be forgotten")
        if self._is_joined:
            return None
        failure = self._in_time(self._join, todo[0])
        self._is_joined = failure is None
        return failure

    def _announce(self, step: int | None, todo: list[int], refusal: Failure | None) -> None:
        """Tell or hear what the coordinator wants done. If it refuses, the first step fails on every rank and none is left."""
        self._new, self._left, refusal = self._ranks.broadcast((step, todo, refusal))
        if refusal is not None and self._left:
            refused, self._left = self._left[0], []
            self._end(refused, refusal, 0.0)

    def _finish(self, step: int | None, error: BaseException) -> None:
        """Take part in what is left of a round that this rank cannot go on with, so that the others learn of it at once."""
        log.error("mirroring to %s failed: %s", self._target, error)
        try:
            failure = failure_of(self._ranks.rank, error)
            if self._left is None:
                self._announce(step, [] if step is None else [step], failure)
            while self._left:
                self._agree(failure)
        except BaseException as caught:  # noqa: BLE001  (raised by the next check)
            log.error("mirroring to %s failed: %s", self._target, caught)
            self._error = self._error or caught

    def _agree(self, mine: Failure | None) -> None:
        """Exchange whether every rank could copy the first step that is left, and commit it. After a failure none is left.

        So a store that is down is not asked for each step that is due.
        """
        assert self._left
        step, started = self._left[0], time.perf_counter()
        outcome = mine
        if not self._is_sent:
            outcome = next((failure for failure in self._ranks.gather(mine) if failure is not None), None)
            self._is_sent = True
        if self._ranks.is_coordinator and outcome is None:
            outcome = self._in_time(self._commit, step)
        outcome = self._ranks.broadcast(outcome)
        self._is_sent, self._left = False, self._left[1:] if outcome is None else []
        self._end(step, outcome, time.perf_counter() - started)

    def _end(self, step: int, failure: Failure | None, seconds: float) -> None:
        """Remember the outcome, the same on every rank. The next check raises a step's first failure; later ones are logged."""
        if failure is None:
            log.info("step %d is mirrored to %s (%.1f s)", step, self._target, seconds)
            self._last = max(step, self._last or 0)
        else:
            error = save_error([failure], f"mirroring step {step} to {self._target}")
            log.error("step %d was not mirrored to %s, and stays in %s: %s", step, self._target, self._source, error)
            self._error = self._error or (error if step == self._new else None)
        if self._ranks.is_coordinator:
            if failure is not None:
                self._failed[step] = 1 + max(self._failed.values(), default=0)
            self._note(step, is_due=failure is not None or step in self._ahead)  # it may be saved again already

    def _todo(self, step: int | None) -> list[int]:
        """The step itself, then what is due, newest first; on the coordinator.

        Those that failed come last, in that order: one that cannot be read ends a round, and must not hold up the others.
        """
        with self._lock:
            self._ahead -= {step}
        try:
            run_until(self._give_up_s, self._look, self._source, self._target, what="comparing the two tiers")
        except Exception as error:  # noqa: BLE001  (retention waits until it is known)
            self._why_unknown = f"what {self._target} lacks is unknown: {error}"
            log.warning("%s; so %s keeps everything", self._why_unknown, self._source)
        self._has_looked.set()
        self._note_again()
        due = self._due - self._gone - self._ahead - {step} if self._is_known else set()
        ordered = sorted(due, key=lambda number: (self._failed.get(number, 0), -number))
        return ordered if step is None else [step, *ordered]

    def _note_again(self) -> None:
        for number in sorted(self._unwritten):
            self._note(number, is_due=number in self._due)

    def _look(self, source: Store, target: Store) -> None:
        """Find what earlier jobs left, once, what a person let go, and which due steps are not there: those are not copied."""
        if not self._is_known:
            noted = read_unmirrored(source)
            found = left_over(source, target, noted, own=frozenset(self._added))
            self._unwritten |= found ^ noted
            with self._lock:
                self._due, self._is_known = self._due | found, True
        if let_go := self._let_go(source):
            log.warning("not copied to %s: steps %s, whose lines were removed from %s", target, let_go, UNMIRRORED)
        gone = {step for step in self._due - self._ahead if commit_version(source, step) is None}
        for step in sorted(gone - self._gone):
            log.warning(
                "%s@%d is not there, so it cannot be copied to %s; if it is gone for good, remove its line from %s",
                source, step, target, source.where(UNMIRRORED),
            )  # fmt: skip
        self._gone = gone

    def _let_go(self, source: Store) -> list[int]:
        """Take steps whose line a person has removed off what is due.

        A file that is not there says nothing, nor one of which a write was given up: that may still happen, with older lines.
        """
        noted = find_unmirrored(source)
        if noted is None or not self._trusts_list:
            return []
        with self._lock:
            let_go = self._due - self._unwritten - self._ahead - noted
            self._due = self._due - let_go
        return sorted(let_go)

    def _note(self, step: int, *, is_due: bool) -> None:
        """Remember whether a step is due, in `unmirrored.txt` too."""
        with self._lock:
            was_due = step in self._due
            self._due = self._due | {step} if is_due else self._due - {step}
        if was_due == is_due and step not in self._unwritten:
            return
        try:
            with self._file_lock:  # a save announces the next step while the copy of one ends
                action = partial(
                    mark_unmirrored, step=step, is_due=is_due, others=frozenset(self._due), adds=not self._trusts_list
                )
                run_until(min(self._give_up_s / 2, LONGEST_NOTE_S), action, self._source, what=f"writing {UNMIRRORED}")
            self._unwritten.discard(step)
        except Exception as error:  # noqa: BLE001  (this job knows it anyway)
            self._unwritten.add(step)
            self._trusts_list = False
            log.warning("%s was not written and is tried again: %s", self._source.where(UNMIRRORED), error)

    def _in_time(self, action: Callable[[int, Store, Store], None], step: int) -> Failure | None:
        """Run `action` on the two stores; an error becomes a Failure for the other ranks."""
        what = f"mirroring step {step}"
        try:
            run_until(self._give_up_s, partial(action, step), self._source, self._target, what=what)
        except BaseException as error:  # noqa: BLE001  (raised on every rank)
            self._pace.stop()  # a copy that was given up writes no more
            return failure_of(self._ranks.rank, error)
        return None

    def _join(self, _step: int, source: Store, target: Store) -> None:
        """Before the first copy: the target is this run's, and jobs that copied there before can no longer commit."""
        join_tiers(source, target)
        if self._is_exclusive:
            self._claim = claim(target)

    def _copy_own(self, step: int, source: Store, target: Store) -> None:
        found_before(target, step)  # nothing is written where another program's checkpoint is
        checkpoint = open_checkpoint(source.url, step=step, store=source)
        own = [file for file in checkpoint.manifest.files if file.path.endswith(data_file("", self._ranks.rank))]
        with self._lock:
            pace = fitting_pace(self._bytes_per_s, own, give_up_s=self._give_up_s, said=self._said)
            self._pace = pace
            if len(self._waiting) > 1:
                pace.lift()
        copier = Copier(checkpoint, target, lambda _: None, before=pace.before)
        for file in own:
            copier.copy_file(file, trust_size=True)

    def _commit(self, step: int, source: Store, target: Store) -> None:
        """Commit the copy, after copying the files that no current rank owns (an incremental save may refer to them).

        An earlier save of the step in the target is replaced: the first tier is right.
        """
        checkpoint = open_checkpoint(source.url, step=step, store=source)
        before = found_before(target, step)
        copier = Copier(checkpoint, target, lambda _: None)
        for file in checkpoint.manifest.files:
            copier.copy_file(file, trust_size=True)
        if self._claim is not None:
            check_claim(target, self._claim)
        copier.copy_small(read_commit(source, step), before)


def open_nearest(urls: Sequence[str], *, all_steps: Callable[[int], list[int]] | None = None) -> Checkpoint:
    """Open the newest whole checkpoint of several tiers, from the first tier that has it.

    `all_steps` gathers every rank's newest step, so that all ranks of a job open the same checkpoint: a tier whose newest step
    differs between ranks (say, a machine's local disk) is skipped. NotCommittedError if no tier is left. StoreError on every rank
    if any of them could not look at a tier: it may hold a newer checkpoint than the others.
    """
    found: list[Checkpoint] = []
    problems: list[str] = []
    for url in urls:
        mine: Checkpoint | None = None
        step, failure = NOTHING, "another rank could not read it"
        try:
            mine = open_checkpoint(url)
            step = mine.step
        except CheckpointError as error:
            problems.append(str(error))
        except TitanError as error:
            step, failure = UNKNOWN, str(error)
        steps = set(all_steps(step) if all_steps else [step])
        if UNKNOWN in steps:
            raise StoreError(
                f"{redact(url)}: {failure}; it may hold the newest checkpoint. Try again, or name a step: URL@STEP"
            )
        if steps == {step} and mine is not None:
            found.append(mine)
    if not found:
        raise NotCommittedError(f"no tier holds a checkpoint that every rank sees whole: {'; '.join(problems) or urls}")
    return max(found, key=lambda checkpoint: checkpoint.step)
