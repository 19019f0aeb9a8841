"""The table `[log]`: what a run writes for people."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ckpt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """`folder` holds logs/ and debug/; empty: save.url if that is local, else runs/NAME."""

    folder: str = ""  # empty: save.url if that is local, else runs/NAME
    every: int = 1  # steps per metrics line
    progress: bool = True  # a progress bar below the log, if the console is a terminal
    tensorboard: bool = True  # if it is installed
    wandb: str = ""  # Weights & Biases project; the run is named after its folder
    trace_steps: tuple[int, int] = (0, 0)  # first and last step of logs/trace.json, for Perfetto; (0, 0): none
    profile_steps: tuple[int, int] = (0, 0)  # first and last step under torch's profiler; logs/profile_R.json
    profile_every: int = 0  # steps from one profile to the next, each ending with such a step; logs/profile_R_STEP.json
    profile_active: int = 1  # steps of each of these profiles
    profile_warmup: int = 1  # steps before them that the profiler sees and drops
    memory_steps: tuple[int, int] = (0, 0)  # first and last step of logs/memory_R.pickle, the accelerator's memory
    memory_dump: bool = False  # if an accelerator's memory runs out, its allocations; logs/memory_R_oom.pickle


def check_log(log: LogConfig) -> None:
    """ConfigError for steps that cannot be."""
    for name in ("trace_steps", "profile_steps", "memory_steps"):
        first, last = getattr(log, name)
        if (first, last) != (0, 0) and not 1 <= first <= last:
            raise ConfigError(f"log.{name} = [{first}, {last}]: give the first and the last step, from 1 on")
    if log.profile_every and log.profile_steps != (0, 0):
        raise ConfigError("log.profile_every with log.profile_steps: there is one profiler; give one of the two")
    if log.profile_every and log.profile_active + log.profile_warmup > log.profile_every:
        raise ConfigError(
            f"log.profile_every = {log.profile_every}: a cycle has fewer steps than profile_warmup {log.profile_warmup} + "
            f"profile_active {log.profile_active}"
        )
