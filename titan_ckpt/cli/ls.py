"""`titan-ckpt ls` and `inspect`: what a run and a checkpoint hold. No torch."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from titan_ckpt.checkpoint.checkpoint import (
    FOREIGN,
    HUGGING_FACE,
    Checkpoint,
    CheckpointInfo,
    foreign_steps,
    list_checkpoints,
    open_checkpoint,
)
from titan_ckpt.console.command import Command, add_json_flag, run_location
from titan_ckpt.console.output import age_s, format_table, write_json, write_text
from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.errors import NotCommittedError, UsageError
from titan_ckpt.format.manifest import TensorEntry
from titan_ckpt.format.names import METADATA, step_folder
from titan_ckpt.location import Location
from titan_ckpt.sharding.placement import format_placements
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.upkeep.deletion import check_whole


def _configure_ls(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="URL of a run")
    parser.add_argument(
        "--check", action="store_true", help="open each one: manifest whole, every file there in its size"
    )
    add_json_flag(parser)


def _ls(arguments: Namespace) -> int:
    location = run_location(arguments.url)
    store, now_s = open_store(location.url), time.time()
    infos = list_checkpoints(store)
    if arguments.check:
        infos = [check_whole(store, location.url, info)[0] for info in infos]
    rows = [_ls_row(store, info, now_s) for info in infos]
    rows = [row for row in rows if row["size_bytes"] or row["state"] != "partial"] or _rows_of_others(
        store, location, now_s
    )
    if not rows:
        raise NotCommittedError(f"{store}: no checkpoint here; check the URL, or train with save.url={location}")
    if arguments.json:
        write_json(rows)
    else:
        write_text(_ls_table(rows))
    return 1 if any(row["state"] == "damaged" for row in rows) else 0


def _ls_row(store: Store, info: CheckpointInfo, now_s: float) -> dict[str, Any]:
    commit = info.commit
    if commit is not None:
        size, age = commit.size_bytes, age_s(commit.created, now_s)
    else:
        entries = list(store.list(step_folder(info.step)))
        size = sum(entry.size_bytes for entry in entries)
        age = now_s - max((entry.modified_s for entry in entries), default=now_s)
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


def _rows_of_others(store: Store, location: Location, now_s: float) -> list[dict[str, Any]]:
    """What others wrote: a DCP checkpoint or a Hugging Face model right at the URL, or a run of torchtitan's."""
    nothing = {"kind": None, "mesh": None, "age_s": None, "created": None, "attempt": None, "problem": ""}
    if store.exists(METADATA) or store.exists(HUGGING_FACE) or store.folders("snapshots"):
        checkpoint = open_checkpoint(location.url, store=store)
        manifest = checkpoint.manifest
        facts: dict[str, Any] = {"state": "foreign"}
        if manifest.kind != FOREIGN:
            facts = {"state": "hugging face", "family": manifest.config["model"]["family"]}
        size = sum(file.size_bytes for file in manifest.files)
        return [nothing | {"step": checkpoint.step, "kind": manifest.kind, "size_bytes": size} | facts]
    rows = []
    for step, folder in foreign_steps(store):
        entries = list(store.list(folder))
        age = now_s - max(entry.modified_s for entry in entries)
        facts = {"state": "foreign", "kind": FOREIGN, "age_s": round(age, 1)}
        rows.append(nothing | {"step": step, "size_bytes": sum(entry.size_bytes for entry in entries)} | facts)
    return rows


def _ls_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        [
            row["step"],
            row["state"],
            f"{row['family']} model" if "family" in row else row["kind"] or "-",
            row["mesh"] or "-",
            format_size(row["size_bytes"]),
            "-" if row["age_s"] is None else format_duration(max(row["age_s"], 0)),
        ]
        for row in rows
    ]
    table = format_table(["step", "state", "kind", "mesh", "size", "age"], cells, right=["step", "size", "age"])
    problems = [f"step {row['step']}: {row['problem']}" for row in rows if row["state"] == "damaged"]
    return "\n".join([table, *problems])


# inspect


