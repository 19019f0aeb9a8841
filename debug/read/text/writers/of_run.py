"""Which lines of a log are of the run in question: one that is appended to holds earlier runs, and later ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from titan_ckpt.debug.read.text.streams import Stream
from titan_ckpt.debug.read.text.writers.labels import Writer


@dataclass(slots=True)
class OfRun:
    """From when and until when the run wrote, in seconds since the epoch by the clock of its logs. A line without a time is of
    the run that its writer's line before was of."""

    since_s: float = -math.inf
    until_s: float = math.inf
    _other: dict[Writer, bool] = field(default_factory=dict)

    def is_other(self, writer: Writer, time_s: float | None, writers: Mapping[Writer, Stream]) -> bool:
        """Whether a line is of another run; what its writer wrote before the run is forgotten."""
        was_other = self._other.get(writer, False)
        if time_s is None:
            return was_other
        is_other = self._other[writer] = not self.since_s <= time_s < self.until_s
        if writer in writers and time_s < self.until_s and (is_other or was_other):
            writers[writer].restart()
        return is_other
