"""One save between its staging and its commit."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from titan_ckpt.saving.agreement import SavePlan
from titan_ckpt.saving.options import SaveAttempt, SaveReport
from titan_ckpt.saving.pace import Pace
from titan_ckpt.saving.staging import Copies
from titan_ckpt.saving.upload import PayloadSource, RankPart


@dataclass(slots=True, kw_only=True)
class SaveJob:
    """One save on its way through the upload thread.

    `running` is its upload and commit, once they have begun; `report` what `save` returns once it is committed.
    """

    attempt: SaveAttempt
    plan: SavePlan
    source: PayloadSource
    copies: Copies
    objects: dict[str, bytes]
    pace: Pace = field(default_factory=Pace)
    stall_s: float = 0.0
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    running: Future[SaveReport] | None = None
    report: SaveReport | None = None
    is_with_mirror: bool = False

    def cancel(self) -> None:
        """Commit nothing, if the upload is not over yet, and end it at its next buffer."""
        self.is_cancelled.set()
        self.pace.stop()


def report_of(job: SaveJob, part: RankPart, upload_s: float) -> SaveReport:
    """What this rank did for `job`."""
    return SaveReport(
        step=job.attempt.step,
        attempt=job.attempt.name,
        written_bytes=part.written_bytes,
        raw_bytes=part.raw_bytes,
        stall_s=job.stall_s,
        upload_s=upload_s,
    )
