"""Logging of a run: one file per rank, the console for rank 0 and for errors, and a copy beside remote checkpoints."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TextIO

from titan_ckpt.console.escapes import escape_text
from titan_ckpt.console.output import ConsoleFormatter, LogFormatter, are_events_wanted, is_quiet
from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.errors import StoreError
from titan_ckpt.format.names import DEBUG, LOGS
from titan_ckpt.location import join, local_path, normalise, redact_text, scheme
from titan_ckpt.sharding.mesh import MeshSpec, format_coordinate
from titan_ckpt.store.open import open_store

log = logging.getLogger(__name__)
TRACE = "trace.json"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The local folder of a run, with logs/ and debug/ laid out as under the run's URL."""

    root: str

    @property
    def logs(self) -> str:
        """Folder of the log files."""
        return os.path.join(self.root, LOGS)

    @property
    def debug(self) -> str:
        """Folder of the recorder's files."""
        return os.path.join(self.root, DEBUG)

    def log(self, rank: int) -> str:
        """The log file of a rank."""
        return os.path.join(self.logs, f"rank_{rank:05d}.log")

    def error(self, rank: int) -> str:
        """The file in which a rank records the error that ended it."""
        return os.path.join(self.logs, f"error_{rank:05d}.json")

    def file(self, name: str) -> str:
        """A file in logs/."""
        return os.path.join(self.logs, name)

    def is_at(self, url: str) -> bool:
        """Whether `url` is this very folder, so that nothing has to be copied there."""
        return scheme(url) == "file" and os.path.realpath(local_path(normalise(url))) == os.path.realpath(self.root)


def run_folder(folder: str, save_url: str) -> RunFolder:
    """`folder` if given, else the run's URL if that is local, else runs/NAME."""
    if folder:
        return RunFolder(normalise(folder))
    if not save_url:
        return RunFolder(os.path.abspath("runs/unsaved"))
    if scheme(save_url) == "file":
        return RunFolder(normalise(save_url))
    return RunFolder(os.path.abspath(os.path.join("runs", normalise(save_url).rpartition("/")[2])))


def describe_rank(mesh: MeshSpec, rank: int) -> str:
    """A rank and its mesh coordinate: `rank 3 dp_shard1 tp1`."""
    axes = [axis for axis, _ in mesh.items()]
    return f"rank {rank} {format_coordinate(mesh.coordinate(rank), axes)}".rstrip()


class RankLogging:
    """Log handlers of one rank, as a context manager: its file at INFO, the console at INFO on rank 0 and ERROR elsewhere."""

    def __init__(
        self, path: str, *, rank: int, mesh: MeshSpec, console: TextIO | None = None, has_bar: bool = False
    ) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        who = describe_rank(mesh, rank)
        self._file = logging.FileHandler(path, encoding="utf-8")
        self._file.setFormatter(LogFormatter(f"%(asctime)s %(levelname)s [{who}] %(name)s: %(message)s"))
        stream = console or sys.stderr
        has_line = has_bar and rank == 0 and (stream.isatty() or are_events_wanted())
        self.bar = ProgressLine("train", unit="steps", stream=stream) if has_line else None
        self._console = _ConsoleHandler(stream, self.bar)
        self._console.setLevel(logging.INFO if rank == 0 and not is_quiet() else logging.ERROR)
        prefix = "" if rank == 0 else f"[{who}] "
        self._console.setFormatter(_ShortFormatter(prefix))
        self._console.addFilter(lambda record: record.exc_info is None)  # tracebacks go to the file only
        self._ours = logging.getLogger("titan_ckpt")
        self._warnings = logging.getLogger("py.warnings")
        self._before = [(each, each.level, each.propagate, each.handlers) for each in (self._ours, self._warnings)]

    def __enter__(self) -> RankLogging:
        """Take over the package's logger, and Python's warnings (file only)."""
        self._ours.setLevel(logging.INFO)
        self._ours.propagate = False
        self._ours.handlers = [self._file, self._console]
        self._warnings.propagate = False
        self._warnings.handlers = [self._file]
        logging.captureWarnings(True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restore the loggers and close the file."""
        logging.captureWarnings(False)
        if self.bar is not None:
            self.bar.close(is_finished=kind is None)
        for logger, level, propagate, handlers in self._before:
            logger.setLevel(level)
            logger.propagate, logger.handlers = propagate, handlers
        self._file.close()


class _ConsoleHandler(logging.StreamHandler[IO[str]]):
    """The console, with the bar kept below what is written."""

    def __init__(self, stream: IO[str], bar: ProgressLine | None) -> None:
        super().__init__(stream)
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        """Write above the bar."""
        if self._bar is None:
            super().emit(record)
            return
        self._bar.print(self.format(record))


class _ShortFormatter(ConsoleFormatter):
    """Short lines without tracebacks, which are in the file."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        if are_events_wanted():
            return super().format(record)
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return escape_text(redact_text(f"{self._prefix}{level}{record.getMessage()}"))


def upload_logs(folder: RunFolder, tiers: Sequence[str], names: Sequence[str]) -> None:
    """Copy files of logs/ to logs/ of every tier; a store error is only a warning, since the run itself is fine."""
    for url in tiers:
        if not folder.is_at(url):
            _upload(folder, url, names)


def _upload(folder: RunFolder, url: str, names: Sequence[str]) -> None:
    store = open_store(url)
    for name in names:
        path = folder.file(name)
        try:
            if os.path.exists(path):
                with open(path, "rb") as file:
                    store.write(f"{LOGS}/{name}", iter(lambda: file.read(1 << 20), b""))
        except (StoreError, OSError) as error:
            log.warning("%s was not copied to %s: %s", name, join(str(store), LOGS), error)
