"""A run's saves: how often, how large, how long they stalled training, which are damaged; and what is in one of them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.tui.data.metrics import Metrics
from titan_ckpt.tui.data.runs import UNUSABLE, RunSteps, StepCopy, StepState
from titan_ckpt.tui.pictures.details import fact
from titan_ckpt.tui.rows import CULPRIT, Role, Row, RowLink, counted, head, row, truncate

_MOST_SAVES, _LARGEST = 12, 6
_WITH_SIZES = 62  # narrower, the sizes are in the list alone
_BAR = "━"


def value_at(metrics: Metrics | None, name: str, step: int) -> float | None:
    """The value of a metric at a step."""
    if metrics is None or name not in metrics.columns:
        return None
    places = np.flatnonzero(metrics.steps == step)
    value = float(metrics.columns[name][places[0]]) if len(places) else float("nan")
    return value if np.isfinite(value) else None


def size_text(copy: StepCopy) -> str:
    """The size of a checkpoint, of one that is not committed of what there is of it; "" if that is not known."""
    return "" if copy.size_bytes is None else format_size(copy.size_bytes)


def save_rows(found: RunSteps, metrics: Metrics | None, width: int) -> Iterator[Row]:
    """A line per save, the newest first: the time since the save before as a bar, its size, its stall."""
    shown = found.steps[:_MOST_SAVES]
    gaps = _gaps(found)
    longest = max((gap for gap in gaps.values() if gap), default=0.0)
    has_size = width >= _WITH_SIZES
    room = max(width - (57 if has_size else 46), 4)
    sizes = f"{'size':>9}  " if has_size else ""
    yield head(f"{'step':>9}  {'since the last':<{room + 10}}  {sizes}{'stall':>8}  {'upload':>8}")
    for step in shown:
        link, gap = RowLink(screen=7, step=step.step), gaps.get(step.step)
        is_bad = any(copy.state in UNUSABLE for copy in step.copies)
        mark = CULPRIT if is_bad else " "
        bar = _BAR * max(round(gap / longest * room), 1) if gap and longest else ""
        stall = value_at(metrics, "save_stall_s", step.step)
        upload = metrics.uploads.get(step.step) if metrics is not None else None
        state = "" if step.best.state in (StepState.COMMITTED, StepState.FOREIGN) else str(step.best.state)
        size = f"{size_text(step.best):>9}  " if has_size else ""
        since, took = state or _since(gap), _seconds(stall)
        role = Role.BAD if is_bad else Role.DIM
        yield row((f"{mark}{step.step:>8}  ", Role.BAD if is_bad else Role.PLAIN), (f"{bar:<{room}} ", Role.GOOD),
                  (f"{since:<9}", role), f"  {size}{took:>8}  {_at_most(upload):>8}", link=link, is_problem=is_bad)  # fmt: skip
    if len(found.steps) > len(shown):
        yield row((f"  and {len(found.steps) - len(shown):,} older", Role.DIM))


def _seconds(value: float | None) -> str:
    return "" if value is None else format_duration(value)


def _at_most(value: float | None) -> str:
    """The seconds of an upload: the record of a later step tells of its end, which was before that."""
    return "" if value is None else f"<{format_duration(value)}"


def _since(gap_s: float | None) -> str:
    """The time since the save before; times of files may be known to the second alone."""
    return "" if gap_s is None else format_duration(gap_s) if gap_s else "under 1 s"


def _gaps(found: RunSteps) -> dict[int, float]:
    """Seconds from the save before to each save."""
    whole = ((step.step, step.best) for step in found.steps if not step.best.is_unfinished)
    times = sorted((step, copy.written_s) for step, copy in whole if copy.written_s is not None)
    return {step: made - before for (_, before), (step, made) in itertools.pairwise(times)}


def checkpoint_rows(opened: Checkpoint, metrics: Metrics | None, width: int) -> Iterator[Row]:
    """What is in a checkpoint: mesh, sizes, dtypes, versions, its save, its largest tensors."""
    manifest = opened.manifest
    yield row(
        (f"step {opened.step}", Role.BOLD), (f"  {manifest.kind}", Role.DIM), link=RowLink(screen=7, step=opened.step)
    )
    yield from fact("created", manifest.created, width)
    yield from fact("mesh", str(manifest.mesh or "not recorded"), width)
    stored = f"{format_size(sum(file.size_bytes for file in manifest.files))} in {counted(len(manifest.files), 'file')}"
    yield from fact("size", f"{format_size(manifest.size_bytes)} of tensors, {stored}", width)
    yield from fact("tensors", f"{len(manifest.tensors):,}, other values {len(manifest.objects):,}", width)
    yield from fact("dtypes", _dtypes(opened), width)
    yield from fact("codecs", ", ".join(sorted(set(manifest.codecs))), width)
    yield from fact("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()), width)
    stall = value_at(metrics, "save_stall_s", opened.step)
    if stall is not None:
        yield from fact("stall", format_duration(stall), width)
    yield from fact("upload", _at_most(metrics.uploads.get(opened.step) if metrics is not None else None), width)
    yield row()
    yield head("largest tensors")
    ordered = sorted(manifest.tensors, key=lambda tensor: -int(np.prod(tensor.global_shape, dtype=np.int64)))[:_LARGEST]
    largest = [("x".join(map(str, t.global_shape)) or "scalar", str(t.dtype), t.fqn) for t in ordered]
    shapes, dtypes = (max((len(cells[i]) for cells in largest), default=0) for i in (0, 1))
    for shape, dtype, fqn in largest:
        yield row(truncate(f"  {shape:<{shapes}}  {dtype:<{dtypes}}  {fqn}", width))


def _dtypes(opened: Checkpoint) -> str:
    counts: dict[str, int] = {}
    for tensor in opened.manifest.tensors:
        counts[str(tensor.dtype)] = counts.get(str(tensor.dtype), 0) + 1
    return ", ".join(f"{dtype} ({count:,})" for dtype, count in sorted(counts.items(), key=lambda item: -item[1]))
