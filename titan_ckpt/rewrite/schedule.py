"""From a wave of target files to units of bounded size: what to read, what to check, what to write where. No torch, no I/O.

A tensor's regions are walked in strips of rows, so that every target receives its bytes in row-major order and every source
piece is read front to back. A row that is longer than a unit is itself walked in strips, and so on down the dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from titan_ckpt.errors import PlanError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import RAW
from titan_ckpt.rewrite.plan import Piece, Region, Source, SourceTensor, TargetFile, Wave
from titan_ckpt.rewrite.row_strips import columns, cut_strips, hull, merged_rows, pairs, with_rows
from titan_ckpt.rewrite.work_unit import Action, Check, End, Fill, Move, PieceKey, Put, Read, Unit
from titan_ckpt.sharding.box_columns import overlaps
from titan_ckpt.sharding.placement import Box, Shape, span, strides

SLAB_ALIGNMENT = 64
# What stands between two payloads of neighbouring blobs, and the share of a unit that wider gaps may add to it.
FRAME_GAP = 2048
MAX_WASTE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`slab_bytes` bounds what a unit reads; ranges of an object no further apart than `max_gap` are one request."""

    slab_bytes: int
    max_gap: int = 65536


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A contiguous range of an object that a strip needs."""

    object: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A sub-box of a piece for a fill, or the next bytes of a piece to check; `fetch` brings them."""

    fetch: _Fetch
    offset: int
    strides: Shape = ()
    box: Box | None = None
    check: tuple[PieceKey, Piece, bool] | None = None


@dataclass(slots=True)
class _Strip:
    """What one strip of one tensor needs and gives."""

    fetches: list[_Fetch] = field(default_factory=list)
    checks: list[_Use] = field(default_factory=list)
    actions: list[Put | End | tuple[Fill, list[_Use]]] = field(default_factory=list)

    @property
    def slab_bytes(self) -> int:
        return sum(fetch.length + 2 * SLAB_ALIGNMENT for fetch in self.fetches)


def schedule(source: Source, wave: Wave, limits: Limits, *, checked: set[PieceKey] | None = None) -> Iterator[Unit]:
    """The units of a wave, in order.

    `checked`: pieces whose digests are verified already; every other piece that the wave touches and that has a digest is read
    whole, verified, and added. None: nothing is checked.
    """
    strips: list[_Strip] = []
    size = 0
    for strip in _strips(source, wave, limits, checked):
        if strips and size + strip.slab_bytes > limits.slab_bytes:
            yield _pack(strips, limits)
            strips, size = [], 0
        strips.append(strip)
        size += strip.slab_bytes
    if strips:
        yield _pack(strips, limits)


def _strips(source: Source, wave: Wave, limits: Limits, checked: set[PieceKey] | None) -> Iterator[_Strip]:
    queues = [_Segments(file) for file in wave.files]
    for name in _order(source, wave):
        if name not in source.tensors:
            raise PlanError(f"{name}: the source has no tensor of that name")
        regions = []
        opening = _Strip()
        for index, queue in enumerate(queues):
            if queue.tensor == name:
                literal, region = queue.pop()
                if literal:
                    opening.actions.append(Put(index, literal))
                regions.append((index, region))
        if opening.actions:
            yield opening
        yield from _TensorWalk(name, source.tensors[name], regions, limits, checked).strips()
        yield _Strip(actions=[End(index, region) for index, region in regions])
    rest = _Strip(actions=[Put(index, data) for index, queue in enumerate(queues) if (data := queue.rest())])
    if rest.actions:
        yield rest


class _Segments:
    """A target file's segments as (literal bytes before it, region) pairs, and the literal bytes at the end."""

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
        """The next region and what stands before it."""
        assert self._region is not None
        item = self._literal, self._region
        self._advance()
        return item

    def rest(self) -> bytes:
        """What stands after the last region."""
        return self._literal


def _order(source: Source, wave: Wave) -> Iterable[str]:
    """Names in the order in which the wave takes tensors."""
    per_file = [[s.tensor for s in file.segments if isinstance(s, Region)] for file in wave.files]
    if len(per_file) == 1:
        return per_file[0]
    positions = [[source.position[name] for name in names] for names in per_file]
    if any(a >= b for places in positions for a, b in pairwise(places)):
        raise PlanError("the files of a wave do not list their tensors in the source's order")
    names = list(source.tensors)
    return [names[position] for position in sorted(set().union(*positions))]


