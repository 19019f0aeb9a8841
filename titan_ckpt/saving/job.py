"""One save between its staging and its commit."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from titan_ckpt.saving.agreement import SavePlan
from titan_ckpt.saving.options import SaveAttempt, SaveReport
from titan_ckpt.saving.staging import Copies, PayloadSource


@dataclass(slots=True, kw_only=True)
class SaveJob:
    """One save on its way through the upload thread. If `is_cancelled` is set before the upload is over, nothing is committed.

    `running` is its upload and commit, once they have begun.
    """

    attempt: SaveAttempt
    plan: SavePlan
    source: PayloadSource
    copies: Copies
    objects: dict[str, bytes]
    stall_s: float = 0.0
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    running: Future[SaveReport] | None = None
