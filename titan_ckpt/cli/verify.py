"""`titan-ckpt verify`: check one checkpoint; exit code 1 for a problem. No torch."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from titan_ckpt.check.scan import Problem
from titan_ckpt.check.verify import newest_committed, verify
from titan_ckpt.console.command import Command, add_json_flag
from titan_ckpt.console.output import write_json, write_text
from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.format.names import step_folder
from titan_ckpt.location import Location, parse_location
from titan_ckpt.store.open import open_store

MAX_PROBLEMS_SHOWN = 50


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("url", metavar="URL[@STEP]", help="a checkpoint; without a step the newest committed one")
    parser.add_argument("--data", action="store_true", help="read every byte and check every digest")
    add_json_flag(parser)


def run(arguments: Namespace) -> int:
    """Check the checkpoint; 1 if a problem is found."""
    location = parse_location(arguments.url)
    store = open_store(location.url)
    step = newest_committed(store) if location.step is None else location.step
    where = str(location) if step is None else f"{location.url}@{step}"
    total = (
        sum(entry.size_bytes for entry in store.list("" if step is None else step_folder(step)))
        if arguments.data
        else 0
    )
    started = time.monotonic()
    with ProgressLine("verify", total) as progress:
        problems = verify(where, read_data=arguments.data, on_bytes=progress.add)
        seconds, size = time.monotonic() - started, progress.done
    name = str(Location(url=location.url, step=step))
    if arguments.json:
        facts = {
            "checkpoint": name,
            "step": step,
            "is_ok": not problems,
            "read_bytes": size,
            "seconds": round(seconds, 3),
        }
        write_json(facts | {"problems": [problem.to_dict() for problem in problems]})
    else:
        write_text(_text(name, problems, size if arguments.data else None, seconds))
    return 1 if problems else 0


def _text(name: str, problems: Sequence[Problem], read_bytes: int | None, seconds: float) -> str:
    how = (
        "structure only; --data reads every byte"
        if read_bytes is None
        else f"{format_size(read_bytes)} read in {format_duration(seconds)}"
    )
    if not problems:
        return f"{name}: whole ({how})"
    more = (
        [f"... and {len(problems) - MAX_PROBLEMS_SHOWN} more; --json lists all"]
        if len(problems) > MAX_PROBLEMS_SHOWN
        else []
    )
    shown = [f"  {problem}" for problem in problems[:MAX_PROBLEMS_SHOWN]]
    return "\n".join(
        [f"{name}: DAMAGED, {len(problems)} problem{'s' if len(problems) > 1 else ''} ({how})", *shown, *more]
    )


VERIFY = Command(configure=configure, run=run)
