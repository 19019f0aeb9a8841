"""`titan-ckpt reshard`: rewrite a checkpoint for another mesh. No torch without --dtype."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import Any

from titan_ckpt.arguments import check_number, text_of_file
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.console.command import Command, Parser
from titan_ckpt.console.cut_picture import CutBoxes, draw_cut
from titan_ckpt.console.escapes import escape_line
from titan_ckpt.console.output import format_table, write_coloured, write_json, write_text
from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.console.units import format_duration, format_size, parse_size
from titan_ckpt.errors import ConfigError, UsageError
from titan_ckpt.location import parse_location
from titan_ckpt.resharding.estimate import Link, ReshardEstimate, estimate_reshard
from titan_ckpt.resharding.placement_rules import PlacementRule, read_rules
from titan_ckpt.resharding.reshard import ReshardPlan, ReshardReport, Workers, check_destination, run_plan
from titan_ckpt.resharding.whole import plan_selected
from titan_ckpt.rewrite.selection import Filter
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import format_placements
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.toml_text import MAX_TEXT

EPILOG = """\
examples:
  titan-ckpt reshard s3://bucket/run@1200 s3://bucket/run-64 --mesh pp=2,dp_shard=8,tp=4
  titan-ckpt reshard run run-2 --mesh dp_shard=2 -n --show model.lm_head.weight
  torchrun --nnodes 4 --nproc-per-node 1 -m titan_ckpt reshard s3://bucket/run s3://bucket/run-64 --mesh dp_shard=64

Under torchrun the target files are split over the workers, which meet in the target store alone. A run that was stopped goes
on where it was: files that are whole are verified and kept.
"""


def configure(parser: Parser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("source", metavar="SRC", help="URL[@STEP] of the checkpoint")
    parser.add_argument("destination", metavar="DST", help="URL of a run; the checkpoint keeps its step")
    parser.add_argument("--mesh", required=True, help="target mesh, such as pp=2,dp_shard=8,tp=4")
    parser.add_argument("-n", "--dry-run", action="store_true", help="print what it would read and write, and stop")
    parser.add_argument("--json", action="store_true", help="facts as JSON on stdout")
    parser.add_argument("--show", metavar="FQN", help="draw which source chunks make which target chunks of a tensor")
    parser.add_argument("--dtype", help="cast floating-point weights (not optimizer state), such as bfloat16")
    parser.add_argument("--only", choices=["model"], help="leave out the optimizer and everything else; not resumable")
    parser.add_argument(
        "--include", metavar="GLOB", action="append", default=[], help="take only FQNs that match; repeatable"
    )
    parser.add_argument(
        "--exclude", metavar="GLOB", action="append", default=[], help="leave out FQNs that match; repeatable"
    )
    parser.add_argument(
        "--rename", metavar="OLD=NEW", action="append", default=[], help="rename FQNs by a glob; repeatable"
    )
    parser.add_argument("--placements", metavar="FILE", help="TOML table of FQN globs: how tensors are cut")
    parser.add_argument(
        "--stages-per-rank", type=int, metavar="N", help="of the target's pipeline schedule (default: the source's)"
    )
    parser.add_argument("--memory", type=parse_size, default=parse_size("512MB"), help="hard budget (default 512MB)")
    parser.add_argument("--no-check", action="store_true", help="do not verify the source's digests")
    parser.add_argument("--bandwidth", type=parse_size, default=parse_size("1GB"), help="bytes/s for the time estimate")
    parser.add_argument(
        "--latency", type=float, default=0.0, metavar="SECONDS", help="per request, for the time estimate"
    )
    for option in ("--bandwidth", "--latency"):
        parser.needs(option, "--dry-run")
    parser.excludes("--show", "--json")


def run(arguments: Namespace) -> int:
    """Plan the reshard, then show or run it."""
    check_number(arguments.latency, "--latency", at_least=0)
    check_number(arguments.bandwidth, "--bandwidth", above=0)
    if not arguments.mesh:
        raise UsageError("--mesh is empty; give axes and degrees, such as pp=2,dp_shard=8, or 1 for a single rank")
    mesh, rules = MeshSpec.parse(arguments.mesh), _rules(arguments.placements)
    location = parse_location(arguments.destination)
    if location.step is not None:
        raise UsageError(
            f"{arguments.destination}: a reshard keeps the source's step; give the URL without @{location.step}"
        )
    plan = plan_selected(
        open_checkpoint(arguments.source), mesh, _filter(arguments), dtype=arguments.dtype, rules=rules,
        stages_per_rank=arguments.stages_per_rank,
    )  # fmt: skip
    store = open_store(location.url)
    check_destination(plan, location.url, store)
    if arguments.show is not None:
        write_coloured(show(plan, arguments.show, is_coloured=sys.stdout.isatty()))
    if arguments.dry_run:
        return _dry_run(plan, store, arguments)
    workers = _workers(os.environ)
    with ProgressLine("reshard", int(plan.target.file_bytes().sum()), is_shown=workers.index == 0) as progress:
        report = run_plan(
            plan, location.url, store=store, memory_bytes=arguments.memory, is_checked=not arguments.no_check,
            on_progress=progress.add, workers=workers,
        )  # fmt: skip
    if report.checkpoint is not None:
        if arguments.json:
            write_json(_facts(plan, report))
        else:
            write_text(_done(plan, report))
    return 0


def _rules(path: str | None) -> tuple[PlacementRule, ...]:
    if path is None:
        return ()
    try:
        return read_rules(text_of_file(path, MAX_TEXT + 1), where=path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: {why}: give a TOML file with a table [placements]") from error


def _filter(arguments: Namespace) -> Filter:
    return Filter(
        only=arguments.only,
        include=tuple(arguments.include),
        exclude=tuple(arguments.exclude),
        rename=tuple(arguments.rename),
    )


def _workers(environment: os._Environ[str]) -> Workers:
    """This process's place under torchrun, alone otherwise."""
    return Workers(count=int(environment.get("WORLD_SIZE", "1")), index=int(environment.get("RANK", "0")))


