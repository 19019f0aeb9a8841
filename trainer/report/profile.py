"""Profiles of steps by torch's profiler, once or in every cycle of steps, and snapshots of an accelerator's memory.

One file per rank in logs/: `profile_R.json` and `profile_R_STEP.json` for ui.perfetto.dev, `memory_R.pickle` and
`memory_R_oom.pickle` for pytorch.org/memory_viz. Each is copied to the run's stores as soon as it is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.report.logs import RunFolder

log = logging.getLogger(__name__)
MEMORY_EVENTS = 1_000_000  # most allocations and frees in a snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The last `active` steps before each multiple of `every`, and it, are profiled, after `warmup` that are dropped."""

    every: int = 0  # 0: none
    active: int = 1
    warmup: int = 1

    def action(self, step: int) -> ProfilerAction:
        """What the profiler does in a step, which is counted from 1.

        >>> [Cycle(every=4).action(step).name for step in range(1, 6)]
        ['NONE', 'NONE', 'WARMUP', 'RECORD_AND_SAVE', 'NONE']
        """
        left = -step % self.every  # steps that follow in this cycle
        if left >= self.active:
            return ProfilerAction.WARMUP if left < self.active + self.warmup else ProfilerAction.NONE
        return ProfilerAction.RECORD if left else ProfilerAction.RECORD_AND_SAVE


@dataclass(slots=True, kw_only=True)
class Inspection:
    """Called before and after each step; steps (0, 0) inspect nothing. If the run ends early, partial files are written.

    `upload` is called with the name of each file that is written.
    """

    folder: RunFolder
    rank: int
    device: torch.device
    profile_steps: tuple[int, int] = (0, 0)
    cycle: Cycle = Cycle()
    memory_steps: tuple[int, int] = (0, 0)
    memory_dump: bool = False
    upload: Callable[[str], None]
    _profile: profile | None = field(init=False, default=None)
    _has_memory: bool = field(init=False, default=False)
    _step: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        for name, is_set in (("memory_steps", self.memory_steps[1]), ("memory_dump", self.memory_dump)):
            if is_set and self.device.type != "cuda":
                raise ConfigError(
                    f"log.{name}: snapshots are of an accelerator's memory; this run is on {self.device.type}"
                )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around all steps: writes what is unfinished at their end, and the allocations if memory has run out."""
        if self.memory_dump:
            record_memory()
        try:
            yield
        except torch.OutOfMemoryError:
            if self.memory_dump:
                self._write_memory(f"memory_{self.rank:05d}_oom.pickle", "when it ran out")
            raise
        finally:
            self._end_profile()
            self._end_memory()

    def before(self, step: int) -> None:
        """Start recording if `step` is a first step."""
        self._step = step
        if self._profile is None and self._action(step) is not ProfilerAction.NONE:
            self._start_profile(step)
        if step == self.memory_steps[0] and self.memory_steps[1]:
            record_memory()
            self._has_memory = True

    def after(self, step: int) -> None:
        """Write the file if `step` is a last step."""
        if self._action(step) is ProfilerAction.RECORD_AND_SAVE:
            self._end_profile()
        elif self._profile is not None:
            self._profile.step()
        if step == self.memory_steps[1]:
            self._end_memory()

    def _action(self, step: int) -> ProfilerAction:
        if self.cycle.every:
            return self.cycle.action(step)
        first, last = self.profile_steps
        if not (last and first <= step <= last):
            return ProfilerAction.NONE
        return ProfilerAction.RECORD_AND_SAVE if step == last else ProfilerAction.RECORD

    def _start_profile(self, step: int) -> None:
        """A profiler for each cycle: torch's own cycles warn at the second one, and end the process if warnings are errors."""
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
        self._profile = profile(
            activities=kinds,
            record_shapes=True,
            schedule=lambda number: self._action(step + number),
            on_trace_ready=self._write_profile,
        )
        self._profile.start()

    def _end_profile(self) -> None:
        if self._profile is not None:
            started, self._profile = self._profile, None
            started.stop()

    def _write_profile(self, done: profile) -> None:
        if self._action(self._step) is ProfilerAction.WARMUP:
            return
        name = f"profile_{self.rank:05d}{f'_{self._step:08d}' if self.cycle.every else ''}.json"
        done.export_chrome_trace(self.folder.file(name))
        log.info("profile up to step %d: %s", self._step, self.folder.file(name))
        self.upload(name)

    def _end_memory(self) -> None:
        if self._has_memory:
            self._has_memory = False
            self._write_memory(f"memory_{self.rank:05d}.pickle", f"of steps {self.memory_steps[0]} to {self._step}")

    def _write_memory(self, name: str, when: str) -> None:
        write_memory(self.folder.file(name), keep_recording=self.memory_dump)
        log.info("memory %s: %s", when, self.folder.file(name))
        self.upload(name)


def record_memory() -> None:
    """Have CUDA's allocator remember its allocations and frees, with their stacks."""
    torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)


def write_memory(path: str, *, keep_recording: bool) -> None:
    """Write what CUDA's allocator remembers."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
    if not keep_recording:
        torch.cuda.memory._record_memory_history(enabled=None)
