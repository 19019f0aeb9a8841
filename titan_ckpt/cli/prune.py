"""`titan-ckpt prune`: delete checkpoints that a retention policy does not keep. No torch."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.console.command import Command, add_json_flag
from titan_ckpt.console.output import format_table, write_json, write_text
from titan_ckpt.console.units import format_size
from titan_ckpt.errors import NotCommittedError
from titan_ckpt.location import run_location
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.upkeep.deletion import (
    Garbage,
    age_of_step_s,
    attempt_garbage,
    check_whole,
    delete,
    read_pins,
    referred,
    step_garbage,
)
from titan_ckpt.upkeep.retention import DAY_S, RetentionPolicy, parse_age, prune


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "Never deleted: the newest whole resumable checkpoint, steps listed in RUN/pins.txt (one a line), model-only exports,\n"
        "damaged checkpoints, files that another checkpoint refers to, and folders that are not named step-NNNNNNNN."
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
    """Delete what the policy does not keep; preview it without --yes."""
    location = run_location(arguments.url)
    store = open_store(location.url)
    policy = RetentionPolicy(
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        pins=read_pins(store) | frozenset(arguments.keep),
        is_incomplete=arguments.incomplete,
        older_than_s=arguments.older_than,
    )
    garbage = plan_removal(store, location.url, policy, now_s=time.time())
    if arguments.yes:
        for item in garbage:
            delete(store, item)
    size = sum(item.size_bytes for item in garbage)
    if arguments.json:
        rows = [{"what": item.what, "step": item.step, "size_bytes": item.size_bytes} for item in garbage]
        write_json({"is_deleted": arguments.yes, "size_bytes": size, "removed": rows})
    else:
        write_text(_text(garbage, size, is_deleted=arguments.yes))
    return 0


def plan_removal(store: Store, url: str, policy: RetentionPolicy, *, now_s: float) -> list[Garbage]:
    """What `policy` deletes from a run. Every checkpoint is checked first: only a whole one counts as kept."""
    checked = [check_whole(store, url, info) for info in list_checkpoints(store)]
    infos = [info for info, _ in checked]
    if not infos:
        raise NotCommittedError(f"{store}: no checkpoint here")
    ages = {}
    if policy.is_incomplete:
        ages = {info.step: age_of_step_s(store, info.step, now_s) for info in infos if info.state == "partial"}
    gone = {info.step for info in prune(infos, policy, ages_s=ages)}
    kept = referred(checkpoint for info, checkpoint in checked if checkpoint is not None and info.step not in gone)
    garbage = [step_garbage(store, info, kept) for info in infos if info.step in gone]
    if policy.is_incomplete:
        for info in infos:
            if info.state == "committed" and info.step not in gone:
                garbage += attempt_garbage(store, info, kept, older_than_s=policy.older_than_s, now_s=now_s)
    return [item for item in garbage if item.entries]


def _text(garbage: Sequence[Garbage], size_bytes: int, *, is_deleted: bool) -> str:
    if not garbage:
        return "nothing to delete"
    rows = [[item.what, len(item.entries), format_size(item.size_bytes)] for item in garbage]
    table = format_table(
        ["deleted" if is_deleted else "would delete", "objects", "size"], rows, right=["objects", "size"]
    )
    end = f"{format_size(size_bytes)} freed" if is_deleted else f"{format_size(size_bytes)}; add --yes to delete"
    return f"{table}\n{end}"


PRUNE = Command(configure=configure, run=run)
