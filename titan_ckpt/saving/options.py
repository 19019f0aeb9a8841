"""The records of saving: options, what a save reports, and the handle of one under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from titan_ckpt.errors import UsageError
from titan_ckpt.format.codec import CODECS
from titan_ckpt.format.manifest import RAW
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.store.base import Store
from titan_ckpt.upkeep.retention import RetentionPolicy

Kind = Literal["full", "model"]
PhaseHook = Callable[[str, int], AbstractContextManager[Any]]


def no_steps() -> frozenset[int]:
    """Nobody reads any."""
    return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a run is saved.

    `mesh` names the axes, so that the checkpoint can be resharded; `pipeline` says which layers are on which stage (see
    `sharding.pipeline`). `codec` is `raw` or `planes-zstd` (lossless; weights shrink little, moments more). `incremental`
    refers to chunks of earlier checkpoints that have not changed instead of writing them again. `retention` deletes old
    checkpoints after each commit. `mirror` is a second, safer store to which every commit is copied in the background: the URL
    that is saved to is then the fast tier, and `retention` its own; a step that is not copied yet is never deleted.
    `in_use()` names steps that retention must leave because somebody reads them now.
    `is_exclusive` claims the run: a job that saved there before can commit no more.
    `timeout_s` bounds a save: a store call that hangs is given up in time for every rank to hear of it. It must exceed
    the longest upload by a quarter. `phase(name, step)` is entered around
    ckpt_stage, ckpt_upload and ckpt_commit, for a recorder of hangs.
    """

    mesh: MeshSpec | None = None
    pipeline: Mapping[str, Any] | None = None
    codec: str = RAW
    incremental: bool = False
    retention: RetentionPolicy | None = None
    in_use: Callable[[], frozenset[int]] = no_steps
    mirror: str | Store | None = field(default=None, repr=False)
    is_exclusive: bool = True
    timeout_s: float = 1800.0
    phase: PhaseHook | None = None

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise UsageError(f"unknown codec {self.codec!r}; the codecs are {', '.join(CODECS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """A committed save; bytes and times are this rank's.

    `written_bytes` is what went to the store, `raw_bytes` what it stands for: they differ by frames, by the codec and by chunks
    that an earlier checkpoint holds.
    """

    step: int
    attempt: str
    written_bytes: int
    raw_bytes: int
    stall_s: float
    upload_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverMetrics:
    """Where a saver stands: bytes this rank has sent since it was made; how long the last `save` kept the training loop."""

    uploaded_bytes: int
    last_committed_step: int | None
    stall_s: float
    is_uploading: bool
    last_mirrored_step: int | None = None


@dataclass(slots=True)
class SaveHandle:
    """A save under way. `stall_s` is how long `save` kept the training loop."""

    step: int
    stall_s: float
    future: Future[SaveReport]
    is_told: bool = False

    def wait(self, timeout_s: float | None = None) -> SaveReport:
        """The report once it is committed; raises what went wrong, on whichever rank. TimeoutError after `timeout_s`."""
        error = self.future.exception(timeout_s)
        self.is_told = True
        if error is not None:
            raise error
        return self.future.result()