def _dry_run(plan: ReshardPlan, store: Store, arguments: Namespace) -> int:
    link = Link(bytes_per_s=arguments.bandwidth, latency_s=arguments.latency)
    facts = estimate_reshard(plan, store, memory_bytes=arguments.memory, is_checked=not arguments.no_check, link=link)
    if arguments.json:
        write_json(facts.to_dict())
    else:
        write_text(estimate_text(facts))
    return 0


def estimate_text(facts: ReshardEstimate) -> str:
    """An estimate as text."""
    share = facts.walked_bytes / max(facts.needed_bytes, 1)
    scaled = "" if share >= 1 else f" (scaled from {share:.1%} of the bytes)"
    rows = [
        ("source", f"{facts.source}, mesh {facts.source_mesh or 'not recorded'}, {facts.num_source_files} files"),
        ("target", f"mesh {facts.mesh}, {facts.num_files} files of {_range(facts)}"),
        ("tensors", f"{facts.num_tensors}, cut " + ", ".join(f"{n} as {o}" for o, n in facts.placements.items() if n)),
        ("read", f"{format_size(facts.read_bytes)} in {facts.read_requests} requests{scaled}"),
        ("write", format_size(facts.written_bytes)),
        ("memory", f"at most {format_size(facts.peak_memory_bytes)} of buffers"),
        ("time", f"about {format_duration(facts.seconds)} at the stated bandwidth and latency"),
    ]
    rows += [("largest read", f"{format_size(r.length)} at {r.start} of {r.object}") for r in facts.largest_reads[:1]]
    if facts.guessed:
        rows.append(("by table", f"tensor-parallel cuts the source did not have, such as {facts.guessed[0]}"))
    return format_table([], rows) + "\n"


def _range(facts: ReshardEstimate) -> str:
    return f"{format_size(facts.smallest_file_bytes)} to {format_size(facts.largest_file_bytes)}"


def show(plan: ReshardPlan, fqn: str, *, is_coloured: bool) -> str:
    """The source's and the target's cut of a tensor, one under the other, coloured by source chunk."""
    tensor = next((t for t in plan.target.tensors if t.fqn == fqn), None)
    if tensor is None:
        raise UsageError(f"--show {fqn}: no such tensor among the {len(plan.target.tensors)} that are taken")
    before = plan.source.tensors[fqn]
    source = CutBoxes(
        offsets=before.box_offsets,
        sizes=before.box_sizes,
        holders=[_rank_of(plan.source.objects[number]) for number in before.object.tolist()],
    )
    rows = range(tensor.first_chunk, tensor.first_chunk + tensor.num_chunks)
    offsets, sizes = plan.target.boxes(fqn)
    target = CutBoxes(offsets=offsets, sizes=sizes, holders=[str(plan.target.rank[row]) for row in rows])
    recorded = plan.checkpoint.manifest.mesh
    return "\n".join(
        [
            f"{escape_line(fqn)} {tensor.dtype} {list(tensor.global_shape)}",
            f"source {'' if recorded is None else recorded}: {before.num_chunks} chunks, by rank",
            draw_cut(tensor.global_shape, source, source=source, is_coloured=is_coloured),
            f"target {plan.target.mesh}, cut {format_placements(tensor.placements or {})}: {tensor.num_chunks} chunks, by rank",
            draw_cut(tensor.global_shape, target, source=source, is_coloured=is_coloured),
            "",
        ]
    )


def _rank_of(path: str) -> str:
    """The rank in a data file's name (`__3_0.distcp`), else the name."""
    name = path.rpartition("/")[2]
    parts = name.removeprefix("__").split("_")
    return parts[0] if name.startswith("__") and parts[0].isdigit() else escape_line(name)


def _facts(plan: ReshardPlan, report: ReshardReport) -> dict[str, Any]:
    traffic = report.traffic
    return {
        "checkpoint": str(report.checkpoint),
        "mesh": str(plan.target.mesh),
        "files": report.num_files,
        "kept_files": report.kept_files,
        "read_bytes": traffic.read_bytes,
        "read_requests": traffic.read_requests,
        "written_bytes": traffic.written_bytes,
        "seconds": round(report.wall_s, 3),
        "overflowed": list(report.overflowed),
    }


def _done(plan: ReshardPlan, report: ReshardReport) -> str:
    traffic = report.traffic
    kept = f", {report.kept_files} kept from an earlier run" if report.kept_files else ""
    rate = format_size(traffic.written_bytes / max(report.wall_s, 1e-9))
    return (
        f"{report.checkpoint}: mesh {plan.target.mesh}, {report.num_files} files written{kept}, "
        f"{format_size(traffic.read_bytes)} read, {format_size(traffic.written_bytes)} written in "
        f"{format_duration(report.wall_s)} ({rate}/s)\n"
    )


RESHARD = Command(configure=configure, run=run)
