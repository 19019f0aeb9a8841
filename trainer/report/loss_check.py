"""`resume.check_losses`: the first losses after a resume, beside those that the run recorded before it.

Where the same steps were recorded, as after a crash, the losses must be equal but for rounding: batches and weights are the same
on every mesh. Otherwise a loss must not lie far above the last ones before the checkpoint, as it does with wrong weights or data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, stdev

from titan_ckpt.errors import TitanError
from titan_ckpt.trainer.report.records import Event, MetricsRecord

log = logging.getLogger(__name__)
WINDOW, LEAST = 50, 8  # newest losses before the checkpoint that are used; fewer than the least bound nothing
EXACT, NARROW = 1e-4, 1e-2  # relative differences from recorded losses: in float32, and with narrower products
DEVIATIONS, SHARE = 6.0, 0.02  # a loss may lie above their mean by so many standard deviations, or by this share of it


class LossJumpError(TitanError):
    """The losses after a resume are not those of the run that is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCheck:
    """What is known of the losses around a checkpoint, the same on every rank; without steps it checks nothing."""

    steps: range = range(0)  # to be checked
    same: dict[int, float] = field(default_factory=dict)  # losses that were recorded for these steps
    before: tuple[float, ...] = ()  # newest losses up to the checkpoint
    tolerance: float = EXACT

    def check(self, step: int, loss: float) -> None:
        """LossJumpError for a loss of one of `steps` that is not as recorded, or far above those before the checkpoint."""
        if step not in self.steps:
            return
        if step in self.same:
            recorded = self.same[step]
            if not abs(loss - recorded) <= self.tolerance * abs(recorded):
                raise self._jump(step, loss, f"{recorded:.6g} was recorded for this step, bound {self.tolerance:.0e}")
        elif len(self.before) >= LEAST:
            mean = fmean(self.before)
            most = mean + max(DEVIATIONS * stdev(self.before), SHARE * abs(mean))
            if not loss <= most:
                known = f"the last {len(self.before)} recorded before it have mean {mean:.6g}"
                raise self._jump(step, loss, f"{known}, bound {most:.6g}")

    @property
    def knows_any(self) -> bool:
        """Whether anything is compared."""
        return bool(self.same) or len(self.before) >= LEAST

    def describe(self) -> str:
        """One line for the log: what will be compared."""
        if self.same:
            return f"the losses of {len(self.same)} steps are compared with those recorded for them"
        if self.knows_any:
            return f"the first {len(self.steps)} losses are compared with the last {len(self.before)} before the checkpoint"
        return f"no losses are compared: of the run {len(self.before)} before the checkpoint are recorded, {LEAST} are needed"

    def _jump(self, step: int, loss: float, known: str) -> LossJumpError:
        return LossJumpError(
            f"step {step}, {step - self.steps.start + 1} after the resume: loss {loss:.6g}, but {known}. The state, the data or "
            "the code is not that of the run: compare the log's first lines with those of the attempt before. To go on all the "
            "same, set resume.check_losses = 0"
        )


def recorded_losses(
    records: Iterable[MetricsRecord], *, step: int, count: int, tolerance: float, is_same_run: bool
) -> LossCheck:
    """The check of `count` steps after `step` against a run's records; the losses of the same steps only if `is_same_run`.

    Of several attempts at the same steps the last one counts.
    """
    steps, same, before, is_new = range(step + 1, step + 1 + count), dict[int, float](), dict[int, float](), False
    for record in records:
        is_new = is_new or record["event"] == Event.START
        if record["event"] != Event.STEP or record.get("loss") is None:
            continue
        if record["step"] in steps and is_new:
            same.clear()
            is_new = False
        (same if record["step"] in steps else before)[int(record["step"])] = float(record["loss"])
    newest = [before[each] for each in sorted(before) if each <= step][-WINDOW:]
    return LossCheck(steps=steps, same=same if is_same_run else {}, before=tuple(newest), tolerance=tolerance)
