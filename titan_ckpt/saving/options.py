"""The records of saving: options, the request for a save, its handle while it runs, and its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from titan_ckpt.arguments import (
    check_callable,
    check_flag,
    check_json,
    check_number,
    check_type,
    check_word,
)
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.errors import UsageError
from titan_ckpt.format.codec import CODECS
from titan_ckpt.format.manifest import RAW
from titan_ckpt.format.names import check_step
from titan_ckpt.location import StrPath, check_relative, redact_values
from titan_ckpt.saving.replicas import Replicas
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.pipeline import PipelineSpec
from titan_ckpt.store.base import Store
from titan_ckpt.upkeep.retention import RetentionPolicy

LONGEST_NAME = 255  # bytes of a part of a path, on every file system that is common

PhaseHook = Callable[[str, int], AbstractContextManager[Any]]
# Fractions of `timeout_s`: a rank whose store hangs must report it before the other ranks stop waiting for that rank.
GIVE_UP_AT, COMMIT_BY = 0.8, 0.9


def no_steps() -> frozenset[int]:
    """The default of `SaveOptions.in_use`."""
    return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a run is saved.

    `mesh` names the axes, so that the checkpoint can be resharded; `pipeline` maps layers to stages (see `sharding.pipeline`).
    `codec` is `raw` or `planes-zstd` (lossless; weights shrink little, moments more). `incremental` refers to unchanged chunks of
    earlier checkpoints instead of writing them again. `retention` deletes old checkpoints after each commit. `mirror` is a
    second, safer store to which every commit is copied in the background; the URL that is saved to is then the fast tier,
    `retention` applies to it alone, and a step that is not copied yet is never deleted. `in_use()` returns steps that retention
    must keep because they are being read. `is_exclusive` claims the run: jobs that saved there before can no longer commit.
    `replicas="equal"` compares the copies of elements that several ranks hold (plain tensors, replicated shards), and fails the
    save if they differ; "first" stores the lowest rank's unseen. `timeout_s` bounds a save: a store call that hangs is abandoned
    early enough for every rank to learn of it. It must exceed the longest upload by a quarter. `upload_bytes_per_s` spreads each
    rank's upload, and its copy to the mirror, evenly at that rate, for a steadier training; None is full speed. It ends when
    somebody waits for the save (`wait`, `close`, the next `save`), does not hold for `save_now`, and is raised, which is logged,
    if an upload would need more than half of its time limit. `upload_process` digests and sends by a process of its own, so that
    the rank's Python does not compete with it; a thread still copies to the mirror. It needs a URL and Linux. `phase(name, step)`
    is entered around ckpt_stage, ckpt_upload and ckpt_commit, for a recorder of hangs.
    """

    mesh: MeshSpec | None = None
    pipeline: Mapping[str, Any] | None = None
    codec: str = RAW
    incremental: bool = False
    retention: RetentionPolicy | None = None
    in_use: Callable[[], frozenset[int]] = no_steps
    mirror: StrPath | Store | None = field(default=None, repr=False)
    is_exclusive: bool = True
    replicas: Replicas | str = Replicas.EQUAL
    timeout_s: float = 1800.0
    upload_bytes_per_s: float | None = None
    upload_process: bool = False
    phase: PhaseHook | None = None

    def __post_init__(self) -> None:
        check_type(self.mesh, "mesh", MeshSpec, or_none=True, hint="MeshSpec.parse('dp_shard=8,tp=2')")
        check_type(self.pipeline, "pipeline", Mapping, or_none=True, hint="PipelineSpec(...).to_dict()")
        if self.pipeline is not None:
            PipelineSpec.from_dict(self.pipeline)
        check_word(self.codec, CODECS, "codec")
        check_type(self.retention, "retention", RetentionPolicy, or_none=True, hint="RetentionPolicy(keep_last=3)")
        check_type(self.mirror, "mirror", str, os.PathLike, Store, or_none=True, hint="the URL of the second tier")
        for name in ("incremental", "is_exclusive", "upload_process"):
            check_flag(getattr(self, name), name)
        check_number(self.timeout_s, "timeout_s", above=0)
        if self.upload_bytes_per_s is not None:
            check_number(self.upload_bytes_per_s, "upload_bytes_per_s", above=0)
        check_callable(self.in_use, "in_use")
        check_callable(self.phase, "phase", or_none=True)
        object.__setattr__(self, "replicas", Replicas.parse(self.replicas, "replicas"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Everything a save stores beside the state. `training`, `config` and `user` must be JSON; `assets` are small files."""

    step: int
    kind: str = CheckpointKind.FULL
    training: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    assets: Mapping[str, bytes] | None = None
    user: Mapping[str, Any] | None = None

    def check(self) -> None:
        """UsageError for a step, a kind or metadata that cannot be saved."""
        check_step(self.step)
        for name in ("training", "config", "user"):
            check_type(getattr(self, name), name, Mapping, or_none=True, hint="a mapping of JSON values")
            check_json(getattr(self, name), name)
        check_type(self.assets, "assets", Mapping, or_none=True, hint="a mapping of names to bytes")
        for name, data in (self.assets or {}).items():
            check_type(name, "a name in assets", str, hint="a file name, as text")
            check_type(data, f"assets[{name!r}]", bytes, bytearray, memoryview, hint="the file's content, as bytes")
            _check_asset_name(name, self.assets or {})
        if CheckpointKind.parse(self.kind, "kind") == CheckpointKind.FOREIGN:
            raise UsageError("kind is 'foreign'; only full and model checkpoints can be saved")

    def redacted(self) -> SaveRequest:
        """The request without secrets and without None, its step an int."""
        return SaveRequest(
            step=check_step(self.step), kind=self.kind, assets=self.assets or {}, training=redact_values(self.training or {}),
            config=redact_values(self.config or {}), user=redact_values(self.user or {}),
        )  # fmt: skip


def _check_asset_name(name: str, others: Container[str]) -> None:
    """UsageError for a name that no file in the step's folder can have."""
    try:
        parts = check_relative(name).split("/")
    except UsageError:
        parts = []
    above = next(("/".join(parts[:depth]) for depth in range(1, len(parts)) if "/".join(parts[:depth]) in others), "")
    if above:
        raise UsageError(f"assets: {above!r} is a file and the folder of {name!r}, too; rename one of them")
    if not parts or max(len(part.encode("utf-8", "replace")) for part in parts) > LONGEST_NAME:
        raise UsageError(
            f"assets: {name[:80]!r} cannot be the name of a file: give a relative path such as 'tokenizer.json', without "
            f"'..' and backslashes, each part of at most {LONGEST_NAME} bytes"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAttempt:
    """One try at saving a step: its name, which all ranks share, and what goes into the manifest beside the chunks."""

    name: str
    request: SaveRequest
    mesh: MeshSpec | None
    pipeline: Mapping[str, Any] | None = None

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.request.step


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """A committed save; bytes and times are this rank's.

    `written_bytes` went to the store; `raw_bytes` is the size of the tensors. They differ by the frames around the payloads, the
    codec, and chunks that an earlier checkpoint already has.
    """

    step: int
    attempt: str
    written_bytes: int
    raw_bytes: int
    stall_s: float
    upload_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverMetrics:
    """Counters of a saver: bytes this rank has uploaded in all, and how long the last `save` blocked the training loop."""

    uploaded_bytes: int
    last_committed_step: int | None
    stall_s: float
    is_uploading: bool
    last_mirrored_step: int | None = None


@dataclass(slots=True)
class SaveHandle:
    """A save in progress. `stall_s` is how long `save` blocked the training loop."""

    step: int
    stall_s: float
    future: Future[SaveReport]
    is_reported: bool = False
    hurry: Callable[[], None] = field(default=lambda: None, repr=False)

    def wait(self, timeout_s: float | None = None) -> SaveReport:
        """Wait for the commit. Raises the error of the save, whichever rank it was on; TimeoutError after `timeout_s`.

        A paced upload goes on at full speed, except for `timeout_s=0`, which only looks.
        """
        if timeout_s is not None:
            check_number(timeout_s, "timeout_s", at_least=0)
        if timeout_s != 0:
            self.hurry()
        error = self.future.exception(timeout_s)
        self.is_reported = True
        if error is not None:
            raise error
        return self.future.result()
