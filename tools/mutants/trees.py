"""Copies of the project in which a mutant runs, one per worker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

START_S = 45.0
"""Time for imports and collection, beside that of the tests."""
SLOWER = 2.0
"""A mutant's tests may take this many times as long as without the mutation."""


class Outcome(StrEnum):
    """What the tests made of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"


def environment_of(tree: Path) -> dict[str, str]:
    """Variables with which Python takes titan_ckpt, tests and tools from `tree`."""
    return os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


@contextmanager
def mutated(file: Path, source: str) -> Iterator[None]:
    """Write `source` to `file` and put back what was there at the end."""
    before = file.read_bytes()
    file.write_text(source)
    try:
        yield
    finally:
        file.write_bytes(before)


def run_tests(tree: Path, tests: Sequence[str], tests_s: float) -> Outcome:
    """Run the tests in `tree` up to the first failure, with a time limit that follows from `tests_s`."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--basetemp=.tests"]  # which goes with the tree
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment_of(tree),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            code = process.wait(timeout=START_S + SLOWER * tests_s)
        except subprocess.TimeoutExpired:
            return Outcome.TIMED_OUT
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return Outcome.SURVIVED if code == 0 else Outcome.KILLED
