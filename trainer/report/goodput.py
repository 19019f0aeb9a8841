"""How the wall time of a run was spent, across restarts, computed from its records.

An attempt lasts from its launch (`launched_s` of its start record) to its last record. Steps that a later attempt repeated,
because it resumed from an earlier checkpoint, count as recomputed: their time was lost. Time between two attempts is downtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from titan_ckpt.console.units import format_duration
from titan_ckpt.trainer.report.records import Event, MetricsRecord, last_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Seconds by use; they add up to `total_s`. `productive_s` is the time of the steps that were kept, without data waits."""

    total_s: float
    productive_s: float
    data_wait_s: float
    stall_s: float
    validation_s: float
    recomputed_s: float
    startup_s: float
    downtime_s: float
    other_s: float
    attempts: int
    recomputed_steps: int

    @property
    def fraction(self) -> float:
        """Productive share of the wall time."""
        return self.productive_s / self.total_s if self.total_s else 0.0

    def text(self) -> str:
        """One line: the productive share and the largest losses."""
        rest = {
            "data": self.data_wait_s,
            "checkpoint stall": self.stall_s,
            "validation": self.validation_s,
            f"{self.recomputed_steps} recomputed steps": self.recomputed_s,
            "startup": self.startup_s,
            "downtime": self.downtime_s,
            "other": self.other_s,
        }
        parts = [
            f"{name} {format_duration(seconds)}" for name, seconds in rest.items() if seconds >= 0.005 * self.total_s
        ]
        launches = f" in {self.attempts} attempts" if self.attempts > 1 else ""
        return f"goodput {self.fraction:.1%} of {format_duration(self.total_s)}{launches}; {', '.join(parts) or 'no losses'}"


@dataclass(slots=True)
class _Attempt:
    launched_s: float
    started_s: float
    first_step: int
    records: list[MetricsRecord]

    @property
    def ended_s(self) -> float:
        return max([self.started_s, *(float(record["time_s"]) for record in self.records)])


def goodput(records: Sequence[MetricsRecord]) -> Goodput:
    """Sum up the records of the last run in a folder.

    >>> goodput([{"event": "start", "time_s": 12, "launched_s": 10, "step": 0},
    ...          {"event": "step", "time_s": 20, "step": 1, "step_s": 8, "data_wait_s": 2}]).fraction
    0.6
    """
    attempts = _attempts(last_run(records))
    sums = dict.fromkeys(
        ("productive_s", "data_wait_s", "stall_s", "validation_s", "recomputed_s", "startup_s", "downtime_s"), 0.0
    )
    recomputed_steps = 0
    for number, attempt in enumerate(attempts):
        redone_after = min((later.first_step for later in attempts[number + 1 :]), default=None)
        sums["startup_s"] += attempt.started_s - attempt.launched_s
        if number:
            sums["downtime_s"] += max(0.0, attempt.launched_s - attempts[number - 1].ended_s)
        for record in attempt.records:
            recomputed_steps += _book(record, redone_after, sums)
    total = attempts[-1].ended_s - attempts[0].launched_s if attempts else 0.0
    return Goodput(
        total_s=total,
        other_s=max(0.0, total - sum(sums.values())),
        attempts=len(attempts),
        recomputed_steps=recomputed_steps,
        **sums,
    )


def _attempts(records: Iterable[MetricsRecord]) -> list[_Attempt]:
    attempts: list[_Attempt] = []
    for record in records:
        if record["event"] == Event.START:
            started = float(record["time_s"])
            attempts.append(_Attempt(float(record.get("launched_s") or started), started, int(record["step"]), []))
        elif attempts:
            attempts[-1].records.append(record)
    return attempts


def _book(record: MetricsRecord, redone_after: int | None, sums: dict[str, float]) -> int:
    """Add one record to the sums; returns the number of its steps if a later attempt repeated them, else 0."""
    if record["event"] == Event.VALIDATION:
        sums["validation_s"] += float(record["seconds"])
    elif record["event"] == Event.SAVE:
        sums["stall_s"] += float(record["stall_s"])
    elif record["event"] == Event.STEP:
        steps = int(record.get("steps") or 1)
        seconds, wait = steps * float(record["step_s"]), steps * float(record["data_wait_s"])
        if redone_after is not None and int(record["step"]) > redone_after:
            sums["recomputed_s"] += seconds
            return steps
        sums["productive_s"] += seconds - wait
        sums["data_wait_s"] += wait
    return 0
