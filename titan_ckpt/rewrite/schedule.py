"""Turn a group of target files into units of bounded size: read requests, digest checks, writes. No torch, no I/O.

A tensor's regions are walked in strips of rows, so that every target gets its bytes in row-major order and every source chunk is
read front to back. A row longer than a unit is itself walked in strips, and so on down the dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from titan_ckpt.errors import PlanError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import RAW
from titan_ckpt.rewrite.plan import FileGroup, Region, RewriteSource, SourceChunk, SourceTensor, TargetFile
from titan_ckpt.rewrite.row_strips import columns, cut_strips, hull, merged_rows, pairs, with_rows
from titan_ckpt.rewrite.work_unit import (
    Action,
    BoxCopy,
    ChunkKey,
    DigestCheck,
    EndRegion,
    ReadRequest,
    Unit,
    WriteLiteral,
    WriteRegion,
)
from titan_ckpt.sharding.box_columns import overlaps
from titan_ckpt.sharding.placement import Box, Shape, span, strides

BUFFER_ALIGNMENT = 64
# Bytes between the payloads of neighbouring blobs, and the share of a unit that wider gaps may add to it.
FRAME_GAP = 2048
MAX_WASTE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`buffer_bytes` bounds what a unit reads; ranges of an object at most `max_gap` bytes apart may share a request."""

    buffer_bytes: int
    max_gap: int = 65536


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes of an object that a strip needs."""

    object: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkRange:
    """The part of a chunk that a strip needs: `range` holds its elements from number `first_element` on."""

    range: _Range
    first_element: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedCopy:
    """A `BoxCopy` before its range has a place in the buffer; `offset` is in bytes from the range's start."""

    range: _Range
    offset: int
    strides: Shape
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedCheck:
    """A `DigestCheck` before its range has a place in the buffer."""

    range: _Range
    key: ChunkKey
    chunk: SourceChunk
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedWrite:
    """A `WriteRegion` (without its copies) and the copies that it needs."""

    write: WriteRegion
    copies: list[_PlannedCopy]


@dataclass(slots=True)
class _StripWork:
    """Everything one strip of one tensor reads, checks and writes."""

    ranges: list[_Range] = field(default_factory=list)
    checks: list[_PlannedCheck] = field(default_factory=list)
    actions: list[WriteLiteral | EndRegion | _PlannedWrite] = field(default_factory=list)

    @property
    def buffer_bytes(self) -> int:
        return sum(needed.length + 2 * BUFFER_ALIGNMENT for needed in self.ranges)


def schedule(
    source: RewriteSource, group: FileGroup, limits: Limits, *, checked: set[ChunkKey] | None = None
) -> Iterator[Unit]:
    """Yield the units of a group, in order.

    `checked`: chunks whose digests are already verified. Every other chunk that has a digest and that the group touches is read
    whole, verified and added to the set. None: verify nothing.
    """
    strips: list[_StripWork] = []
    size = 0
    for strip in _strips(source, group, limits, checked):
        if strips and size + strip.buffer_bytes > limits.buffer_bytes:
            yield _pack(strips, limits)
            strips, size = [], 0
        strips.append(strip)
        size += strip.buffer_bytes
    if strips:
        yield _pack(strips, limits)


def _strips(
    source: RewriteSource, group: FileGroup, limits: Limits, checked: set[ChunkKey] | None
) -> Iterator[_StripWork]:
    queues = [_Segments(file) for file in group.files]
    for name in _order(source, group):
        if name not in source.tensors:
            raise PlanError(f"{name}: the source has no tensor of that name")
        regions = []
        opening = _StripWork()
        for index, queue in enumerate(queues):
            if queue.tensor == name:
                literal, region = queue.pop()
                if literal:
                    opening.actions.append(WriteLiteral(index, literal))
                regions.append((index, region))
        if opening.actions:
            yield opening
        yield from _TensorWalk(name, source.tensors[name], regions, limits, checked).strips()
        yield _StripWork(actions=[EndRegion(index, region) for index, region in regions])
    rest = _StripWork(
        actions=[WriteLiteral(index, data) for index, queue in enumerate(queues) if (data := queue.rest())]
    )
    if rest.actions:
        yield rest


