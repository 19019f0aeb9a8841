"""Jobs with two tiers whose copies fail at any step: what retention must never delete, and what the next job must copy.

Each run has jobs of one to three saves. Before each save a draw says which steps the second tier cannot take, which COMMITs the
first tier does not show for the moment, and whether `unmirrored.txt` can be read and written. (It can until the first copy:
without a list and without a copy nobody can tell what was to be copied.) Violations:

  a step of a job with a mirror is gone from the first tier, and the second has not got it
  a step holds other values than were saved, in either tier
  after a last job without faults the second tier lacks a step that the first has
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.errors import NotFoundError, TitanError, TransientStoreError
from titan_ckpt.format.names import UNMIRRORED, step_folder
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.store.base import Buffer, ObjectInfo
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.retention import RetentionPolicy

SAVES_PER_RUN = 10


class Tier(FileStore):
    """A tier that for a while does not show some files, or cannot write below some paths."""

    hidden: tuple[str, ...] = ()
    unwritable: tuple[str, ...] = ()

    def stat(self, path: str) -> ObjectInfo:
        self._show(path)
        return super().stat(path)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        self._show(path)
        return super().read(path, start, length)

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        if path.startswith(self.unwritable):
            raise TransientStoreError(f"{path}: cannot be written")
        return super().write(path, parts)

    def _show(self, path: str) -> None:
        if path in self.hidden:
            raise NotFoundError(f"{path}: not there")


@dataclass(slots=True)
class TierOutcome:
    """Totals; `wrong` must stay empty."""

    saves: int = 0
    deleted: int = 0
    failed_copies: int = 0
    wrong: list[str] = field(default_factory=list)


class _Run:
    def __init__(self, folder: Path, rng: random.Random, outcome: TierOutcome) -> None:
        self._name, self._rng, self._outcome = folder.name, rng, outcome
        self._fast, self._safe = Tier(str(folder / "fast")), Tier(str(folder / "safe"))
        self._retention = RetentionPolicy(keep_last=rng.randint(1, 2))
        self._values: dict[int, float] = {}
        self._to_copy: set[int] = set()

    def go(self) -> None:
        """Jobs until SAVES_PER_RUN steps were saved, then one without faults."""
        step = number = 0
        while number < SAVES_PER_RUN:
            has_mirror = self._rng.random() < 0.85
            saver = self._saver(has_mirror=has_mirror)
            for _ in range(min(self._rng.randint(1, 3), SAVES_PER_RUN - number)):
                self._draw_faults(step)
                step, number = step + (self._rng.choice((0, 1, 1, 2)) if step else 1), number + 1
                self._save(saver, step, float(100 * number + step), has_mirror=has_mirror)
            self._close(saver)
            self._check()
        self._fast.hidden = self._fast.unwritable = self._safe.unwritable = ()
        self._close(self._saver(has_mirror=True))
        self._check()
        self._outcome.deleted += len(self._values.keys() - self._committed(self._fast))
        for lost in sorted((self._committed(self._fast) & self._to_copy) - self._committed(self._safe)):
            self._wrong(f"step {lost} was not copied by a job without faults")

    def _saver(self, *, has_mirror: bool) -> Saver:
        """A job; one without a mirror deletes nothing, since it cannot know what another could not write down."""
        options = SaveOptions(mirror=self._safe, retention=self._retention) if has_mirror else SaveOptions()
        return Saver(self._fast, options)

    def _draw_faults(self, newest: int) -> None:
        def some(share: float) -> list[str]:
            return [step_folder(step) for step in range(1, newest + 3) if self._rng.random() < share]

        is_list_hidden = self._rng.random() < 0.15
        is_list_stuck = self._rng.random() < 0.2 and bool(self._committed(self._safe))
        self._safe.unwritable = tuple(some(0.4))
        hidden = [f"{folder}/COMMIT.json" for folder in some(0.1)]
        self._fast.hidden = (*hidden, *([UNMIRRORED] if is_list_hidden else []))
        self._fast.unwritable = (UNMIRRORED,) if is_list_stuck else ()

    def _save(self, saver: Saver, step: int, value: float, *, has_mirror: bool) -> None:
        self._fast.hidden = tuple(path for path in self._fast.hidden if not path.startswith(step_folder(step)))
        saver.save({"w": torch.full((9,), value)}, step=step).wait()
        self._outcome.saves += 1
        self._values[step] = value
        self._to_copy = self._to_copy | {step} if has_mirror else self._to_copy - {step}
        while saver._mirror is not None and saver._mirror.metrics().waiting:
            saver._mirror._thread.join(0.005)

    def _close(self, saver: Saver) -> None:
        try:
            saver.close()
        except TitanError:
            self._outcome.failed_copies += 1

    def _check(self) -> None:
        here, there = self._committed(self._fast), self._committed(self._safe)
        for step in sorted(self._to_copy - here - there):
            self._wrong(f"step {step} was deleted before the second tier had it")
        for step in sorted(here):
            self._check_value(self._fast, step)
        for step in sorted((self._to_copy & there) - here):
            self._check_value(self._safe, step)

    def _check_value(self, tier: Tier, step: int) -> None:
        found = float(open_checkpoint(f"{tier.url}@{step}").read("w")[0])
        if found != self._values[step]:
            self._wrong(f"{tier.url}@{step} holds {found}, saved was {self._values[step]}")

    @staticmethod
    def _committed(tier: Tier) -> set[int]:
        return {info.step for info in list_checkpoints(tier.url) if info.state == "committed"}

    def _wrong(self, text: str) -> None:
        self._outcome.wrong.append(f"{self._name}: {text}")


def tier_runs(folder: Path, runs: int, *, seed: int) -> Iterator[TierOutcome]:
    """`runs` of them; yields the totals after each."""
    outcome = TierOutcome()
    for number in range(runs):
        _Run(folder / f"run-{seed}-{number}", random.Random(f"{seed}-{number}"), outcome).go()
        yield outcome
