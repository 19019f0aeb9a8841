"""`titan-ckpt diff`: compare two checkpoints; exit code 1 for a difference. No torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from titan_ckpt.check.diff import Comparison, Difference, compare
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.console.command import Command, Parser, add_json_flag
from titan_ckpt.console.output import format_table, write_json, write_text
from titan_ckpt.console.progress import ProgressLine

EPILOG = """\
examples:
  titan-ckpt diff runs/tiny@10 runs/tiny@20
  titan-ckpt diff runs/tiny@20 s3://bucket/run@20 --values --rtol 1e-5
"""


def configure(parser: Parser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("a", metavar="A", help="URL[@STEP]")
    parser.add_argument("b", metavar="B", help="URL[@STEP]")
    parser.add_argument("--values", action="store_true", help="read what differs and measure by how much")
    parser.add_argument(
        "--rtol", type=float, default=0.0, help="relative difference to allow with --values (default 0)"
    )
    parser.add_argument("--layout", action="store_true", help="count another mesh or placement as a difference too")
    add_json_flag(parser)
    parser.needs("--rtol", "--values")


def run(arguments: Namespace) -> int:
    """Compare the two; 1 if they differ."""
    a, b = open_checkpoint(arguments.a), open_checkpoint(arguments.b)
    with ProgressLine("diff", a.manifest.size_bytes + b.manifest.size_bytes) as progress:
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
        write_text(_text(a, b, found, counted))
    return 1 if counted else 0


def _difference_facts(difference: Difference) -> dict[str, Any]:
    """The JSON form; `max_abs` is null, with a count, where a NaN or an infinity is compared with a number."""
    return {name: getattr(difference, name) for name in Difference.__slots__}


def _text(a: Checkpoint, b: Checkpoint, found: Comparison, counted: Sequence[Difference]) -> str:
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


DIFF = Command(configure=configure, run=run)
