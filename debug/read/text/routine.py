"""Which lines a program writes again and again, whatever words it has for a step. Bounded: a few shapes of lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum

from titan_ckpt.debug.read.text.messages import NO_DIGITS

STEP = re.compile(r"\b(?:global_?)?(?:step(?:[ =:#-]{0,3}| {4,8})|iteration[ =:#]{1,10})(\d{1,9})\b", re.IGNORECASE)
BAR = re.compile(r"\b(\d{1,9})/\d{1,9} \[\d[\d:]{3,12}<")  # tqdm's: `3/1000 [00:03<10:00,  1.64it/s]`
# What trainers write when they are done: Lightning, Transformers' Trainer, Megatron-LM, and what programs say in their own words.
DONE = re.compile(
    r"(?:[Tt]raining|TRAINING|[Rr]un|[Jj]ob) (?:is |has |was )?(?:completed?|finished|done|ended successfully)\b"
    r"(?! with| on| at step)"
    r"|`Trainer\.fit` stopped: |'train_runtime': |^\s*\[exiting program at iteration "
)
MOST_SHAPES = 64
LEAST_TIMES = 2  # a line that came once is no habit
LEAST_NEW = 4  # times that a line has to come which had never come before
_COMPARED = 160  # characters of a line
_LEAVES = re.compile(r"(?i)stop|shut|clos|exit|clean|kill|terminat|finali|destroy|join|releas|abort|fail|error")


class GoesOn(IntEnum):
    """Whether a line shows that the program goes on. PERHAPS: the line may have been in a buffer when the program ended."""

    NO = 0
    PERHAPS = 1
    SURELY = 2


@dataclass(slots=True)
class Routine:
    """How often lines came that are equal but for their numbers: in all, and since `mark` was last called."""

    counts: dict[str, int] = field(default_factory=dict)
    habits: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    since: dict[str, int] | None = None

    def take(self, text: str, *, is_flushed: bool) -> GoesOn:
        """Count a line, and tell what it shows. `is_flushed`: its writer held back nothing that it had written before."""
        shape = text[:_COMPARED].translate(NO_DIGITS).translate(_NO_SIGNS)
        if shape not in self.counts and len(self.counts) >= MOST_SHAPES:
            self.counts = {kept: count for kept, count in self.counts.items() if count >= LEAST_TIMES}
        if shape in self.counts or len(self.counts) < MOST_SHAPES:
            self.counts[shape] = self.counts.get(shape, 0) + 1
        if is_flushed and self._has_come_often(shape, text):
            return GoesOn.SURELY
        return GoesOn.PERHAPS if shape in self.habits else GoesOn.NO

    def _has_come_often(self, shape: str, text: str) -> bool:
        """Whether a line with a number came again and again since the mark. What tells of an end may come once a part."""
        if self.since is None or not any(map(str.isdigit, text)) or _LEAVES.search(text):
            return False
        if shape in self.since or len(self.since) < MOST_SHAPES:
            self.since[shape] = self.since.get(shape, 0) + 1
        return self.since.get(shape, 0) >= (LEAST_TIMES if shape in self.known else LEAST_NEW)

    def mark(self) -> None:
        """Note the lines that came until now, and which of them most often: at least half as often as any."""
        least = max(LEAST_TIMES, max(self.counts.values(), default=0) / 2)
        self.habits = frozenset(shape for shape, count in self.counts.items() if count >= least)
        self.known, self.since = frozenset(self.counts), {}


_NO_SIGNS = str.maketrans("", "", ".,+-% ")  # which numbers are written with: `1.2e-05`, `12,000`, a column's padding
