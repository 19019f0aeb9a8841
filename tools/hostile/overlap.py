"""A save and a deletion that overlap, at every moment: every committed step is whole afterwards, for us and for plain DCP.

`overlap` runs one of the two until a call of its store, then the whole other one, then the rest. A save must not be lost in
silence: if neither side raised, the step is there; if the save of a step that was there before raised, the older one still is.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.kinds import CheckpointState
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.errors import TitanError
from titan_ckpt.saving.saver import SaveOptions, Saver, save
from titan_ckpt.store.base import Buffer, ObjectInfo
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.copy import copy_checkpoint
from titan_ckpt.upkeep.deletion import delete, plan_removal
from titan_ckpt.upkeep.retention import RetentionPolicy
from tools.hostile.outcome import Outcome

LONGEST_WAIT_S = 5.0
MOST_CALLS = 400
OLD = RetentionPolicy(keep_last=1)
ALL = RetentionPolicy(keep_last=9, is_incomplete=True, older_than_s=0)
OLD_AND_ALL = RetentionPolicy(keep_last=1, is_incomplete=True, older_than_s=0)


class Interrupted(FileStore):
    """Runs `other` once, before its call number `at`."""

    at, calls, other = 0, 0, staticmethod(lambda: None)

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.other()

    def stat(self, path: str) -> ObjectInfo:
        self.count()
        return super().stat(path)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.count()
        return super().list(prefix)

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        self.count()
        return super().write(path, parts)

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        self.count()
        return super().write_if(path, data, version=version)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.count()
            super().delete([path])


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((8,), value), "frozen": torch.arange(4.0)}


def remove(store: FileStore, policy: RetentionPolicy) -> None:
    delete(store, plan_removal(store, policy, now_s=time.time() + 2))


REMOVALS = ("prune", "incomplete", "all")


class Halves:
    """A deletion on a thread of its own that waits before its call `then` until `end`."""

    def __init__(self, run: Path, then: int, removing: Callable[[], None]) -> None:
        self.store = Interrupted(str(run))
        self.store.at, self.store.other = then, self._wait
        self._is_halfway, self._goes_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(removing,))

    def _run(self, removing: Callable[[], None]) -> None:
        removing()
        self._is_halfway.set()

    def _wait(self) -> None:
        self._is_halfway.set()
        self._goes_on.wait()

    def begin(self) -> None:
        self._thread.start()
        self._is_halfway.wait(LONGEST_WAIT_S)  # it may need the lock of the call that it interrupts

    def end(self) -> None:
        self._goes_on.set()
        if self._thread.ident is not None:
            self._thread.join()


# What runs first and is interrupted, what runs at that moment, and the policy of the deletion.
CASES = {
    "save in prune": OLD, "prune in save": OLD, "again in prune": OLD, "incomplete in save": ALL, "incomplete in again": ALL,
    "save in incomplete": ALL, "incomplete in copy": ALL, "all in copy": OLD_AND_ALL, "all in again": OLD_AND_ALL,
}  # fmt: skip


def overlap(run: Path, case: str, at: int, then: int = MOST_CALLS) -> tuple[int, list[str]]:
    """Run one of the two until its call `at`, then the other, then the rest: the calls that the first made, and what is wrong.

    If a save is first, the deletion that interrupts it stops before its call `then`, and goes on when the save has ended.
    """
    store, errors = Interrupted(str(run)), list[TitanError]()

    def tried(action: Callable[[], object]) -> None:
        try:
            action()
        except TitanError as error:
            errors.append(error)

    other, _, first = case.partition(" in ")
    is_save_first = other in REMOVALS
    with Saver(store if is_save_first else str(run), SaveOptions(incremental=True, is_exclusive=False)) as saver:
        for step in (1, 2):
            saver.save_now(state(step), step=step)
        save(str(run), state(9), step=100)
        saving = _saving(first if is_save_first else other, run, saver, store if is_save_first else FileStore(str(run)))

        def removing() -> None:
            remove(halves.store if is_save_first else store, CASES[case])

        halves = Halves(run, then, lambda: tried(removing))
        store.calls, store.at, store.other = 0, at, halves.begin if is_save_first else lambda: tried(saving)
        tried(saving if is_save_first else removing)
        halves.end()
        calls, store.at = store.calls, 0
    return calls, [*wrong(run), *(lost(run, case, errors) if at <= calls else [])]


def _copying(run: Path, store: FileStore) -> Callable[[], object]:
    save(f"{run}-source", state(3), step=3)
    return lambda: copy_checkpoint(open_checkpoint(f"{run}-source@3"), store)


def _saving(kind: str, run: Path, saver: Saver, store: FileStore) -> Callable[[], object]:
    """A new incremental save, the save of a step that is there already, or a copy from another run."""
    if kind == "copy":
        return _copying(run, store)
    return (lambda: saver.save_now(state(3), step=3)) if kind == "save" else (lambda: save(store, state(22), step=2))


def wrong(run: Path) -> list[str]:
    """What is wrong with the committed steps of a run."""
    found = []
    for info in list_checkpoints(str(run)):
        if info.state == CheckpointState.PARTIAL:
            continue
        try:
            found += [f"step {info.step}: {problem}" for problem in verify(f"{run}@{info.step}", read_data=True)]
            dcp.load(state(0), checkpoint_id=str(run / f"step-{info.step:08d}"), no_dist=True)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is a finding)
            found.append(f"step {info.step} ({info.state}): {type(error).__name__}: {error}")
    return found


def lost(run: Path, case: str, errors: list[TitanError]) -> list[str]:
    """A step that had to be there, or has to have another value; a policy may let step 2 go, and 3 is older than 100."""
    if "prune" in case or "all" in case:
        return []
    step, values = (2, (2.0, 22.0) if errors else (22.0,)) if "again" in case else (3, (3.0,))
    try:
        value = float(open_checkpoint(f"{run}@{step}").read("w")[0])
    except TitanError as error:
        return [] if errors and step == 3 else [f"step {step} is lost: {error}"]
    return [] if value in values else [f"step {step} has the value {value}, expected one of {values}"]


def run_overlaps(seed: int, seconds: float) -> Outcome:
    """Every moment of every case; then, at random, deletions that begin at one moment of a save and go on after it."""
    outcome, rng, end = Outcome(part="overlap"), random.Random(seed), time.monotonic() + seconds
    moments = [(case, MOST_CALLS) for case in CASES]
    at = 0
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            at += 1
            for case, then in moments or crossings(rng, 1):
                run = Path(folder, str(outcome.cases))
                calls, found = overlap(run, case, at if then == MOST_CALLS else rng.randint(1, 28), then)
                outcome.cases += 1
                outcome.counts["in the midst of it" if then < MOST_CALLS else case] += 1
                outcome.failures += [f"{case}, call {at}, {then}: {text}" for text in found]
                if then == MOST_CALLS and calls < at:
                    moments = [moment for moment in moments if moment[0] != case]
                shutil.rmtree(run)
                shutil.rmtree(f"{run}-source", ignore_errors=True)
    return outcome


def crossings(rng: random.Random, count: int) -> list[tuple[str, int]]:
    """Cases in which a save is interrupted, each with the call before which the deletion waits for the save's end."""
    cases = [case for case in CASES if case.partition(" ")[0] in REMOVALS]
    return [(rng.choice(cases), rng.randint(1, 60)) for _ in range(count)]
