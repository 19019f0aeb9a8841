"""`titan-ckpt ls`, `inspect`, `verify`, `diff`, `cp` and `prune`: thin skins over the modules of the same names. No torch."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from titan_ckpt.checkpoint import Checkpoint, CheckpointInfo, list_checkpoints, open_checkpoint
from titan_ckpt.command import Command
from titan_ckpt.diff import Comparison, Difference, compare
from titan_ckpt.errors import NotCommittedError, UsageError
from titan_ckpt.index import TensorEntry
from titan_ckpt.layout import METADATA, step_folder
from titan_ckpt.location import Location, parse_location
from titan_ckpt.mirror import copy_checkpoint
from titan_ckpt.placement import format_placements
from titan_ckpt.removal import (
    Garbage,
    age_of_step_s,
    attempt_garbage,
    check_whole,
    delete,
    read_pins,
    referred,
    step_garbage,
)
from titan_ckpt.render import Progress, age_s, format_table, write_json, write_text
from titan_ckpt.retention import DAY_S, RetentionPolicy, parse_age, prune
from titan_ckpt.scan import Problem
from titan_ckpt.store import Store, open_store
from titan_ckpt.units import format_duration, format_size
from titan_ckpt.verify import newest_committed, verify

MAX_PROBLEMS_SHOWN = 50


def _json_flag(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="facts as JSON on stdout")


# ls


def _configure_ls(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="URL of a run")
    parser.add_argument(
        "--check", action="store_true", help="open each one: manifest whole, every file there in its size"
    )
    _json_flag(parser)


def _ls(arguments: Namespace) -> int:
    location = _run_location(arguments.url)
    store, now_s = open_store(location.url), time.time()
    infos = list_checkpoints(store)
    if arguments.check:
        infos = [check_whole(store, location.url, info)[0] for info in infos]
    rows = [_ls_row(store, info, now_s) for info in infos]
    rows = [row for row in rows if row["size_bytes"] or row["state"] != "partial"] or _foreign_rows(store, location)
    if not rows:
        raise NotCommittedError(f"{store}: no checkpoint here; check the URL, or train with save.url={location}")
    if arguments.json:
        write_json(rows)
    else:
        write_text(_ls_table(rows))
    return 1 if any(row["state"] == "damaged" for row in rows) else 0


def _run_location(url: str) -> Location:
    location = parse_location(url)
    if location.step is not None:
        raise UsageError(f"{location}: give the URL of the run, without a step")
    return location


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


def _foreign_rows(store: Store, location: Location) -> list[dict[str, Any]]:
    """A DCP checkpoint that others wrote, standing right at the URL."""
    if not store.exists(METADATA):
        return []
    checkpoint = open_checkpoint(location.url, store=store)
    files = checkpoint.manifest.files
    row = {"step": checkpoint.step, "state": "foreign", "kind": checkpoint.manifest.kind, "mesh": None}
    return [
        row
        | {
            "size_bytes": sum(f.size_bytes for f in files),
            "age_s": None,
            "created": None,
            "attempt": None,
            "problem": "",
        }
    ]


def _ls_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        [
            row["step"],
            row["state"],
            row["kind"] or "-",
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
    _json_flag(parser)


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


# verify


def _configure_verify(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL[@STEP]", help="a checkpoint; without a step the newest committed one")
    parser.add_argument("--data", action="store_true", help="read every byte and check every digest")
    _json_flag(parser)


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
    _json_flag(parser)


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
    facts = {name: getattr(difference, name) for name in Difference.__slots__}
    # JSON has no infinity: null together with a count says that a NaN or an infinity stands against a number.
    for name in ("max_abs", "max_rel"):
        if facts[name] is not None and facts[name] == float("inf"):
            facts[name] = None
    return facts


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


# cp


def _configure_cp(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="URL[@STEP]; without a step the newest resumable checkpoint")
    parser.add_argument("destination", metavar="DST", help="URL of a run; the checkpoint keeps its step")
    parser.add_argument("-n", "--dry-run", action="store_true", help="say what would be copied, and stop")
    _json_flag(parser)


def _cp(arguments: Namespace) -> int:
    target_location = _run_location(arguments.destination)
    source = open_checkpoint(arguments.source)
    if target_location.url == parse_location(arguments.source).url:
        raise UsageError(f"{target_location} is the source's own run; give another URL")
    total = sum(file.size_bytes for file in source.manifest.files)
    if arguments.dry_run:
        write_text(
            f"would copy {source} to {target_location}: {len(source.manifest.files)} files, {format_size(total)}"
        )
        return 0
    started = time.monotonic()
    with Progress("cp", total) as progress:
        report = copy_checkpoint(source, open_store(target_location.url), on_bytes=progress.add)
    seconds = time.monotonic() - started
    if arguments.json:
        names = ("step", "num_files", "copied_bytes", "kept_bytes", "was_committed")
        write_json({name: getattr(report, name) for name in names} | {"seconds": round(seconds, 3)})
    else:
        kept = f", {format_size(report.kept_bytes)} there already" if report.kept_bytes else ""
        write_text(
            f"{source} -> {target_location}@{report.step}: {format_size(report.copied_bytes)} copied and verified"
            f"{kept} in {format_duration(seconds)}"
        )
    return 0


# prune


def _configure_prune(parser: ArgumentParser) -> None:
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
    parser.add_argument("--yes", action="store_true", help="delete; without it only say what would go")
    _json_flag(parser)


def _prune(arguments: Namespace) -> int:
    location = _run_location(arguments.url)
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
        write_text(_prune_text(garbage, size, is_deleted=arguments.yes))
    return 0


def plan_removal(store: Store, url: str, policy: RetentionPolicy, *, now_s: float) -> list[Garbage]:
    """What `policy` deletes from a run, after looking whether each checkpoint is whole: only a whole one counts as kept."""
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


def _prune_text(garbage: Sequence[Garbage], size_bytes: int, *, is_deleted: bool) -> str:
    if not garbage:
        return "nothing to delete"
    rows = [[item.what, len(item.entries), format_size(item.size_bytes)] for item in garbage]
    table = format_table(
        ["deleted" if is_deleted else "would delete", "objects", "size"], rows, right=["objects", "size"]
    )
    end = f"{format_size(size_bytes)} freed" if is_deleted else f"{format_size(size_bytes)}; add --yes to delete"
    return f"{table}\n{end}"


LS = Command(configure=_configure_ls, run=_ls)
INSPECT = Command(configure=_configure_inspect, run=_inspect)
VERIFY = Command(configure=_configure_verify, run=_verify)
DIFF = Command(configure=_configure_diff, run=_diff)
CP = Command(configure=_configure_cp, run=_cp)
PRUNE = Command(configure=_configure_prune, run=_prune)
