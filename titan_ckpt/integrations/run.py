"""The checkpoints of one run as a training loop saves and loads them. All methods are called by all ranks together.

A state has what all ranks share under the loop's own names (`model`, `optimizer`, ...), and what each rank has for itself, such
as its random generators, under `rank_N`. A rank that the saved job did not have keeps what it has there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from titan_ckpt.arguments import check_type
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.kinds import CheckpointKind, CheckpointState
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.errors import CheckpointError, UsageError
from titan_ckpt.integrations.random_states import random_states, set_random_states
from titan_ckpt.location import StrPath, parse_location
from titan_ckpt.saving.options import SaveHandle, SaveOptions
from titan_ckpt.saving.saver import Saver
from titan_ckpt.state.exchange import Failure, RankGroup, failure_of, reason_of
from titan_ckpt.upkeep.retention import RetentionPolicy

log = logging.getLogger(__name__)


class LoopCheckpoints:
    """Saves and loads for one loop. `loop` names it in the checkpoints: one that another loop saved is refused by name.

    `keep_last` is the loop's own limit, for options that have no `retention`.
    """

    def __init__(
        self, url: StrPath, loop: str, options: SaveOptions | None, storage_options: Mapping[str, Any] | None,
        keep_last: int | None = None,
    ) -> None:  # fmt: skip
        check_type(options, "options", SaveOptions, or_none=True, hint="SaveOptions(...)")
        location = parse_location(url)
        if location.step is not None:
            raise UsageError(f"{location.url}@{location.step}: give the URL of the run, without a step")
        self.url, self._loop, self._storage_options = location.url, loop, storage_options
        self.options = options or SaveOptions()
        if keep_last is not None and self.options.retention is None:
            self.options = replace(self.options, retention=RetentionPolicy(keep_last=keep_last))
        self._saver: Saver | None = None

    @property
    def saver(self) -> Saver:
        """The saver of this run; made, and the run claimed, when it is first asked for."""
        if self._saver is None:
            self._saver = Saver(self.url, self.options, storage_options=self._storage_options)
        return self._saver

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        training: Mapping[str, Any] | None = None,
        assets: Mapping[str, bytes] | None = None,
        kind: CheckpointKind = CheckpointKind.FULL,
    ) -> SaveHandle:
        """Start a save of `state`; what the loop records about itself is in `training`, which must be JSON."""
        record = {"loop": self._loop, "world_size": world_size(), **(training or {})}
        return self.saver.save(state, step=step, training=record, assets=assets, kind=kind)

    def check(self) -> None:
        """Raise the error of a save that failed."""
        if self._saver is not None:
            self._saver.check()

    def close(self) -> None:
        """Wait until what was saved is committed, raise its error, and let go of the run until the next save."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """`close`, at the end of a `with`; after an error a save that fails as well is logged, and does not replace the error."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.__exit__(kind, error, trace)

    def newest(self) -> int | None:
        """The newest whole step from which a job can resume, as rank 0 finds it; None for a run that has no checkpoint.

        Waits for a save that is under way.
        """
        if self._saver is not None:
            self._saver.wait()
        ranks = RankGroup(timeout_s=self.options.timeout_s)
        try:
            found: int | Failure | None = None
            own: BaseException | None = None
            if ranks.is_coordinator:
                try:
                    found = self._newest_here()
                except BaseException as error:  # noqa: BLE001  (raised once the other ranks know)
                    found, own = failure_of(ranks.rank, error), error
            found = ranks.broadcast(found)
        finally:
            ranks.close()
        if own is not None:
            raise own
        if isinstance(found, Failure):
            raise CheckpointError(f"{self.url}: rank 0 found no checkpoint to resume from: {reason_of(found.text)}")
        return found

    def _newest_here(self) -> int | None:
        states = {info.state for info in list_checkpoints(self.url, storage_options=self._storage_options)}
        if states <= {CheckpointState.PARTIAL}:
            return None
        checkpoint = open_checkpoint(self.url, storage_options=self._storage_options)
        if checkpoint.manifest.kind == CheckpointKind.MODEL:
            log.warning("%s has exports of models alone: nothing to resume from", self.url)
            return None
        return checkpoint.step

    def open(self, step: int) -> Checkpoint:
        """The checkpoint of a step, after a save that is under way. UsageError if another loop saved it."""
        if self._saver is not None:
            self._saver.wait()
        checkpoint = open_checkpoint(self.url, step=step, storage_options=self._storage_options)
        found = checkpoint.manifest.training.get("loop")
        if found != self._loop:
            who = f"a loop of {found}" if found else "no loop that has a module in titan_ckpt.integrations"
            raise UsageError(
                f"{checkpoint}: saved by {who}, not by {self._loop}: its names and its training state are others. Take single "
                f"parts by titan_ckpt.load, or resume with the loop that saved it"
            )
        return checkpoint


def own_name(rank: int | None = None) -> str:
    """The name of what a rank has for itself."""
    return f"rank_{this_rank() if rank is None else rank}"


def own_state(**more: Any) -> dict[str, Any]:
    """What this rank has for itself: its random generators, and `more`."""
    return {own_name(): {"random": random_states(), **more}}


def read_own(checkpoint: Checkpoint) -> dict[str, Any]:
    """What this rank had for itself in the saved job; empty, with a line in the log, if that job had no such rank."""
    start = f"{own_name()}."
    manifest = checkpoint.manifest
    if not any(name.startswith(start) for name in [*manifest.by_fqn, *manifest.objects_by_fqn]):
        log.warning(
            "%s was saved by %s ranks and has no random states for rank %d: it goes on with those that it has",
            checkpoint, manifest.training.get("world_size", "other"), this_rank(),
        )  # fmt: skip
        return {}
    found: dict[str, Any] = checkpoint.read_all(own_name())
    return found


def restore_random(own: Mapping[str, Any]) -> None:
    """Set this rank's random generators as they were saved, if they were."""
    if "random" in own:
        set_random_states(own["random"])


def send_buffers(model: torch.nn.Module) -> None:
    """Give all ranks rank 0's buffers (running statistics), as DistributedDataParallel does before the next forward pass."""
    if world_size() > 1:
        for _, buffer in sorted(model.named_buffers()):
            dist.broadcast(buffer.detach(), src=0)


def this_rank() -> int:
    """This process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks of the job."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
