"""The one place that prints: text, tables and JSON, without anything that a terminal would obey."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from tabulate import tabulate

from titan_ckpt.console.escapes import escape_line, escape_text
from titan_ckpt.errors import TitanError
from titan_ckpt.location import redact_text, redact_values


class OutputClosedError(Exception):
    """Whoever read our output has closed it, as `head` does."""


def write_json(value: Any, out: TextIO | None = None, *, indent: int | None = 1) -> None:
    """Write `value` as JSON in ASCII to stdout, without secrets; infinity and NaN become null."""
    _write(out or sys.stdout, _json_text(value, indent) + "\n")


def _json_text(value: Any, indent: int | None) -> str:
    return json.dumps(_finite(redact_values(value)), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_key(key): _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _key(key: Any) -> Any:
    return str(key) if isinstance(key, float) and not math.isfinite(key) else key


def write_text(text: str, out: TextIO | None = None) -> None:
    """Write `text` as lines to stdout, without secrets, and with what a terminal would obey escaped."""
    write_coloured(escape_text(redact_text(text)), out)


def write_coloured(text: str, out: TextIO | None = None) -> None:
    """Write lines to stdout as they are: for our own colours. Every name in `text` went through `escape_line`."""
    _write(out or sys.stdout, text if text.endswith("\n") else text + "\n")


_IS_QUIET = ContextVar("is_quiet", default=False)


@contextmanager
def quiet(is_quiet: bool) -> Iterator[None]:
    """No notes and no progress within, if `is_quiet`; errors and results are still written."""
    token = _IS_QUIET.set(is_quiet)
    try:
        yield
    finally:
        _IS_QUIET.reset(token)


def is_quiet() -> bool:
    """Whether the user asked for results and errors alone."""
    return _IS_QUIET.get()


_stderr_is_events = False


@contextmanager
def events_on_stderr(is_on: bool) -> Iterator[None]:
    """Within, if `is_on`, what goes to stderr are events: one JSON object per line, listed in docs/bots.md. For all threads."""
    global _stderr_is_events
    before, _stderr_is_events = _stderr_is_events, is_on
    try:
        yield
    finally:
        _stderr_is_events = before


def are_events_wanted() -> bool:
    """Whether the user asked for `--progress json`."""
    return _stderr_is_events


def output_words() -> list[str]:
    """The arguments that make a child process write as this one does."""
    return ["--progress=json"] * are_events_wanted() + ["--quiet"] * is_quiet()


def event_line(event: str, **facts: Any) -> str:
    """An event of this moment as one line of JSON; `facts` may give another `time_s`, in seconds since the epoch."""
    return _json_text({"event": event, "time_s": time.time()} | facts, indent=None)


def write_event(event: str, **facts: Any) -> None:
    """Write an event to stderr; lost, without an error, where stderr cannot be written."""
    write_to_stderr(event_line(event, **facts))


def write_note(text: str) -> None:
    """Write a line about what is done to stderr, unless quiet. Further lines are indented, so that none looks like a note.

    If stderr cannot be written the note is lost: the exit code still tells the result.
    """
    if are_events_wanted() and not is_quiet():
        write_event("note", text=text)
    elif not is_quiet():
        write_to_stderr(_indented(text))


def write_to_stderr(text: str) -> None:
    """Write lines to stderr; lost, without an error, where stderr cannot be written."""
    try:
        write_text(text, sys.stderr)
    except (OutputClosedError, TitanError):
        discard(sys.stderr)


def write_error(error: BaseException | str, *, head: str = "titan-ckpt: error: ") -> None:
    """Write an error to stderr, behind `head`."""
    if are_events_wanted():
        write_event("error", text=str(error))
    else:
        write_to_stderr(_indented(f"{head}{error}"))


def flush() -> None:
    """Flush stdout and stderr; OutputClosedError or TitanError if stdout does not take what was printed."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        discard(sys.stderr)
    try:
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise OutputClosedError from error
    except OSError as error:
        raise TitanError(f"the output cannot be written: {error.strerror}") from error


def open_closed_streams() -> None:
    """Open standard streams that the program was started without (`>&-`, a daemon) on nowhere.

    Else the next file that is opened would get their number, and what a library prints would go into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number and not _is_open(number):
                os.dup2(nowhere, number)
            setattr(sys, name, open(nowhere, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def drop_unwritten() -> None:
    """Flush what can be flushed, and forget the rest: Python would flush again at exit, and end with a code of its own."""
    try:
        flush()
    except (OutputClosedError, TitanError):
        discard(sys.stdout)


def discard(*streams: TextIO) -> None:
    """Point streams that cannot be written to nowhere, so that Python does not fail when it flushes them at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with suppress(OSError, ValueError):  # replaced by something without a descriptor
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError as error:
        raise OutputClosedError from error
    except OSError as error:
        raise TitanError(f"the output cannot be written: {error.strerror}") from error


def _indented(text: str) -> str:
    return "\n    ".join(text.rstrip("\n").split("\n"))


class LogFormatter(logging.Formatter):
    """Log lines for files and the terminal: escaped, and without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """The lines of `record`."""
        return escape_text(redact_text(super().format(record)))


class ConsoleFormatter(LogFormatter):
    """Log lines for stderr: events where these are wanted."""

    def format(self, record: logging.LogRecord) -> str:
        """The lines of `record`, or one event."""
        if are_events_wanted():
            return event_line("log", level=record.levelname, text=record.getMessage())
        return super().format(record)


def format_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[str] = ()) -> str:
    """A plain table; the columns named in `right` are right-aligned; no alignment is guessed from values.

    >>> print(format_table(["step", "size"], [[20, "1.2 MB"], [1200, "9 B"]], right=["step", "size"]))
      step    size
        20  1.2 MB
      1200     9 B
    """
    align = ["right" if header in right else "left" for header in headers]
    cells = [[escape_line(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    return tabulate(cells, headers, tablefmt="plain", disable_numparse=True, colalign=align if rows else None)


def age_s(created: str, now_s: float) -> float | None:
    """Seconds since an ISO 8601 time; None if it cannot be parsed."""
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return None
    return now_s - (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
