"""Which lines a program writes again and again, whatever words it has for a step. Bounded: a few shapes of lines."""

from __future__ import annotations

from dataclasses import dataclass, field

from titan_ckpt.debug.read.text.messages import NO_DIGITS

MOST_SHAPES = 64
LEAST_TIMES = 2  # a line that came once is no habit
_COMPARED = 160  # characters of a line


@dataclass(slots=True)
class Routine:
    """How often lines came that are equal but for their numbers."""

    counts: dict[str, int] = field(default_factory=dict)
    habits: frozenset[str] = frozenset()

    def take(self, text: str) -> bool:
        """Count a line; whether it was a habit when `mark` was last called."""
        shape = text[:_COMPARED].translate(NO_DIGITS).translate(_NO_SIGNS)
        if shape not in self.counts and len(self.counts) >= MOST_SHAPES:
            self.counts = {kept: count for kept, count in self.counts.items() if count >= LEAST_TIMES}
        if shape in self.counts or len(self.counts) < MOST_SHAPES:
            self.counts[shape] = self.counts.get(shape, 0) + 1
        return shape in self.habits

    def mark(self) -> None:
        """Note the lines that came most often until now: at least half as often as any."""
        least = max(LEAST_TIMES, max(self.counts.values(), default=0) / 2)
        self.habits = frozenset(shape for shape, count in self.counts.items() if count >= least)


_NO_SIGNS = str.maketrans("", "", ".,+-% ")  # which numbers are written with: `1.2e-05`, `12,000`, a column's padding