class _Segments:
    """A target file's segments as pairs (literal bytes, the region after them), and the literal bytes at the end."""

    def __init__(self, file: TargetFile) -> None:
        self._segments = iter(file.segments)
        self._advance()

    def _advance(self) -> None:
        literals = []
        self._region: Region | None = None
        for segment in self._segments:
            if isinstance(segment, Region):
                self._region = segment
                break
            literals.append(segment.data)
        self._literal = b"".join(literals)

    @property
    def tensor(self) -> str | None:
        """The tensor of the next region, None after the last."""
        return None if self._region is None else self._region.tensor

    def pop(self) -> tuple[bytes, Region]:
        """The next region and the literal bytes before it."""
        assert self._region is not None
        item = self._literal, self._region
        self._advance()
        return item

    def rest(self) -> bytes:
        """The literal bytes after the last region."""
        return self._literal


def _order(source: RewriteSource, group: FileGroup) -> Iterable[str]:
    """Tensor names in the order in which the group writes them."""
    per_file = [[s.tensor for s in file.segments if isinstance(s, Region)] for file in group.files]
    if len(per_file) == 1:
        return per_file[0]
    positions = [[source.position[name] for name in names] for names in per_file]
    if any(a >= b for places in positions for a, b in pairwise(places)):
        raise PlanError("the files of a group do not list their tensors in the source's order")
    names = list(source.tensors)
    return [names[position] for position in sorted(set().union(*positions))]


