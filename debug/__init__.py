"""From what a hung or dead job left behind to the guilty rank and line. Runs without torch.

    run = open_run("s3://bucket/run")      # reads; never raises for a damaged file, it becomes a flag
    verdicts = diagnose(run)               # pure; most likely cause first, never empty

The data model (all in `titan_ckpt.debug.records`, frozen):

    Run             url, world_size, ranks {rank: RankRecord}, groups, names, flags, launcher
    RankRecord      what is known of one rank: operations, stacks, log, exit, heartbeat, coordinates, host, pid
      .operations   numpy array of dtype OPERATION, in the order they were issued; small integers point into
                    `run.names` (op, sizes, dtypes, frames) and `run.groups`; `run.operation(rank, row)` spells one out
      .stacks       StackSnapshot -> Thread -> Frame(file, line, function), most recent call first
      .log          RankLog: events (errors, tracebacks, watchdog lines), the last lines, steps seen
      .heartbeat    step and phase that the in-process recorder last wrote
    Group           name, description, members (empty when nobody recorded them)
    Verdict         verdict, subtype, culprits, victims, group, seq, op, step, confidence, evidence, chain, next_steps
    Flag            what was wrong with the evidence itself (RING_TRUNCATED, DUMP_MISSING, DUMP_CORRUPT, ...)

`Recorder` (in `titan_ckpt.debug.recorder`, which needs torch) is what a training process runs to leave this evidence.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "titan_ckpt.debug":
    raise ImportError("import titan_ckpt.debug: the folder debug/ installs only as a part of titan_ckpt")

if TYPE_CHECKING:
    from titan_ckpt.debug.diagnosis import diagnose
    from titan_ckpt.debug.reader import open_run
    from titan_ckpt.debug.recorder import Recorder
    from titan_ckpt.debug.records import Run, Verdict

_HOMES = {
    "Recorder": "titan_ckpt.debug.recorder",
    "Run": "titan_ckpt.debug.records",
    "Verdict": "titan_ckpt.debug.records",
    "diagnose": "titan_ckpt.debug.diagnosis",
    "open_run": "titan_ckpt.debug.reader",
}

__all__ = ["Recorder", "Run", "Verdict", "diagnose", "open_run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'titan_ckpt.debug' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
