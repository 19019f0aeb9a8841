"""Profiles of chosen steps: torch's profiler, and snapshots of an accelerator's memory.

Both are one file per rank in logs/: `profile_R.json` for ui.perfetto.dev, `memory_R.pickle` for pytorch.org/memory_viz.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.report.logs import RunFolder

log = logging.getLogger(__name__)
MEMORY_EVENTS = 1_000_000  # most allocations and frees in a snapshot


@dataclass(slots=True, kw_only=True)
class Inspection:
    """Called before and after each step; steps (0, 0) inspect nothing. If the run ends early, partial files are written."""

    folder: RunFolder
    rank: int
    device: torch.device
    profile_steps: tuple[int, int] = (0, 0)
    memory_steps: tuple[int, int] = (0, 0)
    _profile: profile | None = field(init=False, default=None)
    _has_memory: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.memory_steps[1] and self.device.type != "cuda":
            raise ConfigError(
                f"log.memory_steps: snapshots are of an accelerator's memory; this run is on {self.device.type}"
            )

    def before(self, step: int) -> None:
        """Start recording if `step` is a first step."""
        if step == self.profile_steps[0] and self.profile_steps[1]:
            kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
            self._profile = profile(activities=kinds, record_shapes=True)
            self._profile.start()
        if step == self.memory_steps[0] and self.memory_steps[1]:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            self._has_memory = True

    def after(self, step: int) -> None:
        """Write the file if `step` is a last step."""
        if step == self.profile_steps[1]:
            self._end_profile()
        if step == self.memory_steps[1]:
            self._end_memory()

    def close(self) -> None:
        """Write unfinished recordings."""
        self._end_profile()
        self._end_memory()

    def _end_profile(self) -> None:
        if self._profile is not None:
            started, self._profile = self._profile, None
            path = self.folder.file(f"profile_{self.rank:05d}.json")
            started.stop()
            started.export_chrome_trace(path)
            log.info("profile of steps %d to %d: %s", *self.profile_steps, path)

    def _end_memory(self) -> None:
        if self._has_memory:
            self._has_memory = False
            path = self.folder.file(f"memory_{self.rank:05d}.pickle")
            torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
            log.info("memory of steps %d to %d: %s", *self.memory_steps, path)
