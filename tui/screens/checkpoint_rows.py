"""Rows of the checkpoints screen: runs, steps by tier, tensors and their cut, answers to v, d, r and p, interrupted saves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan_ckpt.check.diff import Difference, compare
from titan_ckpt.check.verify import Report, examine
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.kinds import CheckpointState
from titan_ckpt.console.cut_picture import CutBoxes, draw_cut
from titan_ckpt.console.ranks import ranks_text
from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.debug.incident.kinds import RankState, Subtype
from titan_ckpt.errors import ConfigError
from titan_ckpt.format.manifest import TensorEntry
from titan_ckpt.location import local_path, redact, scheme
from titan_ckpt.resharding.estimate import estimate_reshard
from titan_ckpt.resharding.reshard import DEFAULT_MEMORY, plan_reshard
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import format_placements
from titan_ckpt.tui.data.incident import SITUATIONS, Incident, frame_text
from titan_ckpt.tui.data.runs import UNUSABLE, RunStep, RunSteps, StepCopy, StepState
from titan_ckpt.tui.data.standing import SAVE_PHASES
from titan_ckpt.tui.pictures.run_list import since
from titan_ckpt.tui.pictures.saves import size_text
from titan_ckpt.tui.rows import CULPRIT, Role, Row, RowLink, counted, head, ranks_named, row, wrapped
from titan_ckpt.upkeep.deletion import check_whole, read_pins
from titan_ckpt.upkeep.pruning import prune
from titan_ckpt.upkeep.retention import RetentionPolicy

ROLES: Mapping[StepState, Role] = {
    StepState.COMMITTED: Role.GOOD,
    StepState.FOREIGN: Role.GOOD,
    StepState.PARTIAL: Role.WARN,
    StepState.DAMAGED: Role.BAD,
    StepState.NEWER: Role.BAD,
    StepState.UNREADABLE: Role.BAD,
}
_TENSOR_HEAD = ("shape", "dtype", "chunks", "cut")
_MARGIN = f"{'':12}"


def step_rows(found: RunSteps, pinned: int | None, now_s: float, width: int) -> Iterator[Row]:
    """A line per step, newest first, with its tiers; below it, why a copy is not complete."""
    has_tiers = len(found.tiers) > 1
    tier = f"{'tier':<8}" if has_tiers else ""
    yield head(f"{'step':>10}  {'state':<10} {tier}{'kind':<8} {'size':>9}  {'age':>12}  mesh")
    for step in found.steps:
        yield from _step_rows(step, has_tiers, step.step == pinned, now_s, width)
    if not found.steps:
        yield row("no checkpoints yet")
    if has_tiers:
        yield row()
        yield from _tier_rows(found, width)


def _step_rows(step: RunStep, has_tiers: bool, is_pinned: bool, now_s: float, width: int) -> Iterator[Row]:
    best, link = step.best, RowLink(screen=7, step=step.step)
    commit = best.info.commit if best.info is not None else None
    tier = f"{step.tiers:<8}" if has_tiers else ""
    kind = commit.kind if commit is not None else best.state if best.info is None else ""
    facts = f"{tier}{kind:<8} {size_text(best):>9}  {since(best.written_s, now_s):>12}"
    facts += f"  {commit.mesh or '1'}" if commit is not None else ""
    is_problem = any(copy.state in UNUSABLE for copy in step.copies)
    mark = CULPRIT if step.best.state in UNUSABLE else "*" if is_pinned else " "
    role = Role.BAD if mark == CULPRIT else Role.PLAIN
    yield row((mark, role), f"{step.step:>9}  ", (f"{best.state:<10} ", ROLES[best.state]), facts, link=link,
              is_problem=is_problem)  # fmt: skip
    for copy in step.copies:
        for line in wrapped(problem, width - 12, "  ") if (problem := _problem(copy, has_tiers)) else ():
            yield row(_MARGIN, (line, Role.DIM), link=link)


def _problem(copy: StepCopy, has_tiers: bool) -> str:
    """Problem of a copy, without the run's URL before each path."""
    text = copy.problem.replace(f"{copy.store}/", "")
    return f"{copy.tier}: {text}" if has_tiers and text else text


