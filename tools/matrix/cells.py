"""One cell of the matrix: an environment of its own, and what is tried in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tools.matrix.pythons import Python
from tools.quick_tests import QUICK, copy_sources

ROOT = Path(__file__).resolve().parent.parent.parent
Steps = Callable[[Path, Path], str]
"""What is tried with an interpreter in a cell's folder; the answer is a line for the table."""
INSTALL_LIMIT_S = 1800.0
TESTS_LIMIT_S = 5400.0


class State(StrEnum):
    """How a cell ended."""

    PASSED = "passed"
    FAILED = "failed"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One Python and one torch, or none, and how it went."""

    python: str
    torch: str
    state: State
    detail: str
    duration_s: float = 0.0


class StepFailedError(Exception):
    """A command of a cell failed; the message is its last line."""


def try_laptop(python: Python, work: Path) -> Cell:
    """Install without extras and run what needs no torch."""

    def steps(program: Path, folder: Path) -> str:
        _run([program, "-m", "pip", "install", "-qq", str(folder / "source")], folder, INSTALL_LIMIT_S)
        _run([program, "-c", "import titan_ckpt, titan_ckpt.debug"], folder)
        _run([program, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)"], folder)
        data = folder / "source" / "tests" / "data"
        run = data / "golden" / "v1"
        commands = [["ls", str(run)], ["inspect", str(run)], ["verify", "--data", str(run)]]
        for command in commands:
            _run([program, "-m", "titan_ckpt", *command], folder)
        found = _run(
            [program, "-m", "titan_ckpt", "debug", str(data / "flight_recorder" / "skip"), "--json"], folder, code=1
        )
        verdict = json.loads(found)["verdicts"][0]["verdict"]
        if verdict != "SKIPPED_COLLECTIVE":
            raise StepFailedError(f"debug found {verdict} in the incident `skip`")
        return "import, ls, inspect, verify, debug"

    return _cell(python, "none (laptop)", work / f"laptop-{python.minor}", steps)


def try_full(python: Python, torch: str, work: Path, tests: Sequence[str] = (), *, is_newest: bool = False) -> Cell:
    """Install with torch and the development tools, and run the quick tests, or those of `tests`.

    `is_newest`: the newest releases of all other dependencies too, not those of constraints.txt.
    """

    def steps(program: Path, folder: Path) -> str:
        pip: list[str | Path] = [program, "-m", "pip", "install", "-qq"]
        _run([*pip, f"torch=={torch}"], folder, INSTALL_LIMIT_S)
        pinned = folder / "constraints.txt"
        lines = [] if is_newest else (ROOT / "constraints.txt").read_text().splitlines()
        pinned.write_text(
            "\n".join(line for line in lines if not line.startswith(("torch==", "#"))) + f"\ntorch=={torch}\n"
        )
        _run([*pip, "-c", str(pinned), "-e", f"{folder / 'source'}[dev]"], folder, INSTALL_LIMIT_S)
        command: list[str | Path] = [program, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", QUICK]
        command += tests
        return _run(command, folder / "source", TESTS_LIMIT_S).strip().splitlines()[-1].strip("= ")

    return _cell(python, torch, work / f"torch-{torch}-{python.minor}", steps)


def _cell(python: Python, torch: str, folder: Path, steps: Steps) -> Cell:
    begin = time.monotonic()
    try:
        shutil.rmtree(folder, ignore_errors=True)
        copy_sources(ROOT, folder / "source", compiled=False)
        _run([python.program, "-m", "venv", str(folder / "venv")], folder, INSTALL_LIMIT_S)
        detail, state = steps(folder / "venv" / "bin" / "python", folder), State.PASSED
        shutil.rmtree(folder / "venv")  # with CUDA it takes several GB
    except StepFailedError as error:
        detail, state = str(error), State.FAILED
    return Cell(
        python=python.version, torch=torch, state=state, detail=detail, duration_s=round(time.monotonic() - begin, 1)
    )


def _run(command: Sequence[str | Path], folder: Path, limit_s: float = 300.0, code: int = 0) -> str:
    """The standard output of a command that must end with exit code `code`; all of it goes to `log.txt` of the cell."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    try:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=folder,
            env=environment,
            timeout=limit_s,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StepFailedError(f"{command[1:4]} took longer than {limit_s:.0f} s") from error
    home = folder.parent if folder.name == "source" else folder
    with (home / "log.txt").open("a") as log:
        log.write(f"$ {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    if done.returncode != code:
        lines = (done.stdout + done.stderr).strip().splitlines()
        summary = next(
            (line for line in reversed(lines) if re.search(r"\d+ (failed|passed)", line)), lines[-1] if lines else ""
        )
        raise StepFailedError(f"exit code {done.returncode}: {summary.strip('= ')} ({home / 'log.txt'})")
    return done.stdout