class _TensorWalk:
    """The strips of one tensor for the regions of one group."""

    def __init__(
        self,
        name: str,
        tensor: SourceTensor,
        regions: list[tuple[int, Region]],
        limits: Limits,
        checked: set[ChunkKey] | None,
    ) -> None:
        self._name, self._tensor, self._regions = name, tensor, regions
        self._element_size = tensor.element_size
        self._row_multiple = max((r.transform.row_multiple for _, r in regions if r.transform), default=1)
        widest = max([ELEMENT_SIZE[r.transform.dtype] for _, r in regions if r.transform], default=0)
        self._max_elements = max(1, limits.buffer_bytes // 2 // max(self._element_size, widest))
        self._wanted = [self._grown(region) for _, region in regions]
        offsets, sizes = columns(self._wanted, len(tensor.global_shape))
        touched, _ = overlaps(tensor.box_offsets, tensor.box_sizes, offsets, sizes)
        self._chunks = {int(index): tensor.chunk(int(index)) for index in np.unique(touched)}
        self._to_check = self._claim(checked)

    def _grown(self, region: Region) -> Box:
        """The region's box, grown to whole groups of rows if its transform needs them."""
        if region.transform is None or region.transform.row_multiple == 1 or not region.box.num_elements:
            return region.box
        multiple, rows = region.transform.row_multiple, self._tensor.global_shape[0]
        start = region.box.offsets[0] // multiple * multiple
        end = min(-(-(region.box.offsets[0] + region.box.sizes[0]) // multiple) * multiple, rows)
        return Box((start, *region.box.offsets[1:]), (end - start, *region.box.sizes[1:]))

    def _claim(self, checked: set[ChunkKey] | None) -> set[int]:
        """Indices of the touched chunks that this walk verifies."""
        for index, chunk in self._chunks.items():
            if chunk.codec != RAW:
                raise PlanError(
                    f"{self._name}: chunk {index} is stored with codec {chunk.codec!r}, which cannot be streamed"
                )
        if checked is None:
            return set()
        mine = {i for i, p in self._chunks.items() if p.digest is not None and (self._name, i) not in checked}
        checked.update((self._name, index) for index in mine)
        return mine

    def strips(self) -> Iterator[_StripWork]:
        """The strips in row-major order."""
        wanted = [box for box in self._wanted if box.num_elements]
        whole = [self._chunks[index].box for index in self._to_check]
        if not wanted:
            return
        around = hull([chunk.box for chunk in self._chunks.values()] + wanted)
        boxes = [
            strip
            for start, end in merged_rows(wanted + whole, self._row_multiple)
            for strip in cut_strips(with_rows(around, start, end), self._max_elements, self._row_multiple)
        ]
        ndim, keys = len(self._tensor.global_shape), list(self._chunks)
        by_strip = pairs(boxes, [self._chunks[key].box for key in keys], ndim)
        regions = pairs(boxes, self._wanted, ndim)
        for index, box in enumerate(boxes):
            strip = self._strip(box, [keys[i] for i in by_strip.get(index, [])], regions.get(index, []))
            if strip.ranges or strip.actions:
                yield strip

    def _strip(self, box: Box, keys: list[int], regions: list[int]) -> _StripWork:
        work = _StripWork()
        found: dict[int, _ChunkRange] = {}
        for key in keys:
            chunk = self._chunks[key]
            need = self._need(chunk, box, key in self._to_check, regions)
            if need is None:
                continue
            first, length = span(chunk.box, need)
            needed = _Range(chunk.object, chunk.start + first * self._element_size, length * self._element_size)
            work.ranges.append(needed)
            found[key] = _ChunkRange(range=needed, first_element=first)
            if key in self._to_check:
                is_last = (first + length) * self._element_size == chunk.length
                work.checks.append(_PlannedCheck(range=needed, key=(self._name, key), chunk=chunk, is_last=is_last))
        for index in regions:
            work.actions.append(self._write(box, index, found))
        return work

    def _need(self, chunk: SourceChunk, strip: Box, whole: bool, regions: list[int]) -> Box | None:
        inside = chunk.box.intersect(strip)
        if whole or inside is None:
            return inside
        parts = [part for index in regions if (part := inside.intersect(self._wanted[index]))]
        return hull(parts) if parts else None

    def _write(self, strip: Box, index: int, found: Mapping[int, _ChunkRange]) -> _PlannedWrite:
        file, region = self._regions[index]
        grown = self._wanted[index].intersect(strip)
        assert grown is not None
        part = region.box.intersect(grown)
        copies, covered = [], 0
        for key, source in found.items():
            chunk = self._chunks[key]
            share = chunk.box.intersect(grown)
            if share is None:
                continue
            start, _ = span(chunk.box, share)
            covered += share.num_elements
            copies.append(
                _PlannedCopy(
                    range=source.range,
                    offset=(start - source.first_element) * self._element_size,
                    strides=tuple(step * self._element_size for step in strides(chunk.box.sizes)),
                    box=share.relative_to(grown),
                )
            )
        if covered < grown.num_elements:
            raise PlanError(
                f"{self._name}: the source has no chunk for all of {grown}: {covered} of its elements are there"
            )
        # If only grown rows fall into this strip, the part is empty and nothing is written.
        part = part or Box(grown.offsets, (0,) * len(grown.sizes))
        write = WriteRegion(file=file, region=region, dtype=self._tensor.dtype, strip=grown, part=part, copies=())
        return _PlannedWrite(write=write, copies=copies)


def _pack(strips: list[_StripWork], limits: Limits) -> Unit:
    """Lay the strips' ranges into one buffer; neighbours in an object share a request."""
    reads, places = _coalesce([needed for strip in strips for needed in strip.ranges], limits)
    checks: list[DigestCheck] = []
    actions: list[Action] = []
    for strip in strips:
        checks += [
            DigestCheck(key=c.key, chunk=c.chunk, at=places[c.range], length=c.range.length, is_last=c.is_last)
            for c in strip.checks
        ]
        for action in strip.actions:
            if isinstance(action, _PlannedWrite):
                copies = tuple(BoxCopy(places[c.range] + c.offset, c.strides, c.box) for c in action.copies)
                actions.append(replace(action.write, copies=copies))
            else:
                actions.append(action)
    used = max((read.at + read.length for read in reads), default=0)
    return Unit(reads=tuple(reads), checks=tuple(checks), actions=tuple(actions), buffer_bytes=used)


def _coalesce(ranges: list[_Range], limits: Limits) -> tuple[list[ReadRequest], dict[_Range, int]]:
    """Read requests for these ranges, and the position of each range in the buffer."""
    ordered = sorted(set(ranges), key=lambda r: (r.object, r.start, -r.length))
    reads: list[ReadRequest] = []
    places: dict[_Range, int] = {}
    at = 0
    for run in _runs(ordered, limits):
        start, end = run[0].start, max(needed.start + needed.length for needed in run)
        at += (start - at) % BUFFER_ALIGNMENT
        reads.append(ReadRequest(run[0].object, start, end - start, at))
        places.update({needed: at + needed.start - start for needed in run})
        at += end - start
    return reads, places


def _runs(ordered: list[_Range], limits: Limits) -> Iterator[list[_Range]]:
    """Ranges that one request reads: neighbours, and ranges whose gaps are small or add little to the whole."""
    total = sum(needed.length for needed in ordered)
    room = limits.buffer_bytes - sum(needed.length + 2 * BUFFER_ALIGNMENT for needed in ordered)
    waste = total * MAX_WASTE
    run: list[_Range] = []
    end = 0
    for needed in ordered:
        gap = needed.start - end
        is_small = gap <= FRAME_GAP or (gap <= limits.max_gap and gap <= waste)
        if run and needed.object == run[0].object and is_small and gap <= room:
            room -= max(gap, 0)
            waste -= max(gap, 0) if gap > FRAME_GAP else 0
            run.append(needed)
            end = max(end, needed.start + needed.length)
            continue
        if run:
            yield run
        run, end = [needed], needed.start + needed.length
    if run:
        yield run