def _tier_rows(found: RunSteps, width: int) -> Iterator[Row]:
    for tier in found.tiers:
        newest = found.newest(tier.name)
        state = f"up to step {newest}" if newest is not None else "nothing committed"
        text = tier.problem or f"{display_url(tier.url)}, {state}"
        for i, line in enumerate(wrapped(f"{tier.name + ':':<8}{text}", width - 2, f"{'':8}")):
            role = Role.BAD if tier.problem else Role.DIM
            yield row("  ", (line, role), is_problem=bool(tier.problem) and i == 0)


def error_rows(error: str, width: int) -> list[Row]:
    """The full text of an error."""
    return [row((line, Role.BAD), is_problem=i == 0) for i, line in enumerate(wrapped(error, width))]


def tensor_rows(checkpoint: Checkpoint) -> Iterator[Row]:
    """A line per tensor; enter draws its cut. Columns are as narrow as possible, since names are long."""
    tensors = checkpoint.manifest.tensors
    cells = [
        ("x".join(map(str, tensor.global_shape)) or "scalar", tensor.dtype, str(tensor.num_chunks), _cut_text(tensor))
        for tensor in tensors
    ]
    shape, dtype, chunks, cut = (max(len(row[i]) for row in [_TENSOR_HEAD, *cells]) for i in range(4))
    yield head(f"{'shape':<{shape}}  {'dtype':<{dtype}}  {'chunks':>{chunks}}  {'cut':<{cut}}  name")
    for tensor, (a, b, c, d) in zip(tensors, cells, strict=True):
        yield row(f"{a:<{shape}}  {b:<{dtype}}  {c:>{chunks}}  {d:<{cut}}  {tensor.fqn}",
                  link=RowLink(screen=7, step=checkpoint.step, name=tensor.fqn))  # fmt: skip


def _cut_text(tensor: TensorEntry) -> str:
    return "unknown" if tensor.placements is None else format_placements(tensor.placements)


