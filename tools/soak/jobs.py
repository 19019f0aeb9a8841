"""Jobs of a soak: run a command, signal some or all of its processes, and wait for the last one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from titan_ckpt.demo.processes import send_signal
from tools.processes import marked_processes

JOB = "TITAN_CKPT_SOAK_JOB"
LIMIT_S = 420.0
OUTLIVE_S = 60.0
POLL_S = 0.02
TRACEBACK, OUR_ERROR = "Traceback (most recent call last)", "titan-ckpt: error:"


class Victim(StrEnum):
    """The processes of a job that a signal goes to."""

    RANK = "rank"  # one at random
    LAUNCHER = "launcher"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A signal to a job, sent `after_s` after `moment` first holds."""

    victim: Victim
    number: signal.Signals = signal.SIGKILL
    after_s: float = 0.0
    moment: Callable[[], bool] = field(default=lambda: True)

    def __str__(self) -> str:
        return f"{self.number.name} to {self.victim}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended. `code` is None if it ran past `LIMIT_S`; `outlived` counts processes that stayed behind."""

    code: int | None
    was_killed: bool
    outlived: int
    text: str

    @property
    def is_done(self) -> bool:
        """Whether the job succeeded."""
        return self.code == 0

    @property
    def problem(self) -> str:
        """A failure that no injected fault excuses: a hang, a leftover process, an unknown exit code, a bare traceback."""
        if self.code is None:
            return f"did not end within {LIMIT_S:.0f} s"
        if self.outlived:
            return f"left {self.outlived} processes behind"
        if self.was_killed or self.code in (0, 3, 130):
            is_clear = self.was_killed or OUR_ERROR in self.text or TRACEBACK not in self.text
            return "" if is_clear else "a traceback without an error message of titan-ckpt"
        return f"exit code {self.code}"


def run_job(
    command: Sequence[str], environment: dict[str, str], output: Path, rng: random.Random, *, kill: Kill | None = None
) -> JobResult:
    """Run `command` and wait until all its processes have ended."""
    token = f"{os.getpid()}-{output.name}"
    mark = f"{JOB}={token}"
    with open(output, "wb") as file:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            env=os.environ | environment | {JOB: token},
        )  # fmt: skip
    was_killed = kill is not None and _kill(kill, job, mark, rng)
    try:
        code: int | None = job.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = None
        send_signal([job.pid, *marked_processes(mark, job.pid)], signal.SIGKILL)
        job.wait()
    outlived = _wait_for_the_last(mark, job.pid)
    return JobResult(code=code, was_killed=was_killed, outlived=outlived, text=output.read_text(errors="replace"))


def _kill(kill: Kill, job: subprocess.Popen[bytes], mark: str, rng: random.Random) -> bool:
    """Wait for the moment and send the signal; False if the job ended first."""
    while job.poll() is None and not kill.moment():
        time.sleep(POLL_S)
    give_up_at = time.monotonic() + kill.after_s
    while job.poll() is None and time.monotonic() < give_up_at:
        time.sleep(POLL_S)
    if job.poll() is not None:
        return False
    if kill.victim == Victim.ALL:
        _signal_all(mark, job.pid, kill.number)
        return True
    ranks = sorted(pid for pid, is_rank in marked_processes(mark, job.pid).items() if is_rank)
    send_signal([rng.choice(ranks)] if kill.victim == Victim.RANK and ranks else [job.pid], kill.number)
    return True


def _signal_all(mark: str, session: int, number: signal.Signals) -> None:
    """Signal each process of the job once, including those forked meanwhile."""
    done: set[int] = set()
    while left := set(marked_processes(mark, session)) - done:
        send_signal(sorted(left), number)
        done |= left


def _wait_for_the_last(mark: str, session: int) -> int:
    """Wait until no process of the job is left; kill and count those that remain after `OUTLIVE_S`."""
    give_up_at = time.monotonic() + OUTLIVE_S
    while left := marked_processes(mark, session):
        if time.monotonic() > give_up_at:
            send_signal(list(left), signal.SIGKILL)
            return len(left)
        time.sleep(POLL_S)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """A training job's metrics; `start` is None if it never began to train."""

    start: int | None
    losses: dict[int, float]
    committed: int | None


def read_training_log(folder: Path, *, since_s: float = 0.0) -> TrainingLog:
    """Read the metrics in a job's `log.folder`, from `since_s` on; earlier records are those of the run's earlier jobs.

    A truncated last line is skipped.
    """
    path = folder / "logs" / "metrics.jsonl"
    records: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    records = [record for record in records if record["time_s"] >= since_s]
    starts = [int(record["step"]) for record in records if record["event"] == "start"]
    committed = [int(record["committed_step"]) for record in records if record.get("committed_step") is not None]
    losses = {int(record["step"]): float(record["loss"]) for record in records if record["event"] == "step"}
    return TrainingLog(start=starts[0] if starts else None, losses=losses, committed=max(committed, default=None))
