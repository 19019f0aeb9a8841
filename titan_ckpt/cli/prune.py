"""`titan-ckpt prune`: delete checkpoints that a retention policy does not keep. No torch."""

from __future__ import annotations

from argparse import Namespace

from titan_ckpt.console.command import Command, Parser, add_json_flag
from titan_ckpt.console.output import format_table, write_json, write_text
from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.console.units import format_size
from titan_ckpt.upkeep.pruning import PruneReport, prune
from titan_ckpt.upkeep.retention import DAY_S, RetentionPolicy, parse_age


def configure(parser: Parser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "Never deleted: the newest whole resumable checkpoint, steps listed in RUN/pins.txt (one a line), model-only exports,\n"
        "damaged checkpoints, steps not yet copied to a second tier (RUN/unmirrored.txt), files that another checkpoint refers\n"
        "to, and what titan-ckpt did not write: other files, symbolic links, checkpoints of other programs. While a checkpoint\n"
        "of the run cannot be opened, nothing is deleted: which files it needs is unknown.\n\n"
        "examples:\n"
        "  titan-ckpt prune runs/tiny --keep-last 3          # lists what would be deleted\n"
        "  titan-ckpt prune s3://bucket/run --keep-last 3 --keep-every 1000 --yes"
    )
    parser.add_argument("url", metavar="URL", help="URL of a run")
    parser.add_argument(
        "--keep-last", type=int, required=True, metavar="N", help="keep the newest N resumable checkpoints"
    )
    parser.add_argument("--keep-every", type=int, metavar="M", help="keep steps that M divides as well")
    parser.add_argument(
        "--keep", type=int, action="append", default=[], metavar="STEP", help="keep this step; repeatable"
    )
    parser.add_argument(
        "--incomplete", action="store_true", help="delete what was never committed, too, once it is old"
    )
    parser.add_argument(
        "--older-than", type=parse_age, default=DAY_S, metavar="AGE", help="how old for --incomplete (default 1d)"
    )
    parser.add_argument("--yes", action="store_true", help="delete; without it, only list what would be deleted")
    parser.add_argument("-n", "--dry-run", action="store_true", help="list what would be deleted: the default")
    parser.excludes("--dry-run", "--yes")
    add_json_flag(parser)
    parser.needs("--older-than", "--incomplete")


def run(arguments: Namespace) -> int:
    """Delete what the policy does not keep; preview it without --yes. 1 if a checkpoint that cannot be opened forbids it."""
    policy = RetentionPolicy(
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        pins=frozenset(arguments.keep),
        is_incomplete=arguments.incomplete,
        older_than_s=arguments.older_than,
    )
    report = _prune(arguments.url, policy, dry_run=not arguments.yes)
    if arguments.json:
        rows = [{"what": item.what, "step": item.step, "size_bytes": item.size_bytes} for item in report.garbage]
        kept = list(report.kept)
        write_json({"is_deleted": arguments.yes, "size_bytes": report.size_bytes, "removed": rows, "kept": kept})
    else:
        write_text("\n".join([_text(report), *report.kept]))
    return 1 if report.is_blocked else 0


def _prune(url: str, policy: RetentionPolicy, *, dry_run: bool) -> PruneReport:
    with ProgressLine("read", unit="checkpoints") as reading, ProgressLine("delete", unit="objects") as deleting:

        def on_delete(done: int, total: int) -> None:
            reading.close()  # a terminal has room for one line
            deleting.show(done, total)

        return prune(url, policy, dry_run=dry_run, on_read=reading.show, on_delete=on_delete)


def _text(report: PruneReport) -> str:
    if not report.garbage:
        return "nothing to delete"
    rows = [[item.what, len(item.entries), format_size(item.size_bytes)] for item in report.garbage]
    table = format_table(
        ["deleted" if report.is_deleted else "would delete", "objects", "size"], rows, right=["objects", "size"]
    )
    size = format_size(report.size_bytes)
    return f"{table}\n{size} freed" if report.is_deleted else f"{table}\n{size}; add --yes to delete"


PRUNE = Command(configure=configure, run=run)
