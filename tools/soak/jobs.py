"""Jobs of a soak: a command with all its processes, killed as a whole or in part, and waited for to the last one."""

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
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tools.processes import marked_processes, send_signal

JOB = "TITAN_CKPT_SOAK_JOB"
LIMIT_S = 420.0
OUTLIVE_S = 60.0
POLL_S = 0.02
Whom: TypeAlias = Literal["rank", "launcher", "all"]
TRACEBACK, OUR_ERROR = "Traceback (most recent call last)", "titan-ckpt: error:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A signal for one rank, the launcher alone, or all processes at once, `after_s` from when `moment` has come."""

    whom: Whom
    number: signal.Signals = signal.SIGKILL
    after_s: float = 0.0
    moment: Callable[[], bool] = field(default=lambda: True)

    def __str__(self) -> str:
        return f"{self.number.name} to {self.whom}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a job ended. `code` None: it was given up after `LIMIT_S`. `outlived`: processes that stayed behind."""

    code: int | None
    was_killed: bool
    outlived: int
    text: str

    @property
    def is_done(self) -> bool:
        """Whether it did what it was for."""
        return self.code == 0

    @property
    def problem(self) -> str:
        """What no weather excuses: a hang, a process left behind, an exit code or a traceback that explains nothing."""
        if self.code is None:
            return f"gave no sign of an end for {LIMIT_S:.0f} s"
        if self.outlived:
            return f"left {self.outlived} processes behind"
        if self.was_killed or self.code in (0, 3, 130):
            is_clear = self.was_killed or OUR_ERROR in self.text or TRACEBACK not in self.text
            return "" if is_clear else "a traceback without a word of ours"
        return f"exit code {self.code}"


def run_job(
    command: Sequence[str], environment: dict[str, str], output: Path, rng: random.Random, *, kill: Kill | None = None
) -> Ended:
    """Run `command` until all its processes are gone."""
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
    return Ended(code=code, was_killed=was_killed, outlived=outlived, text=output.read_text(errors="replace"))


def _kill(kill: Kill, job: subprocess.Popen[bytes], mark: str, rng: random.Random) -> bool:
    """Wait for the moment and send the signal; False where the job ended before."""
    while job.poll() is None and not kill.moment():
        time.sleep(POLL_S)
    give_up_at = time.monotonic() + kill.after_s
    while job.poll() is None and time.monotonic() < give_up_at:
        time.sleep(POLL_S)
    if job.poll() is not None:
        return False
    if kill.whom == "all":
        _signal_all(mark, job.pid, kill.number)
        return True
    ranks = sorted(pid for pid, is_rank in marked_processes(mark, job.pid).items() if is_rank)
    send_signal([rng.choice(ranks)] if kill.whom == "rank" and ranks else [job.pid], kill.number)
    return True


def _signal_all(mark: str, session: int, number: signal.Signals) -> None:
    """Once to each process of the job, those included that were forked while the others got theirs."""
    done: set[int] = set()
    while left := set(marked_processes(mark, session)) - done:
        send_signal(sorted(left), number)
        done |= left


def _wait_for_the_last(mark: str, session: int) -> int:
    """0 once nothing of the job is left; else how many did not end by themselves and were killed here."""
    give_up_at = time.monotonic() + OUTLIVE_S
    while left := marked_processes(mark, session):
        if time.monotonic() > give_up_at:
            send_signal(list(left), signal.SIGKILL)
            return len(left)
        time.sleep(POLL_S)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a training job said of itself in its metrics. `start` None: it never came to train."""

    start: int | None
    losses: dict[int, float]
    committed: int | None


def read_told(folder: Path, *, since_s: float = 0.0) -> Told:
    """The metrics of a job whose log.folder this is, from `since_s` on: before them stand those that the run's earlier jobs
    left in its store. A last line that was cut is passed over."""
    path = folder / "logs" / "metrics.jsonl"
    records: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    records = [record for record in records if record["time_s"] >= since_s]
    starts = [int(record["step"]) for record in records if record["event"] == "start"]
    said = [int(record["committed_step"]) for record in records if record.get("committed_step") is not None]
    losses = {int(record["step"]): float(record["loss"]) for record in records if record["event"] == "step"}
    return Told(start=starts[0] if starts else None, losses=losses, committed=max(said, default=None))
