"""`titan-ckpt verify` and `diff`: exit code 1 for a finding. No torch."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from titan_ckpt.check.diff import Comparison, Difference, compare
from titan_ckpt.check.scan import Problem
from titan_ckpt.check.verify import newest_committed, verify
from titan_ckpt.checkpoint.checkpoint import Checkpoint, open_checkpoint
from titan_ckpt.console.command import Command, add_json_flag
from titan_ckpt.console.output import Progress, format_table, write_json, write_text
from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.errors import UsageError
from titan_ckpt.format.names import step_folder
from titan_ckpt.location import Location, parse_location
from titan_ckpt.store.open import open_store

MAX_PROBLEMS_SHOWN = 50


def _configure_verify(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL[@STEP]", help="a checkpoint; without a step the newest committed one")
    parser.add_argument("--data", action="store_true", help="read every byte and check every digest")
    add_json_flag(parser)


def _verify(arguments: Namespace) -> int:
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
    with Progress("verify", total) as progress:
        problems = verify(where, read_data=arguments.data, on_bytes=progress.add)
        seconds, size = time.monotonic() - started, progress.done_bytes
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
        write_text(_verify_text(name, problems, size if arguments.data else None, seconds))
    return 1 if problems else 0


def _verify_text(name: str, problems: Sequence[Problem], read_bytes: int | None, seconds: float) -> str:
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


# diff


def _configure_diff(parser: ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="URL[@STEP]")
    parser.add_argument("b", metavar="B", help="URL[@STEP]")
    parser.add_argument("--values", action="store_true", help="read what differs and measure by how much")
    parser.add_argument(
        "--rtol", type=float, default=0.0, help="relative difference to allow with --values (default 0)"
    )
    parser.add_argument("--layout", action="store_true", help="count another mesh or placement as a difference too")
    add_json_flag(parser)


def _diff(arguments: Namespace) -> int:
    if arguments.rtol and not arguments.values:
        raise UsageError("--rtol needs --values: without it only digests are compared")
    a, b = open_checkpoint(arguments.a), open_checkpoint(arguments.b)
    with Progress("diff", a.manifest.size_bytes + b.manifest.size_bytes) as progress:
        found = compare(a, b, values=arguments.values, rtol=arguments.rtol, on_bytes=progress.add)
    counted = [d for d in found.differences if arguments.layout or not d.is_layout]
    if arguments.json:
        write_json(
            {
                "a": str(a), "b": str(b), "is_equal": not counted and not found.unknown, "equal": len(found.equal),
                "unknown": found.unknown, "differences": [_difference_facts(d) for d in found.differences],
            }
        )  # fmt: skip
    else:
        write_text(_diff_text(a, b, found, counted))
    return 1 if counted else 0


def _difference_facts(difference: Difference) -> dict[str, Any]:
    """A `max_abs` of null together with a count says that a NaN or an infinity stands against a number."""
    return {name: getattr(difference, name) for name in Difference.__slots__}


def _diff_text(a: Checkpoint, b: Checkpoint, found: Comparison, counted: Sequence[Difference]) -> str:
    lines = [f"A {a}", f"B {b}", ""]
    if found.differences:
        rows = [
            [d.kind, d.fqn, d.a, d.b, _number(d.max_abs), _number(d.max_rel), d.num_different or ""]
            for d in found.differences
        ]
        headers = ["what", "name", "A", "B", "max abs", "max rel", "elements"]
        lines += [format_table(headers, rows, right=["max abs", "max rel", "elements"]), ""]
    lines.append(f"{len(found.equal)} tensors equal, {len(counted)} differences")
    if found.unknown:
        lines.append(f"{len(found.unknown)} tensors are cut differently and were not compared: --values compares them")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


VERIFY = Command(configure=_configure_verify, run=_verify)
DIFF = Command(configure=_configure_diff, run=_diff)
