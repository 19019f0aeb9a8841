"""Which bytes of which chunks go into which tensors, and reading them: straight into place where the layout allows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.objects import damage
from titan_ckpt.errors import DamagedError, LoadContractError
from titan_ckpt.format.codec import PLANES_ZSTD, EncodedPayload, read_raw
from titan_ckpt.format.digest import matches
from titan_ckpt.format.manifest import RAW, Chunk, TensorEntry
from titan_ckpt.loading.casts import count_changed
from titan_ckpt.loading.policy import LoadPolicy, LoadReport, VerifyReads, is_judged_by_values, listed
from titan_ckpt.loading.readers import LoadTimeoutError, Readers
from titan_ckpt.loading.requests import Request, host_memory
from titan_ckpt.sharding.placement import Box
from titan_ckpt.sharding.placement import strides as row_major
from titan_ckpt.state.state_dict import (
    DTYPE_NAME,
    TORCH_DTYPE,
    as_bytes,
    detached_shard,
    local_shard,
)


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a stored tensor within one chunk, and the part of a tensor to fill, of any dtype and layout, on any device.

    `is_direct`: the target is in host memory and has the stored dtype.
    """

    entry: TensorEntry
    chunk: Chunk
    box: Box
    target: torch.Tensor
    is_direct: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of the box as stored."""
        return self.box.num_elements * TORCH_DTYPE[self.entry.dtype].itemsize


@dataclass(frozen=True, slots=True)
class _StagedCopy:
    """Stored values in host memory, and the tensor of another dtype, layout or device that gets them."""

    fqn: str
    read: torch.Tensor
    target: torch.Tensor


class ReadPlan:
    """Plans and runs the reads that fill some tensors.

    Bytes that cannot be read straight into place need host memory: for the reads under way, `threads` of them, or for all such
    tensors at once where casts are judged by their values before a tensor changes.
    """

    def __init__(self, checkpoint: Checkpoint, policy: LoadPolicy, report: LoadReport) -> None:
        checkpoint.prove_coverage()
        self.checkpoint, self.policy, self.report = checkpoint, policy, report
        self.direct: list[Region] = []
        self.staged: list[Region] = []
        self._copies: list[_StagedCopy] = []

    def add(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Fill this rank's shard of `tensor`."""
        self.add_local(entry, local_shard(entry.fqn, tensor).box, detached_shard(tensor))

    def add_local(self, entry: TensorEntry, box: Box, local: torch.Tensor) -> None:
        """Fill `local`, which is `box` of the stored tensor, on any device and in any dtype and layout."""
        stored = TORCH_DTYPE[entry.dtype]
        is_direct = _is_direct(local, stored)
        if is_judged_by_values(self.policy) and (not is_direct or self.policy.broadcast):
            copy = torch.empty(box.sizes, dtype=stored, device="cpu", pin_memory=local.is_cuda)
            self._add_regions(self.staged, entry, box, copy, is_direct=True)
            self._copies.append(_StagedCopy(entry.fqn, copy, local))
        else:
            self._add_regions(self.direct, entry, box, local, is_direct=is_direct)

    def add_copy(self, fqn: str, value: torch.Tensor, local: torch.Tensor) -> None:
        """Fill `local` with a value that was read, when all is read."""
        self._copies.append(_StagedCopy(fqn, value.reshape(local.shape), local))

    def add_box(self, entry: TensorEntry, box: Box, target: torch.Tensor) -> None:
        """Fill the contiguous CPU tensor `target`, which is `box` of the stored tensor."""
        self._add_regions(self.direct, entry, box, target, is_direct=True)

    def _add_regions(
        self, regions: list[Region], entry: TensorEntry, box: Box, target: torch.Tensor, *, is_direct: bool
    ) -> None:
        for chunk in self.checkpoint.manifest.chunks_touching(entry, box) if box.num_elements else ():
            part = chunk.box.intersect(box)
            if part is not None:
                view = _narrow(target, part.relative_to(box))
                regions.append(Region(entry, chunk, part, view, is_direct))

    def located(self, regions: Sequence[Region], readers: Readers) -> list[Region]:
        """The regions with payload offsets. In foreign blobs that takes small reads, which run in parallel."""
        if all(region.chunk.payload_offset >= 0 for region in regions):
            return list(regions)
        locate = partial(self.checkpoint.locate, row_major=False)
        calls = [
            readers.call(partial(locate, each.chunk), f"the header of {each.entry.fqn} ({each.chunk.file})")
            for each in regions
        ]
        return [replace(each, chunk=chunk) for each, chunk in zip(regions, readers.all(calls), strict=True)]

    def request(self, region: Region) -> Request:
        """The read of a located region."""
        entry, chunk, part, view = region.entry, region.chunk, region.box, region.target
        dtype = TORCH_DTYPE[entry.dtype]
        inner = part.relative_to(chunk.box)
        needs_whole = self.policy.verify == VerifyReads.ALL and part != chunk.box
        inner_read = Box.whole(chunk.box.sizes) if needs_whole else inner
        strides = chunk.strides or row_major(chunk.box.sizes)
        first, last = _span(inner_read, strides)
        length = (last - first) * dtype.itemsize
        expected = self._digest(chunk, entry) if inner_read.sizes == chunk.box.sizes else None
        path, payload = self.checkpoint.path(chunk.file), chunk.offset + chunk.payload_offset
        start = payload + (first * dtype.itemsize if chunk.codec == RAW else 0)
        is_whole_span = chunk.strides is None and (last - first) == inner.num_elements
        is_as_shown = not (chunk.is_conj or chunk.is_neg)
        is_straight = region.is_direct and view.is_contiguous() and is_whole_span and is_as_shown

        def finish(data: memoryview) -> None:
            if expected is not None and not matches(data, expected):
                raise DamagedError(damage(self.checkpoint, path, chunk.fqn, start, len(data)))
            if not is_straight:
                _copy_box(data, inner, first, chunk, dtype, view)

        self.report.fetched_bytes += length
        self.report.unverified_bytes += region.size_bytes if expected is None else 0
        source = None
        if chunk.codec == PLANES_ZSTD:
            encoded = EncodedPayload(
                path=path,
                start=payload,
                length=chunk.payload_length,
                raw_length=chunk.box.num_elements * dtype.itemsize,
                itemsize=dtype.itemsize,
            )
            source = partial(read_raw, self.checkpoint.store, encoded, first * dtype.itemsize)
        return Request(
            fqn=entry.fqn,
            path=path,
            start=start,
            length=length,
            target=as_bytes(view) if is_straight else None,
            done=finish,
            source=source,
            allocate=pinned_memory if view.is_cuda else host_memory,
        )

    def _digest(self, chunk: Chunk, entry: TensorEntry) -> bytes | None:
        return None if self.policy.verify == VerifyReads.NONE else self.checkpoint.digest_of(entry, chunk)

    def count_needed(self) -> None:
        """Add to the report what the regions need."""
        self.report.needed_bytes += sum(region.size_bytes for region in [*self.staged, *self.direct])

    def run(self, give_up_at: float | None = None) -> None:
        """Read everything in parallel; stops at the first error. Nothing is changed before every cast has been judged."""
        self.count_needed()
        with reading(self, give_up_at) as readers:
            self._read(self.staged, readers)
            self.judge_values()
            self._read(self.direct, readers)
        self.install()

    def install(self) -> None:
        """Put what was staged into its tensors."""
        for copy in self._copies:
            copy_into(copy.target, copy.read)

    def _read(self, regions: list[Region], readers: Readers) -> None:
        requests = map(self.request, self.located(regions, readers))
        readers.all(readers.read(requests))

    def judge_values(self) -> None:
        """LoadContractError for casts that would change values, if the policy asks for that."""
        lost = []
        for copy in self._copies if is_judged_by_values(self.policy) else ():
            changed = count_changed(copy.read, copy.target.dtype)
            if changed:
                cast = f"{DTYPE_NAME[copy.read.dtype]} -> {DTYPE_NAME.get(copy.target.dtype, str(copy.target.dtype))}"
                lost.append(f"{copy.fqn}: {cast} changes {changed} of {copy.read.numel()} values")
        if lost:
            raise LoadContractError(
                f"{self.checkpoint} does not fit the state, and lossy_cast is 'error':{listed(lost)}"
            )