def cut_rows(checkpoint: Checkpoint, fqn: str) -> Iterator[Row]:
    """Draw how a tensor is cut: each cell shows the rank that wrote it."""
    tensor: TensorEntry = checkpoint.manifest.by_fqn[fqn]
    offsets, sizes = checkpoint.manifest.boxes(tensor)
    holders = [chunk.file.rpartition("__")[2].partition("_")[0] for chunk in checkpoint.manifest.chunks_of(tensor)]
    yield head(fqn)
    yield row((f"{tensor.global_shape} {tensor.dtype}; each cell shows the rank that wrote it", Role.DIM))
    pieces = CutBoxes(offsets=np.asarray(offsets), sizes=np.asarray(sizes), holders=holders)
    for line in draw_cut(tensor.global_shape, pieces, is_coloured=False).splitlines():
        yield row("  " + line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a reading of every byte of a copy found."""

    copy: StepCopy
    report: Report
    took_s: float

    @property
    def damage(self) -> str:
        """What the list says of the copy; "" if nothing is wrong."""
        problems = self.report.problems
        more = f" (and {len(problems) - 1:,} more; `v` lists them)" if len(problems) > 1 else ""
        return f"{problems[0]}{more}" if problems else ""


def verified(copy: StepCopy, on_bytes: Callable[[int], None]) -> Verified:
    """Read and verify every byte of a copy."""
    started = time.monotonic()
    report = examine(f"{copy.store.url}@{copy.step}", read_data=True, on_bytes=on_bytes)
    return Verified(copy=copy, report=report, took_s=time.monotonic() - started)


def verify_rows(found: Sequence[Verified], width: int) -> Iterator[Row]:
    """The problems of each copy, or that it is intact."""
    for each in found:
        copy, report, problems = each.copy, each.report, each.report.problems
        where = f" in the {copy.tier} tier" if copy.tier else ""
        yield head(f"step {copy.step}{where}: {counted(len(problems), 'problem')} ({format_duration(each.took_s)})")
        for problem in problems:
            for i, line in enumerate(wrapped(str(problem), width, "  ")):
                yield row((line, Role.BAD), is_problem=i == 0)
        unchecked = [file.path for file in report.files if file.checked_by is None]
        if report.is_ok:
            yield row(("all bytes match what was saved", Role.GOOD))
        elif not problems:
            yield row((f"no damage found, but no digest covers {', '.join(unchecked)}", Role.DIM))


def tensor_diff_rows(a: Checkpoint, b: Checkpoint, on_bytes: Callable[[int], None]) -> Iterator[Row]:
    """Differences of two steps in names, shapes, dtypes and values."""
    found = compare(a, b, values=True, on_bytes=on_bytes)
    counts = f"{counted(len(found.differences), 'difference')}, {counted(len(found.equal), 'tensor')} equal"
    yield head(f"step {a.step} and step {b.step}: {counts}")
    for difference in found.differences:
        yield row(f"{difference.kind:<10} {difference.fqn}  ", (_change(difference), Role.DIM))


def _change(difference: Difference) -> str:
    if difference.max_abs is None:
        return f"{difference.a} -> {difference.b}" if difference.a or difference.b else ""
    return f"{difference.num_different or 0:,} elements, at most {difference.max_abs:.3g} apart"


def _fact_rows(name: str, text: str, width: int) -> Iterator[Row]:
    return (row(line) for line in wrapped(f"  {name:<10}{text}", width, " " * 12))


def reshard_rows(checkpoint: Checkpoint, mesh: str, width: int) -> Iterator[Row]:
    """Plan of `titan-ckpt reshard`, from the index alone."""
    plan = plan_reshard(checkpoint, MeshSpec.parse(mesh))
    facts = estimate_reshard(plan, checkpoint.store, memory_bytes=DEFAULT_MEMORY)
    smallest, largest = format_size(facts.smallest_file_bytes), format_size(facts.largest_file_bytes)
    cuts = ", ".join(f"{count:,} as {origin}" for origin, count in facts.placements.items() if count)
    yield head(f"step {checkpoint.step}: mesh {facts.source_mesh or 'not recorded'} -> {facts.mesh}")
    reads = f"{counted(facts.read_requests, 'request')}; the source has {counted(facts.num_source_files, 'file')}"
    writes = f"{counted(facts.num_files, 'file')} of {smallest} to {largest}"
    memory = f"at most {format_size(facts.peak_memory_bytes)} of buffers, in {counted(facts.num_groups, 'wave')}"
    yield from _fact_rows("read", f"{format_size(facts.read_bytes)} in {reads}", width)
    yield from _fact_rows("write", f"{format_size(facts.written_bytes)} in {writes}", width)
    yield from _fact_rows("tensors", f"{facts.num_tensors:,}, cut {cuts or 'nowhere'}", width)
    yield from _fact_rows("memory", memory, width)
    for read in facts.largest_reads[:3]:
        yield from _fact_rows("largest", f"{format_size(read.length)} at {read.start:,} of {read.object}", width)
    if facts.guessed:
        yield row(
            ("  ! ", Role.WARN), f"cut not recorded, taken from the table of known models: {', '.join(facts.guessed)}"
        )
    where = f"{display_url(checkpoint.store.url)}@{checkpoint.step}"
    yield from _command_rows(f"titan-ckpt reshard {where} DESTINATION --mesh {mesh}", width)


def parse_keep(text: str) -> RetentionPolicy:
    """Parse `KEEP_LAST [KEEP_EVERY]`.

    >>> parse_keep("3"), parse_keep("3 1000").keep_every
    (RetentionPolicy(keep_last=3, keep_every=None, pins=frozenset(), is_incomplete=False, older_than_s=86400.0), 1000)
    """
    words = text.split()
    if not 1 <= len(words) <= 2 or not all(word.isdigit() for word in words):
        raise ConfigError(f"{text!r} is not one or two numbers; write 3, or 3 1000 to keep every 1,000th step too")
    return RetentionPolicy(keep_last=int(words[0]), keep_every=int(words[1]) if len(words) > 1 else None)


def prune_rows(found: RunSteps, policy: RetentionPolicy, width: int) -> Iterator[Row]:
    """What `titan-ckpt prune --keep-last N --keep-every M` would delete, by tier, as that command itself plans it."""
    every = f" --keep-every {policy.keep_every}" if policy.keep_every else ""
    for tier in (tier for tier in found.tiers if not tier.problem):
        copies = [copy for s in found.steps for copy in s.copies if copy.tier == tier.name and copy.info is not None]
        report = prune(tier.url, policy)
        where, size = f"{tier.name}: " if tier.name else "", format_size(report.size_bytes)
        yield head(
            f"{where}{len(report.steps):,} of {counted(len(copies), 'step')} would be deleted, {size} (preview only)"
        )
        yield from (row(f"  {item.what}  ", (format_size(item.size_bytes), Role.DIM)) for item in report.garbage)
        yield from (row((line, Role.DIM)) for text in report.kept for line in wrapped(f"  {text}", width, "    "))
        if copies and (pins := read_pins(copies[0].store)):
            yield row((f"  pinned, kept: {ranks_text(sorted(pins))}", Role.DIM))
        bad = sorted(copy.step for copy in copies if copy.step not in report.steps and _counts_as_whole(copy))
        if bad:
            yield row((f"  ! kept and counted as whole, but damaged: {ranks_text(bad)}", Role.BAD), is_problem=True)
        command = f"titan-ckpt prune {display_url(tier.url)} --keep-last {policy.keep_last}{every}"
        yield from _command_rows(command, width)


def _counts_as_whole(copy: StepCopy) -> bool:
    """Whether a copy is damaged in what only a reading of all bytes shows."""
    if not copy.damage or copy.info is None:
        return False
    return check_whole(copy.store, copy.store.url, copy.info).state == CheckpointState.COMMITTED


def _command_rows(command: str, width: int) -> Iterator[Row]:
    """The command that carries out the plan."""
    yield row()
    yield from (row((line, Role.NOTE)) for line in wrapped(command, width, "  "))


def display_url(url: str) -> str:
    """A URL without secrets; a path below the current folder is relative."""
    if scheme(url) != "file":
        return redact(url)
    path = os.path.relpath(local_path(url))
    return local_path(url) if path.startswith("..") else path


def saving_rows(incident: Incident, width: int = 76) -> Iterator[Row]:
    """Save phase of each rank when the job stopped, from heartbeats and verdicts; empty if no save was running."""
    beats = {rank: record.heartbeat for rank, record in incident.run.ranks.items() if record.heartbeat is not None}
    saving: dict[tuple[str, int], list[int]] = {}
    for rank, beat in beats.items():
        if beat.phase in SAVE_PHASES:
            saving.setdefault((beat.phase, beat.step), []).append(rank)
    io = [verdict for verdict in incident.verdicts if verdict.subtype == Subtype.CHECKPOINT_IO]
    if not saving and not io:
        return
    yield head(f"save in progress at the stop ({incident.run.incident or 'this incident'})")
    for (phase, step), ranks in sorted(saving.items(), key=lambda item: (item[0][1], SAVE_PHASES.index(item[0][0]))):
        newest = max(beats[rank].phase_ns for rank in ranks)
        since = max((beats[rank].alive_ns - newest) / 1e9 for rank in ranks)
        for_s = f", for {format_duration(since)}" if since > 0 else ""
        yield row((f"  {phase:<12} ", Role.WARN), f"step {step}: {ranks_named(ranks)}{for_s}",
                  link=RowLink(screen=6, rank=ranks[0]), is_problem=phase != "ckpt_stage")  # fmt: skip
    outside = sorted(set(beats) - {rank for ranks in saving.values() for rank in ranks})
    if saving and outside:
        yield row(("  elsewhere    ", Role.DIM), ranks_named(outside))
    for verdict in io:
        for line in wrapped(f"  {CULPRIT} {verdict.headline}", width, "    "):
            yield row((line, Role.BAD), link=RowLink(screen=6, rank=verdict.culprits[0]), is_problem=True)
    if not saving:
        yield from _place_rows(incident)


def _place_rows(incident: Incident) -> Iterator[Row]:
    """Location of each rank, for incidents without heartbeats; ranks at the same line share a row."""
    places: dict[tuple[RankState, str], list[int]] = {}
    for rank, state in sorted(incident.states.items()):
        place = frame_text(state.frame) if state.frame is not None else "no stack"
        places.setdefault((state.kind, place), []).append(rank)
    for (kind, place), ranks in places.items():
        glyph = SITUATIONS[kind]
        doing = incident.doing(ranks[0])
        doing = doing.replace("was ", "were ", 1) if len(ranks) > 1 else doing
        text = f"{ranks_named(ranks, 4)}: {doing}, {place}"
        mark = CULPRIT if incident.top.culprits and set(ranks) <= set(incident.top.culprits) else " "
        yield row(
            (f" {mark}{glyph.char} ", Role.BAD if mark == CULPRIT else glyph.role),
            text,
            link=RowLink(screen=6, rank=ranks[0]),
        )