class _TensorWalk:
    """The strips of one tensor for the regions of one wave."""

    def __init__(
        self,
        name: str,
        tensor: SourceTensor,
        regions: list[tuple[int, Region]],
        limits: Limits,
        checked: set[PieceKey] | None,
    ) -> None:
        self._name, self._tensor, self._regions = name, tensor, regions
        self._element_size = tensor.element_size
        self._row_multiple = max((r.transform.row_multiple for _, r in regions if r.transform), default=1)
        widest = max([ELEMENT_SIZE[r.transform.dtype] for _, r in regions if r.transform], default=0)
        self._max_elements = max(1, limits.slab_bytes // 2 // max(self._element_size, widest))
        self._wanted = [self._grown(region) for _, region in regions]
        offsets, sizes = columns(self._wanted, len(tensor.global_shape))
        touched, _ = overlaps(tensor.box_offsets, tensor.box_sizes, offsets, sizes)
        self._pieces = {int(index): tensor.piece(int(index)) for index in np.unique(touched)}
        self._to_check = self._claim(checked)

    def _grown(self, region: Region) -> Box:
        """The region's box, grown to whole groups of rows where its transform wants them."""
        if region.transform is None or region.transform.row_multiple == 1 or not region.box.num_elements:
            return region.box
        multiple, rows = region.transform.row_multiple, self._tensor.global_shape[0]
        start = region.box.offsets[0] // multiple * multiple
        end = min(-(-(region.box.offsets[0] + region.box.sizes[0]) // multiple) * multiple, rows)
        return Box((start, *region.box.offsets[1:]), (end - start, *region.box.sizes[1:]))

    def _claim(self, checked: set[PieceKey] | None) -> set[int]:
        """The touched pieces that this walk verifies."""
        for index, piece in self._pieces.items():
            if piece.codec != RAW:
                raise PlanError(
                    f"{self._name}: piece {index} is stored with codec {piece.codec!r}, which cannot be streamed"
                )
        if checked is None:
            return set()
        mine = {i for i, p in self._pieces.items() if p.digest is not None and (self._name, i) not in checked}
        checked.update((self._name, index) for index in mine)
        return mine

    def strips(self) -> Iterator[_Strip]:
        """The strips in row-major order."""
        wanted = [box for box in self._wanted if box.num_elements]
        whole = [self._pieces[index].box for index in self._to_check]
        if not wanted:
            return
        around = hull([piece.box for piece in self._pieces.values()] + wanted)
        boxes = [
            strip
            for start, end in merged_rows(wanted + whole, self._row_multiple)
            for strip in cut_strips(with_rows(around, start, end), self._max_elements, self._row_multiple)
        ]
        ndim, keys = len(self._tensor.global_shape), list(self._pieces)
        by_strip = pairs(boxes, [self._pieces[key].box for key in keys], ndim)
        regions = pairs(boxes, self._wanted, ndim)
        for index, box in enumerate(boxes):
            strip = self._strip(box, [keys[i] for i in by_strip.get(index, [])], regions.get(index, []))
            if strip.fetches or strip.actions:
                yield strip

    def _strip(self, box: Box, keys: list[int], regions: list[int]) -> _Strip:
        strip = _Strip()
        fetched: dict[int, tuple[_Fetch, int]] = {}
        for key in keys:
            piece = self._pieces[key]
            need = self._need(piece, box, key in self._to_check, regions)
            if need is None:
                continue
            first, length = span(piece.box, need)
            fetch = _Fetch(piece.object, piece.start + first * self._element_size, length * self._element_size)
            strip.fetches.append(fetch)
            fetched[key] = (fetch, first)
            if key in self._to_check:
                is_last = (first + length) * self._element_size == piece.length
                strip.checks.append(_Use(fetch=fetch, offset=0, check=((self._name, key), piece, is_last)))
        for index in regions:
            strip.actions.append(self._fill(box, index, fetched))
        return strip

    def _need(self, piece: Piece, strip: Box, whole: bool, regions: list[int]) -> Box | None:
        inside = piece.box.intersect(strip)
        if whole or inside is None:
            return inside
        parts = [part for index in regions if (part := inside.intersect(self._wanted[index]))]
        return hull(parts) if parts else None

    def _fill(self, strip: Box, index: int, fetched: dict[int, tuple[_Fetch, int]]) -> tuple[Fill, list[_Use]]:
        file, region = self._regions[index]
        grown = self._wanted[index].intersect(strip)
        assert grown is not None
        part = region.box.intersect(grown)
        uses, covered = [], 0
        for key, (fetch, first) in fetched.items():
            piece = self._pieces[key]
            share = piece.box.intersect(grown)
            if share is None:
                continue
            start, _ = span(piece.box, share)
            covered += share.num_elements
            uses.append(
                _Use(
                    fetch=fetch,
                    offset=(start - first) * self._element_size,
                    strides=tuple(step * self._element_size for step in strides(piece.box.sizes)),
                    box=share.relative_to(grown),
                )
            )
        if covered < grown.num_elements:
            raise PlanError(
                f"{self._name}: the source has no chunk for all of {grown}: {covered} of its elements are there"
            )
        # A part may be empty where only the grown rows fall into this strip; then nothing is written.
        part = part or Box(grown.offsets, (0,) * len(grown.sizes))
        return Fill(file=file, region=region, dtype=self._tensor.dtype, strip=grown, part=part, moves=()), uses


def _pack(strips: list[_Strip], limits: Limits) -> Unit:
    """Lay the strips' fetches into one slab, neighbours in an object as one read."""
    reads, places = _coalesce([fetch for strip in strips for fetch in strip.fetches], limits)
    checks: list[Check] = []
    actions: list[Action] = []
    for strip in strips:
        for use in strip.checks:
            assert use.check is not None
            key, piece, is_last = use.check
            at = places[use.fetch]
            checks.append(Check(key=key, piece=piece, at=at, length=use.fetch.length, is_last=is_last))
        for action in strip.actions:
            if isinstance(action, tuple):
                fill, uses = action
                moves = tuple(Move(places[u.fetch] + u.offset, u.strides, u.box) for u in uses if u.box is not None)
                actions.append(replace(fill, moves=moves))
            else:
                actions.append(action)
    used = max((read.at + read.length for read in reads), default=0)
    return Unit(reads=tuple(reads), checks=tuple(checks), actions=tuple(actions), slab_bytes=used)


def _coalesce(fetches: list[_Fetch], limits: Limits) -> tuple[list[Read], dict[_Fetch, int]]:
    """Reads for these ranges and the place of each range in the slab."""
    ordered = sorted(set(fetches), key=lambda f: (f.object, f.start, -f.length))
    reads: list[Read] = []
    places: dict[_Fetch, int] = {}
    at = 0
    for run in _runs(ordered, limits):
        start, end = run[0].start, max(fetch.start + fetch.length for fetch in run)
        at += (start - at) % SLAB_ALIGNMENT
        reads.append(Read(run[0].object, start, end - start, at))
        places.update({fetch: at + fetch.start - start for fetch in run})
        at += end - start
    return reads, places


def _runs(ordered: list[_Fetch], limits: Limits) -> Iterator[list[_Fetch]]:
    """Ranges that are read by one request: neighbours, and those with gaps that are small or add little to the whole."""
    total = sum(fetch.length for fetch in ordered)
    room = limits.slab_bytes - sum(fetch.length + 2 * SLAB_ALIGNMENT for fetch in ordered)
    waste = total * MAX_WASTE
    run: list[_Fetch] = []
    end = 0
    for fetch in ordered:
        gap = fetch.start - end
        is_small = gap <= FRAME_GAP or (gap <= limits.max_gap and gap <= waste)
        if run and fetch.object == run[0].object and is_small and gap <= room:
            room -= max(gap, 0)
            waste -= max(gap, 0) if gap > FRAME_GAP else 0
            run.append(fetch)
            end = max(end, fetch.start + fetch.length)
            continue
        if run:
            yield run
        run, end = [fetch], fetch.start + fetch.length
    if run:
        yield run
