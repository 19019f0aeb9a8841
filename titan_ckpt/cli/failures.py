"""What the command line does with errors: one line on stderr, an exit code, and for a bug of ours a private traceback file."""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from titan_ckpt.console.escapes import escape_text
from titan_ckpt.console.output import ConsoleFormatter, OutputClosedError, write_error, write_json, write_note
from titan_ckpt.errors import FAILED, INTERNAL, TitanError
from titan_ckpt.location import redact_text
from titan_ckpt.version import __version__


def report_failure(error: BaseException, arguments: Sequence[str], *, show_traceback: bool) -> int:
    """Print what went wrong; returns the exit code: the error's own, 3 for a file that cannot be used, else 70."""
    is_known = isinstance(error, TitanError) or (isinstance(error, OSError) and error.filename is not None)
    if isinstance(error, TitanError) and error.exit_code == INTERNAL and hasattr(error, "__notes__"):
        is_known = False  # a save failed by a bug, whose traceback is in the notes
    if is_known and not show_traceback:
        write_error(error if isinstance(error, TitanError) else f"{error.filename}: {error.strerror}")  # type: ignore[attr-defined]
    elif show_traceback:
        write_error("".join(traceback.format_exception(error)), head="")
    else:
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        write_error(f"{what}\n{_kept(error, arguments)}", head="titan-ckpt: internal error: ")
    code = (error.exit_code if isinstance(error, TitanError) else FAILED) if is_known else INTERNAL
    if "--json" in arguments:
        write_json_error(type(error).__name__, str(error), code)
    return code


def write_json_error(kind: str, message: str, exit_code: int) -> None:
    """Write an error to stdout as one line of JSON, for programs that asked for JSON."""
    with suppress(OutputClosedError, TitanError):  # the exit code stands for what was done
        write_json({"error": {"kind": kind, "message": message, "exit_code": exit_code}}, indent=None)


def _kept(error: BaseException, arguments: Sequence[str]) -> str:
    """Write the traceback to a file of this user alone; says where it is, or shows it if there is no place for a file."""
    head = f"titan-ckpt {__version__}, Python {sys.version.split()[0]}\n{' '.join(arguments)}\n\n"
    text = escape_text(redact_text(head + "".join(traceback.format_exception(error))))
    try:
        descriptor, path = tempfile.mkstemp(prefix="titan-ckpt-", suffix=".traceback.txt")
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        return text
    return f"this is a bug of titan-ckpt; the traceback is in {path}, --traceback shows it here"


@contextmanager
def nothing_printed_elsewhere(found: list[BaseException]) -> Iterator[None]:
    """Log records, warnings and errors of threads go through the console; the latter are added to `found`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ConsoleFormatter("%(levelname)s %(name)s: %(message)s"))
    root, level = logging.getLogger(), logging.getLogger().level
    is_ours = not root.handlers
    if is_ours:
        root.addHandler(handler)
        root.setLevel(logging.WARNING)
        logging.captureWarnings(True)
    in_threads, unraisable = threading.excepthook, sys.unraisablehook
    threading.excepthook = lambda failed: _take(failed.exc_value, found)
    sys.unraisablehook = _ignored
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = in_threads, unraisable
        if is_ours:
            logging.captureWarnings(False)
            root.removeHandler(handler)
        root.setLevel(level)


def _take(error: BaseException | None, found: list[BaseException]) -> None:
    if error is not None and not isinstance(error, SystemExit):
        found.append(error)


def _ignored(failed: Any) -> None:
    """An error in a destructor, which Python cannot raise anywhere."""
    write_note(f"ignored in {failed.object!r}: {failed.exc_value!r}")
