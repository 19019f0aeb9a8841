"""Multi-rank jobs that alternate step by step, so that other load on the machine slows them equally.

A rank calls `take_turns(step)` and runs one step for every line on its stdin. Uses only the standard library, because
a rank may run in a different environment from the measuring process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tools.paths import ROOT

ANSWER = '{"wall_s"'


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What one step took: seconds until the slowest rank finished, processor seconds of all ranks."""

    wall_s: float
    cpu_s: float


def take_turns(step: Callable[[], None]) -> None:
    """In a rank: a step for each line that arrives, answered with its seconds; returns when stdin closes."""
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        answer = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class Job:
    """`world_size` processes of `python -m module`, given `options` as JSON; a context manager."""

    def __init__(self, python: str, module: str, options: dict[str, Any], *, world_size: int, port: int) -> None:
        self.module = module
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        shared |= {"OMP_NUM_THREADS": str(options["threads"]), "PYTHONWARNINGS": "ignore", "LOCAL_RANK": "0"}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in __exit__)
        self.ranks = [
            subprocess.Popen(
                [python, "-m", module, json.dumps(options)],
                cwd=ROOT,
                env=os.environ | shared | {"RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
            )
            for rank in range(world_size)
        ]

    def step(self) -> StepTime:
        """Run one step on all ranks."""
        for rank in self.ranks:
            assert rank.stdin is not None
            try:
                rank.stdin.write("\n")
                rank.stdin.flush()
            except BrokenPipeError:
                raise self._ended() from None
        answers = [self._answer(rank) for rank in self.ranks]
        return StepTime(wall_s=max(a["wall_s"] for a in answers), cpu_s=sum(a["cpu_s"] for a in answers))

    def _answer(self, rank: subprocess.Popen[str]) -> dict[str, float]:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith(ANSWER):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise self._ended()

    def _ended(self) -> RuntimeError:
        self.errors.seek(0)
        return RuntimeError(f"{self.module} ended before its step:\n{self.errors.read()[-4000:]}")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for rank in self.ranks:
            if rank.stdin is not None:
                with suppress(BrokenPipeError):  # it has ended, and step() says why
                    rank.stdin.close()
        for rank in self.ranks:
            if kind is not None:
                rank.kill()
            rank.wait(60)
            if rank.stdout is not None:
                rank.stdout.close()
        self.errors.close()