@contextmanager
def reading(plan: ReadPlan, give_up_at: float | None = None) -> Iterator[Readers]:
    """Readers for a plan, until `give_up_at` (of `time.monotonic`), by default the policy's time from now.

    When the block ends, nothing is being read any more; if that cannot be reached in time, the error says so.
    """
    timeout_s = plan.policy.timeout_s
    end = time.monotonic() + timeout_s if give_up_at is None else give_up_at
    readers = Readers(plan.checkpoint.store, plan.policy.threads, end, timeout_s)
    try:
        yield readers
    except BaseException as error:
        if not readers.stop() and isinstance(error, LoadTimeoutError):
            raise LoadTimeoutError(
                f"{error}. It does not return, and may still write into the tensors of the state: end this process"
            ) from error.__cause__
        raise
    readers.stop()


def _span(inner: Box, strides: tuple[int, ...]) -> tuple[int, int]:
    """Element range [first, last) that covers the box `inner` of a chunk stored with `strides`."""
    first = sum(offset * stride for offset, stride in zip(inner.offsets, strides, strict=True))
    return first, first + sum((size - 1) * stride for size, stride in zip(inner.sizes, strides, strict=True)) + 1


def _narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _copy_box(data: memoryview, inner: Box, first: int, chunk: Chunk, dtype: torch.dtype, view: torch.Tensor) -> None:
    """Copy the box `inner` of a chunk of `dtype` into `view`; `data` starts at element `first` of the chunk."""
    strides = chunk.strides or row_major(chunk.box.sizes)
    offset = sum(o * s for o, s in zip(inner.offsets, strides, strict=True)) - first
    values = torch.frombuffer(data, dtype=dtype).as_strided(inner.sizes, strides, storage_offset=offset)
    values = values.conj().resolve_conj() if chunk.is_conj else values
    copy_into(view, values.neg() if chunk.is_neg else values)


def pinned_memory(num_bytes: int) -> memoryview:
    """Host memory that a GPU copies from fast; torch keeps it for the next one."""
    return memoryview(torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy())  # type: ignore[arg-type]


def _is_direct(local: torch.Tensor, stored: torch.dtype) -> bool:
    """Whether stored bytes can be read straight into the memory of `local`."""
    is_as_shown = not (local.is_conj() or local.is_neg())
    return local.is_contiguous() and is_as_shown and local.device.type == "cpu" and local.dtype == stored


def copy_into(local: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.inference_mode(local.is_inference()), torch.no_grad():
        local.copy_(copy)
