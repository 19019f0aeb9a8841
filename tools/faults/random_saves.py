"""Runs of saves over a store whose every call may fail by chance: what must never happen, whatever fails.

Each run has options of its own: how often calls fail, retries, sync or async, codec, incremental, retention, a mirror, pins.
After each save a healthy store looks at what is really there. Violations:

  a step with a COMMIT is not whole, or holds values that were never saved as that step
  a pinned step, the newest successful one, or one that the mirror has not got, is gone
  `open_checkpoint` over the failing store returns another step than the newest one (an error is fine)
  a `.metadata` names a file that is missing, so that a plain DCP reader would find data missing

A save of an existing step that fails between its last two writes leaves its own `.metadata` (a whole checkpoint, not committed)
beside the old COMMIT; `behind` counts how often that was seen.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.errors import TitanError
from titan_ckpt.format.codec import CODECS
from titan_ckpt.format.dcp_read import data_paths
from titan_ckpt.format.names import METADATA
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.store.any_fsspec import FsspecStore
from titan_ckpt.store.base import RetryPolicy
from titan_ckpt.upkeep.retention import RetentionPolicy
from tools.faults.random_fsspec import Faults, random_faults

RATES = (0.01, 0.03, 0.05, 0.10, 0.15)
SAVES_PER_RUN = 10


@dataclass(slots=True)
class RandomOutcome:
    """Totals; `wrong` must stay empty. `refused` are opens that raised the store's error."""

    saves: int = 0
    committed: int = 0
    opened: int = 0
    refused: int = 0
    deleted: int = 0
    mirrored: int = 0
    behind: int = 0
    calls: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class _Run:
    """One run of saves and what is known of it: the values that each step may hold, and which steps are pinned."""

    def __init__(self, folder: Path, rng: random.Random, faults: Faults, outcome: RandomOutcome) -> None:
        self._folder, self._rng, self._faults, self._outcome = folder, rng, faults, outcome
        policy = RetryPolicy(tries=rng.choice((1, 2, 4, 6)), first_wait_s=0.0, longest_wait_s=0.0, deadline_s=30.0)
        self.store = FsspecStore(f"unsafe://{folder}/run", policy)
        self.mirror = FsspecStore(f"unsafe://{folder}/mirror", policy) if rng.random() < 0.4 else None
        self.retention = RetentionPolicy(keep_last=rng.randint(1, 3)) if rng.random() < 0.7 else None
        self.options = SaveOptions(
            codec=rng.choice(CODECS), incremental=rng.random() < 0.6, mirror=self.mirror, retention=self.retention,
            is_exclusive=rng.random() < 0.5,
        )  # fmt: skip
        self._is_sync = rng.random() < 0.5
        self._values: dict[int, list[float]] = {}
        self._certain: dict[int, float] = {}
        self._exist: set[int] = set()
        self._pinned: set[int] = set()
        self._seen: set[int] = set()
        self._mirrored: set[int] = set()

    def go(self) -> None:
        """Save SAVES_PER_RUN times, in several jobs; now and then a step is saved again, or the mirror does not answer a job."""
        step, number = 0, 0
        while number < SAVES_PER_RUN:
            self._faults.down = f"{self._folder}/mirror" if self._rng.random() < 0.15 else ""
            saver = self._saver()
            for _ in range(min(self._rng.randint(1, 4), SAVES_PER_RUN - number)):
                step, number = step + (self._rng.randint(0, 2) if step else 1), number + 1
                self._save(saver, step, value=float(100 * step + number))
                self._check()
            if saver is not None:
                with suppress(TitanError, OSError):
                    saver.close()
                self._check(is_closed=True)

    def _saver(self) -> Saver | None:
        """A new job on the run; None if its claim failed."""
        with suppress(TitanError, OSError):
            return Saver(self.store, self.options)
        return None

    def _save(self, saver: Saver | None, step: int, *, value: float) -> None:
        self._outcome.saves += 1
        self._values.setdefault(step, []).append(value)
        if saver is None:
            return
        state = {"w": torch.full((30,), value), "frozen": torch.arange(64.0), "step": step}
        try:
            if self._is_sync:
                saver.save_now(state, step=step)
            else:
                saver.save(state, step=step).wait()
        except (TitanError, OSError):
            self._certain.pop(step, None)
        else:
            self._certain[step] = value
            self._exist.add(step)
            self._outcome.committed += 1
            if self._rng.random() < 0.15:
                self._pin(step)
        with suppress(TitanError, OSError):
            saver.check()

    def _pin(self, step: int) -> None:
        self._pinned.add(step)
        (self._folder / "run" / "pins.txt").write_text("".join(f"{pinned}\n" for pinned in self._pinned))

    def _check(self, *, is_closed: bool = False) -> None:
        """Look at what is there, with a store that does not fail."""
        newest = self._open_newest()
        present = self._committed("run")
        self._outcome.deleted += len(self._seen - present)
        self._seen = present
        for step in present:
            self._check_step("run", step)
        due = self._pinned | set(sorted(self._exist)[-1:])
        for step in sorted(due - present):
            self._wrong(f"step {step} was pinned or the newest, and is gone")
        if newest is not None and newest != max(present, default=None):
            self._wrong(f"step {newest} was opened, the newest is {max(present, default=None)}")
        self._check_indices("run")
        if self.mirror is not None and is_closed:
            mirrored = self._committed("mirror")
            self._outcome.mirrored += len(mirrored - self._mirrored)
            for step in mirrored:
                self._check_step("mirror", step)
            self._check_indices("mirror")
            for step in sorted(self._exist - present - mirrored):
                self._wrong(f"step {step} was deleted before the mirror had it")
            self._mirrored = mirrored

    def _open_newest(self) -> int | None:
        """The step that opens over the failing store; None if it says why it cannot."""
        try:
            found = open_checkpoint(self.store.url, store=self.store)
        except (TitanError, OSError):
            self._outcome.refused += 1
            return None
        self._outcome.opened += 1
        return found.step

    def _committed(self, name: str) -> set[int]:
        infos = list_checkpoints(str(self._folder / name))
        for info in infos:
            if info.state not in ("committed", "partial"):
                self._wrong(f"{name}@{info.step} is {info.state}: {info.problem}")
        return {info.step for info in infos if info.state == "committed"}

    def _check_step(self, name: str, step: int) -> None:
        url = f"{self._folder / name}@{step}"
        problems = verify(url, read_data=True)
        if problems and all(problem.path.endswith(METADATA) for problem in problems):
            self._outcome.behind += 1
        elif problems:
            self._wrong(f"{name}@{step}: {problems[0]}")
            return
        opened = open_checkpoint(url)
        value, frozen = opened.read("w"), opened.read("frozen")
        allowed = [self._certain[step]] if step in self._certain and name == "run" else self._values.get(step, [])
        if float(value[0]) not in allowed or not torch.equal(value, value[:1].expand(30)):
            self._wrong(f"{name}@{step} holds {float(value[0])}, saved were {allowed}")
        if not torch.equal(frozen, torch.arange(64.0)):
            self._wrong(f"{name}@{step}: the frozen tensor changed")

    def _check_indices(self, name: str) -> None:
        for path in (self._folder / name).glob("step-*/.metadata"):
            names = data_paths(path.read_bytes(), where=str(path))
            if missing := [file for file in names if not (path.parent / file).exists()]:
                self._wrong(f"{name}/{path.parent.name}/.metadata names {missing[0]}, which is gone")

    def _wrong(self, text: str) -> None:
        self._outcome.wrong.append(f"{self._folder.name} ({self.options.codec}, rate {self._faults.rate}): {text}")


def random_runs(folder: Path, saves: int, *, seed: int) -> Iterator[RandomOutcome]:
    """Runs of 10 saves until `saves` were tried; yields the totals after each run."""
    outcome = RandomOutcome()
    logger = logging.getLogger("titan_ckpt")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        for number in range(-(-saves // SAVES_PER_RUN)):
            rng = random.Random(f"{seed}-{number}")
            with random_faults(rng.choice(RATES), seed=rng.getrandbits(32)) as faults:
                _Run(folder / f"run-{seed}-{number}", rng, faults, outcome).go()
                outcome.calls += faults.calls
                outcome.injected += faults.injected
            yield outcome
    finally:
        logger.setLevel(level)


def describe(outcome: RandomOutcome) -> dict[str, Any]:
    """The totals as JSON."""
    names = ("saves", "committed", "opened", "refused", "deleted", "mirrored", "behind", "calls")
    return {name: getattr(outcome, name) for name in names} | {
        "injected": dict(outcome.injected),
        "wrong": outcome.wrong,
    }
