"""`titan-ckpt ls`: the checkpoints of a run. No torch."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from titan_ckpt.checkpoint.kinds import CheckpointKind, CheckpointState
from titan_ckpt.checkpoint.nearby import nearby
from titan_ckpt.checkpoint.open import (
    HUGGING_FACE,
    CheckpointInfo,
    bytes_there,
    foreign_steps,
    list_checkpoints,
    open_checkpoint,
)
from titan_ckpt.console.command import Command, add_json_flag
from titan_ckpt.console.escapes import escape_line
from titan_ckpt.console.output import age_s, format_table, write_json, write_text
from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.errors import NotCommittedError
from titan_ckpt.format.names import METADATA
from titan_ckpt.location import Location, run_location
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.upkeep.deletion import check_whole

BAD = (CheckpointState.DAMAGED, CheckpointState.NEWER, CheckpointState.UNREADABLE)


EPILOG = """\
examples:
  titan-ckpt ls runs/tiny
  titan-ckpt ls s3://bucket/run --check --json
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("url", metavar="URL", help="URL of a run")
    parser.add_argument(
        "--check",
        action="store_true",
        help="open every one, not just the newest: manifest whole, each file there in its size",
    )
    add_json_flag(parser)


def run(arguments: Namespace) -> int:
    """List the run's checkpoints; 1 if one is damaged or cannot be read."""
    location = run_location(arguments.url)
    store, now_s = open_store(location.url), time.time()
    infos = list_checkpoints(store)
    newest = max((info.step for info in infos if info.state == CheckpointState.COMMITTED), default=None)
    infos = [
        check_whole(store, location.url, info) if arguments.check or info.step == newest else info for info in infos
    ]
    rows = [_row(store, info, now_s) for info in infos]
    rows = [row for row in rows if row["size_bytes"] or row["state"] != "partial"] or _foreign_rows(
        store, location, now_s
    )
    if not rows:
        hint = nearby(location.url) or f"; check the URL, or train with save.url={location}"
        raise NotCommittedError(f"{store}: no checkpoint here{hint}")
    if arguments.json:
        write_json(rows)
    else:
        write_text(_table(rows))
    return 1 if any(row["state"] in BAD for row in rows) else 0


def _row(store: Store, info: CheckpointInfo, now_s: float) -> dict[str, Any]:
    commit = info.commit
    size: int | None
    age: float | None
    if commit is None:
        size, written_s = bytes_there(store, info)
        age = None if written_s is None else now_s - written_s
    else:
        size, age = commit.size_bytes, age_s(commit.created, now_s)
    return {
        "step": info.step,
        "state": info.state,
        "kind": commit.kind if commit else None,
        "mesh": commit.mesh if commit else None,
        "size_bytes": size,
        "age_s": None if age is None else round(age, 1),
        "created": commit.created if commit else None,
        "attempt": commit.attempt if commit else None,
        "problem": info.problem,
    }


def _foreign_rows(store: Store, location: Location, now_s: float) -> list[dict[str, Any]]:
    """Checkpoints of other writers: a DCP checkpoint or a Hugging Face model at the URL itself, or a torchtitan run."""
    nothing = {"kind": None, "mesh": None, "age_s": None, "created": None, "attempt": None, "problem": ""}
    if store.exists(METADATA) or store.exists(HUGGING_FACE) or store.folders("snapshots"):
        checkpoint = open_checkpoint(location.url, store=store)
        manifest = checkpoint.manifest
        facts: dict[str, Any] = {"state": "foreign"}
        if manifest.kind != CheckpointKind.FOREIGN:
            facts = {"state": "hugging face", "family": manifest.config["model"]["family"]}
        size = sum(file.size_bytes for file in manifest.files)
        return [nothing | {"step": checkpoint.step, "kind": manifest.kind, "size_bytes": size} | facts]
    rows = []
    for step, folder in foreign_steps(store):
        entries = list(store.list(folder))
        age = now_s - max(entry.modified_s for entry in entries)
        facts = {"state": "foreign", "kind": CheckpointKind.FOREIGN, "age_s": round(age, 1)}
        rows.append(nothing | {"step": step, "size_bytes": sum(entry.size_bytes for entry in entries)} | facts)
    return rows


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        [
            row["step"],
            row["state"],
            f"{row['family']} model" if "family" in row else row["kind"] or "-",
            row["mesh"] or "-",
            "-" if row["size_bytes"] is None else format_size(row["size_bytes"]),
            "-" if row["age_s"] is None else format_duration(max(row["age_s"], 0)),
        ]
        for row in rows
    ]
    table = format_table(["step", "state", "kind", "mesh", "size", "age"], cells, right=["step", "size", "age"])
    problems = [f"step {row['step']}: {escape_line(row['problem'])}" for row in rows if row["state"] in BAD]
    return "\n".join([table, *problems])


LS = Command(configure=configure, run=run)