def _configure_inspect(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL[@STEP]", help="a checkpoint; without a step the newest resumable one")
    parser.add_argument("glob", nargs="?", default="*", help="show only tensors and values whose name matches")
    parser.add_argument("--files", action="store_true", help="list the data files too")
    add_json_flag(parser)


def _inspect(arguments: Namespace) -> int:
    checkpoint = open_checkpoint(arguments.url)
    tensors = [t for t in checkpoint.manifest.tensors if fnmatchcase(t.fqn, arguments.glob)]
    objects = [o.fqn for o in checkpoint.manifest.objects if fnmatchcase(o.fqn, arguments.glob)]
    if arguments.glob != "*" and not tensors and not objects:
        raise UsageError(f"{checkpoint}: no tensor or value matches {arguments.glob!r}")
    if arguments.json:
        write_json(_inspect_facts(checkpoint, tensors, objects))
    else:
        write_text(_inspect_text(checkpoint, tensors, objects, is_with_files=arguments.files))
    return 0


def _inspect_facts(checkpoint: Checkpoint, tensors: Sequence[TensorEntry], objects: Sequence[str]) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "url": str(checkpoint),
        "step": manifest.step,
        "kind": manifest.kind,
        "attempt": manifest.attempt,
        "created": manifest.created,
        "versions": dict(manifest.versions),
        "mesh": None if manifest.mesh is None else dict(manifest.mesh.items()),
        "world_size": None if manifest.mesh is None else manifest.mesh.world_size,
        "training": dict(manifest.training),
        "user": dict(manifest.user),
        "assets": sorted(manifest.assets),
        "tensors": [_tensor_facts(checkpoint, tensor) for tensor in tensors],
        "objects": list(objects),
        "files": [
            {"path": f.path, "size_bytes": f.size_bytes, "xxh3_128": f.digest.hex() if f.digest else None}
            for f in manifest.files
        ],
    }


def _tensor_facts(checkpoint: Checkpoint, tensor: TensorEntry) -> dict[str, Any]:
    rows = checkpoint.manifest.chunks.file[tensor.first_chunk : tensor.first_chunk + tensor.num_chunks]
    return {
        "fqn": tensor.fqn,
        "dtype": tensor.dtype,
        "global_shape": list(tensor.global_shape),
        "placements": None if tensor.placements is None else {a: s.dim for a, s in tensor.placements.items()},
        "stages": None if tensor.stages is None else list(tensor.stages),
        "size_bytes": tensor.size_bytes,
        "num_chunks": tensor.num_chunks,
        "files": [checkpoint.manifest.files[n].path for n in sorted(set(rows.tolist()))],
    }


def _inspect_text(
    checkpoint: Checkpoint, tensors: Sequence[TensorEntry], objects: Sequence[str], *, is_with_files: bool
) -> str:
    manifest = checkpoint.manifest
    dtypes = Counter(tensor.dtype for tensor in manifest.tensors)
    mesh = "not recorded" if manifest.mesh is None else f"{manifest.mesh} ({manifest.mesh.world_size} ranks)"
    facts = [
        ("checkpoint", str(checkpoint)),
        ("kind", manifest.kind),
        ("created", manifest.created or "not recorded"),
        ("mesh", mesh),
        (
            "tensors",
            f"{len(manifest.tensors)}, {format_size(manifest.size_bytes)} ({', '.join(f'{n} {d}' for d, n in dtypes.items())})",
        ),
        ("values", str(len(manifest.objects))),
        ("files", f"{len(manifest.files)}, {format_size(sum(f.size_bytes for f in manifest.files))}"),
        *((f"training.{key}", str(value)) for key, value in manifest.training.items()),
        *((key, value) for key, value in manifest.versions.items()),
    ]
    lines = [format_table([], facts), "", _tensor_table(tensors)]
    if objects:
        lines += ["", "values: " + ", ".join(objects)]
    if is_with_files:
        rows = [[f.path, format_size(f.size_bytes), f.digest.hex() if f.digest else "-"] for f in manifest.files]
        lines += ["", format_table(["file", "size", "xxh3-128"], rows, right=["size"])]
    return "\n".join(lines)


def _tensor_table(tensors: Sequence[TensorEntry]) -> str:
    rows = [
        [
            tensor.fqn,
            tensor.dtype,
            "x".join(map(str, tensor.global_shape)) or "scalar",
            "not recorded" if tensor.placements is None else format_placements(tensor.placements),
            "-" if tensor.stages is None else ",".join(map(str, tensor.stages)),
            tensor.num_chunks,
            format_size(tensor.size_bytes),
        ]
        for tensor in tensors
    ]
    headers = ["tensor", "dtype", "shape", "placements", "stages", "chunks", "size"]
    return format_table(headers, rows, right=["chunks", "size"])


LS = Command(configure=_configure_ls, run=_ls)
INSPECT = Command(configure=_configure_inspect, run=_inspect)
