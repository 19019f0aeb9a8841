"""Run `titan-ckpt` as a user does, for the demo: commands, background jobs, and the cleanup of their processes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_ckpt.demo.processes import process_tree, send_signal
from titan_ckpt.errors import TitanError
from titan_ckpt.parsing.json_values import parse_json

POLL_S = 0.05
WATCH_S = 0.002


class DemoError(TitanError):
    """An act of the demo failed."""


class Shell:
    """Run `titan-ckpt` commands with `environment`; `show` gets each command line, `log` each one's stderr."""

    def __init__(self, environment: dict[str, str], log: Path, show: Callable[[str], None]) -> None:
        self._environment, self._log, self._show = {**os.environ, **environment}, log, show

    def run(self, *arguments: str, expected: int = 0) -> bytes:
        """Return the command's stdout; DemoError if its exit code is not `expected`."""
        self._announce(arguments)
        return self.python("titan_ckpt", *arguments, expected=expected)

    def python(self, module: str, *arguments: str, expected: int = 0) -> bytes:
        """Run a module as a program and return its stdout."""
        with open(self._log, "ab") as log:
            done = subprocess.run(
                [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                env=self._environment, check=False,
            )  # fmt: skip
        if done.returncode != expected:
            raise DemoError(
                f"{module} {shlex.join(arguments)}: exit code {done.returncode}, see {self._log}\n{tail(self._log)}"
            )
        return done.stdout

    def json(self, *arguments: str, expected: int = 0) -> Any:
        """Return the JSON that a command prints with `--json`."""
        return parse_json(self.run(*arguments, "--json", expected=expected), arguments[0])

    @contextmanager
    def job(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command in the background; kill all its processes on exit."""
        self._announce(arguments)
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                self._command(arguments), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
                start_new_session=True,
            )  # fmt: skip
        try:
            yield process
        finally:
            send_signal(process_tree(process))
            process.wait()

    def finish(self, *arguments: str) -> None:
        """Run a job to its end; DemoError if it fails."""
        with self.job(*arguments) as process:
            if process.wait():
                raise DemoError(
                    f"titan-ckpt {shlex.join(arguments)}: exit code {process.returncode}, see {self._log}\n{tail(self._log)}"
                )

    def _announce(self, arguments: Sequence[str]) -> None:
        self._show(f"$ titan-ckpt {shlex.join(arguments)}")

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "titan_ckpt", *arguments]


def wait_for(
    condition: Callable[[], bool],
    process: subprocess.Popen[bytes],
    *,
    what: str,
    timeout_s: float,
    poll_s: float = POLL_S,
) -> None:
    """Poll until `condition` holds; DemoError if the process ends first or the time is up."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        if process.poll() is not None:
            raise DemoError(f"the job ended with exit code {process.returncode} before {what}")
        if time.monotonic() > give_up_at:
            raise DemoError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(poll_s)


def tail(path: Path, num_lines: int = 12) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])
