"""`titan-ckpt prune`: delete checkpoints that a retention policy does not keep. No torch."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from titan_ckpt.checkpoint.open import CheckpointInfo, list_checkpoints
from titan_ckpt.console.command import Command, add_json_flag
from titan_ckpt.console.output import format_table, write_json, write_text
from titan_ckpt.console.units import format_size
from titan_ckpt.errors import UsageError
from titan_ckpt.location import run_location
from titan_ckpt.store.open import open_store
from titan_ckpt.upkeep.deletion import RemovalPlan, delete, plan_removal, read_pins
from titan_ckpt.upkeep.retention import DAY_S, PINS, RetentionPolicy, parse_age


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "Never deleted: the newest whole resumable checkpoint, steps listed in RUN/pins.txt (one a line), model-only exports,\n"
        "damaged checkpoints, steps not yet copied to a second tier (RUN/unmirrored.txt), files that another checkpoint refers\n"
        "to, and what titan-ckpt did not write: other files, symbolic links, checkpoints of other programs. While a checkpoint\n"
        "of the run cannot be opened, nothing is deleted: which files it needs is unknown."
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
    add_json_flag(parser)


def run(arguments: Namespace) -> int:
    """Delete what the policy does not keep; preview it without --yes. 1 if a checkpoint that cannot be opened forbids it."""
    location = run_location(arguments.url)
    store = open_store(location.url)
    pins, wanted = read_pins(store), frozenset(arguments.keep)
    policy = RetentionPolicy(
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        pins=pins | wanted,
        is_incomplete=arguments.incomplete,
        older_than_s=arguments.older_than,
    )
    infos = list_checkpoints(store)
    _check_wanted(wanted, infos, shown=str(location))
    plan = plan_removal(store, policy, now_s=time.time())
    absent = sorted(pins - {info.step for info in infos})
    reasons = [*plan.kept, *(f"{store.where(PINS)}: this run has no step {step}" for step in absent)]
    if arguments.yes:
        reasons += delete(store, plan)
    size = sum(item.size_bytes for item in plan.garbage)
    if arguments.json:
        rows = [{"what": item.what, "step": item.step, "size_bytes": item.size_bytes} for item in plan.garbage]
        write_json({"is_deleted": arguments.yes, "size_bytes": size, "removed": rows, "kept": reasons})
    else:
        write_text("\n".join([_text(plan, size, is_deleted=arguments.yes), *reasons]))
    return 1 if plan.is_blocked else 0


def _check_wanted(wanted: frozenset[int], infos: Sequence[CheckpointInfo], *, shown: str) -> None:
    """Refuse a `--keep` that keeps nothing: it may be a slip, and the step that was meant would go."""
    steps = [info.step for info in infos]
    for step in sorted(wanted - set(steps)):
        near = ", ".join(map(str, sorted(steps, key=lambda found: abs(found - step))[:5])) or "none"
        raise UsageError(f"--keep {step}: {shown} has no step {step}; nothing was deleted. The nearest steps: {near}")


def _text(plan: RemovalPlan, size_bytes: int, *, is_deleted: bool) -> str:
    if not plan.garbage:
        return "nothing to delete"
    rows = [[item.what, len(item.entries), format_size(item.size_bytes)] for item in plan.garbage]
    table = format_table(
        ["deleted" if is_deleted else "would delete", "objects", "size"], rows, right=["objects", "size"]
    )
    end = f"{format_size(size_bytes)} freed" if is_deleted else f"{format_size(size_bytes)}; add --yes to delete"
    return f"{table}\n{end}"


PRUNE = Command(configure=configure, run=run)
