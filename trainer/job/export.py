"""Background export of committed checkpoints to Hugging Face folders by `titan-ckpt convert to-hf`, of adapters to PEFT folders.

The command runs in a separate process: it cannot block the training loop, its memory is bounded, and its failure is one line in
the log. Only rank 0 has an `Exporter`. At most one export runs at a time; if exports lag behind saves, only the newest
checkpoint is exported next.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO

from titan_ckpt.errors import TitanError
from titan_ckpt.location import join, redact
from titan_ckpt.store.clients.options import current_settings
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.config.train_config import ExportConfig

log = logging.getLogger(__name__)
FOLDER = "hf"  # in the run's folder: the default of export.url
CLEAN_UP_S = 10.0
_COMMAND = """
# titan-ckpt, with its arguments on stdin
import json, os, sys
sys.argv[1:] = json.load(sys.stdin)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
from titan_ckpt.cli.main import main
sys.exit(main())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOutcome:
    """The result of one export; `problem` is empty if the folder at `url` is complete."""

    step: int
    url: str
    seconds: float
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    step: int
    url: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    started_s: float


class Exporter:
    """Exports of the run at `save_url`; calls `on_end` with every outcome. Leaving the context stops a running export."""

    def __init__(
        self,
        config: ExportConfig,
        save_url: str,
        on_end: Callable[[ExportOutcome], None],
        *,
        has_adapters: bool = False,
    ) -> None:
        self._config, self._save_url, self._on_end, self._has_adapters = config, save_url, on_end, has_adapters
        self._running: _Running | None = None
        self._waiting: int | None = None
        self._seen: int | None = None
        self._taken: int | None = None
        self._begun_from: int | None = None

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop a running export, which removes its partial folder."""
        self._waiting = None
        if self._running is not None:
            self._stop(self._running)

    def begin_from(self, step: int) -> None:
        """Training goes on from this checkpoint, whose export may have been stopped, or not been asked for yet: then it is
        treated as if it was committed now."""
        self._begun_from = step
        if self._is_exported(step):
            self._taken = step
        elif step % self._config.every == 0:
            self._wait_for_turn(step)

    def _is_exported(self, step: int) -> bool:
        """Whether its folder holds anything: an export shows it when it is complete."""
        with suppress(TitanError):  # else the export will report it
            return next(open_store(self._url_of(step)).list(), None) is not None
        return False

    def steps(self) -> frozenset[int]:
        """Checkpoints that retention must keep, because an export reads them or will."""
        running = self._running
        return frozenset(
            step for step in (self._waiting, None if running is None else running.step) if step is not None
        )

    def poll(self, committed_step: int | None) -> None:
        """Finish and start exports; cheap enough for every step. `committed_step` is the newest checkpoint of this start."""
        if committed_step is not None and committed_step != self._seen:
            self._seen = committed_step
            if committed_step % self._config.every == 0:
                self._wait_for_turn(committed_step)
        if self._running is not None and self._running.process.poll() is not None:
            self._end(self._running)
        if self._running is None and self._waiting is not None:
            self._start(self._waiting)

    def finish(self, committed_step: int | None, *, is_stopped: Callable[[], bool], poll_s: float = 0.1) -> None:
        """At the end of training: export the last checkpoint too, and wait for all exports or until `is_stopped`."""
        if is_stopped():
            return
        committed_step = self._begun_from if committed_step is None else committed_step
        if committed_step is not None and committed_step != self._taken:
            self._wait_for_turn(committed_step)
        self.poll(None)
        while self._running is not None and not is_stopped():
            with suppress(subprocess.TimeoutExpired):
                self._running.process.wait(timeout=poll_s)
            self.poll(None)

    def _wait_for_turn(self, step: int) -> None:
        if self._waiting is not None:
            log.info("step %d: not exported, step %d is newer", self._waiting, step)
        self._waiting = self._taken = step

    def _start(self, step: int) -> None:
        url = self._url_of(step)
        arguments = [*current_settings().words, *self._verb(f"{self._save_url}@{step}", url)]
        started_s = time.monotonic()
        try:
            words = _as_file(arguments)
            errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process has ended
            command = [sys.executable, "-c", _COMMAND]
            with words:
                process = subprocess.Popen(
                    command, stdin=words, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
                )
        except OSError as error:
            self._report(ExportOutcome(step=step, url=url, seconds=0.0, problem=f"could not be started: {error}"))
        else:
            self._running = _Running(step=step, url=url, process=process, errors=errors, started_s=started_s)
        self._waiting = None

    def _url_of(self, step: int) -> str:
        return join(self._config.url or join(self._save_url, FOLDER), f"checkpoint-{step}")

    def _verb(self, source: str, url: str) -> list[str]:
        if self._has_adapters:
            return ["train", source, "--export-adapter", url]
        return ["convert", "to-hf", source, url, *(["--dtype", self._config.dtype] if self._config.dtype else [])]

    def _end(self, run: _Running) -> None:
        self._running = None
        problem = "" if run.process.returncode == 0 else _problem(run)
        run.errors.close()
        seconds = time.monotonic() - run.started_s
        self._report(ExportOutcome(step=run.step, url=run.url, seconds=seconds, problem=problem))

    def _report(self, outcome: ExportOutcome) -> None:
        shown = replace(outcome, url=redact(outcome.url))
        if shown.problem:
            log.warning("step %d: the export failed, training is not affected: %s", shown.step, shown.problem)
        else:
            log.info("step %d: exported to %s in %.1f s", shown.step, shown.url, shown.seconds)
        self._on_end(shown)

    def _stop(self, run: _Running) -> None:
        """Send SIGTERM, on which the command removes what it has written; kill it if it does not exit."""
        run.process.terminate()
        try:
            run.process.wait(timeout=CLEAN_UP_S)
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()
        self._end(run)


def _as_file(arguments: list[str]) -> IO[bytes]:
    """The arguments as a nameless file. All users of the machine can read a command line, and a URL may hold secrets."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    file.write(json.dumps(arguments).encode())
    file.seek(0)
    return file


def _problem(run: _Running) -> str:
    """The error that the command printed, else its exit code."""
    run.errors.seek(0)
    lines = run.errors.read().decode(errors="replace").strip().splitlines()
    code = run.process.returncode
    if code in (130, -signal.SIGTERM):
        return "stopped with training"
    return lines[-1].removeprefix("titan-ckpt: error: ") if lines else f"exit code {code}"
