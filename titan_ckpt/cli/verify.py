"""`titan-ckpt verify`: check one checkpoint; exit code 1 for a problem, or for data that no digest covers. No torch."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence

from titan_ckpt.check.mend import mend_metadata
from titan_ckpt.check.scan import Problem
from titan_ckpt.check.verify import Report, examine, newest_committed
from titan_ckpt.console.command import Command, add_json_flag
from titan_ckpt.console.escapes import escape_line
from titan_ckpt.console.output import write_json, write_text
from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.format.names import step_folder
from titan_ckpt.location import Location, parse_location
from titan_ckpt.store.open import open_store

MAX_PROBLEMS_SHOWN = 50  # lines
MAX_PROBLEMS_OF_FILE = 3


EPILOG = """\
examples:
  titan-ckpt verify runs/tiny                   # every file is there, in its size
  titan-ckpt verify s3://bucket/run@1200 --data # every byte agrees with its digest
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("url", metavar="URL[@STEP]", help="a checkpoint; without a step the newest committed one")
    parser.add_argument(
        "--fix", action="store_true", help="first mend a .metadata that is not the one that was committed"
    )
    parser.add_argument("--data", action="store_true", help="read every byte and check every digest")
    add_json_flag(parser)


def run(arguments: Namespace) -> int:
    """Check the checkpoint; 1 if a problem is found."""
    location = parse_location(arguments.url)
    store = open_store(location.url)
    step = newest_committed(store) if location.step is None else location.step
    is_mended = arguments.fix and step is not None and mend_metadata(store, step)
    where = str(location) if step is None else f"{location.url}@{step}"
    total = (
        sum(entry.size_bytes for entry in store.list("" if step is None else step_folder(step)))
        if arguments.data
        else 0
    )
    started = time.monotonic()
    with ProgressLine("verify", total) as progress:
        report = examine(where, read_data=arguments.data, on_bytes=progress.add)
        seconds, size = time.monotonic() - started, progress.done
    name = str(Location(url=location.url, step=step))
    if arguments.json:
        facts = {
            "checkpoint": name,
            "step": step,
            "is_ok": report.is_ok,
            "is_mended": is_mended,
            "read_bytes": size,
            "seconds": round(seconds, 3),
        }
        lists = {"files": [file.to_dict() for file in report.files], "problems": [p.to_dict() for p in report.problems]}
        write_json(facts | lists)
    else:
        if is_mended:
            write_text(f"{name}: its .metadata was another one; the one that was committed is back")
        write_text(_text(name, report, size if arguments.data else None, seconds))
    return 1 if report.problems or (arguments.data and report.is_data_unchecked) else 0


def _text(name: str, report: Report, read_bytes: int | None, seconds: float) -> str:
    problems = report.problems
    how = (
        "structure only; --data reads every byte"
        if read_bytes is None
        else f"{format_size(read_bytes)} read in {format_duration(seconds)}"
    )
    if report.is_ok is None and read_bytes is None:
        return f"{name}: no damage found ({how})"
    if report.is_ok is None:
        return "\n".join([f"{name}: no damage found, but not everything could be checked ({how})", *_unchecked(report)])
    if not problems:
        return f"{name}: whole ({how})"
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return "\n".join([f"{name}: DAMAGED, {count} ({how})", *_up_to_most(list(_by_file(problems)))])


def _by_file(problems: Sequence[Problem]) -> Iterator[str]:
    """The first problems of each file: a file that is cut off has one of every tensor in it."""
    files: dict[str, list[Problem]] = {}
    for problem in problems:
        files.setdefault(problem.path, []).append(problem)
    for path, found in files.items():
        yield from (f"  {escape_line(str(problem))}" for problem in found[:MAX_PROBLEMS_OF_FILE])
        if len(found) > MAX_PROBLEMS_OF_FILE:
            yield f"  {escape_line(path)}: and {len(found) - MAX_PROBLEMS_OF_FILE} more problems; --json lists all"


def _up_to_most(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_PROBLEMS_SHOWN
    return [*lines[:MAX_PROBLEMS_SHOWN], *([f"  ... and {more} more; --json lists all"] if more > 0 else [])]


def _unchecked(report: Report) -> list[str]:
    """What no digest covers: a line for each file, with the number of tensors and values in it."""
    lines = []
    for file in (file for file in report.files if file.checked_by is None):
        count = f" ({len(file.unchecked)} tensors)" if file.unchecked else ""
        lines.append(f"  {file.path}: no digest{count}")
    return _up_to_most(lines)


VERIFY = Command(configure=configure, run=run)
