"""From what a hung or dead job left behind to the guilty rank and line. Runs without torch.

    run = open_run("s3://bucket/run")      # reads; never raises for a damaged file, it becomes a flag
    verdicts = diagnose(run)               # pure; most likely cause first, never empty

The data model (all in `titan_ckpt.debug.incident.records`, frozen):

    Run             url, world_size, ranks {rank: RankRecord}, groups, names, flags, launcher
    RankRecord      what is known of one rank: operations, stacks, log, exit, heartbeat, coordinates, host, pid
      .operations   numpy array of dtype OPERATION, in the order they were issued; small integers point into
                    `run.names` (op, sizes, dtypes, frames) and `run.groups`; `run.operation(rank, row)` spells one out
      .stacks       StackSnapshot -> Thread -> Frame(file, line, function), most recent call first
      .log          RankLog: events (errors, tracebacks, watchdog lines), the last lines, steps seen
      .heartbeat    step and phase that the in-process recorder last wrote
    Group           name, description, members (empty if not recorded)
    Verdict         verdict, subtype, culprits, victims, group, seq, op, step, confidence, evidence, chain, next_steps
    Flag            a defect of the evidence itself (RING_TRUNCATED, DUMP_MISSING, DUMP_CORRUPT, ...)

`Recorder` (in `titan_ckpt.debug.record.recorder`, which needs torch) is what a training process runs to leave this evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if __name__ != "titan_ckpt.debug":
    raise ImportError("import titan_ckpt.debug: the folder debug/ installs only as a part of titan_ckpt")

from titan_ckpt.lazy import lazy_names

if TYPE_CHECKING:
    from titan_ckpt.debug.diagnosis.diagnose import diagnose
    from titan_ckpt.debug.incident.records import Run, Verdict
    from titan_ckpt.debug.read.reader import open_run
    from titan_ckpt.debug.record.recorder import Recorder

__all__ = ["Recorder", "Run", "Verdict", "diagnose", "open_run"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Recorder": "record.recorder",
        "Run": "incident.records",
        "Verdict": "incident.records",
        "diagnose": "diagnosis.diagnose",
        "open_run": "read.reader",
    },
)
