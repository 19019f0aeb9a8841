"""Which bytes of which chunks go into which tensors, and reading them: straight into place where the layout allows."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from titan_ckpt.loading.requests import Request, fetch, grouped
from titan_ckpt.sharding.placement import Box
from titan_ckpt.sharding.placement import strides as row_major
from titan_ckpt.state.state_dict import (
    DTYPE_NAME,
    TORCH_DTYPE,
    as_bytes,
    detached_shard,
    local_shard,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Region:
    """A box of a stored tensor within one chunk, and the tensor to fill."""

    entry: TensorEntry
    chunk: Chunk
    box: Box
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class _StagedCopy:
    """Stored values in host memory, and the tensor of another dtype, layout or device that gets them."""

    fqn: str
    read: torch.Tensor
    target: torch.Tensor


class ReadPlan:
    """Plans and runs the reads that fill some tensors."""

    def __init__(self, checkpoint: Checkpoint, policy: LoadPolicy, report: LoadReport) -> None:
        checkpoint.prove_coverage()
        self._checkpoint, self._policy, self._report = checkpoint, policy, report
        self._direct: list[_Region] = []
        self._staged: list[_Region] = []
        self._copies: list[_StagedCopy] = []
        self._reads: list[Request] = []

    def add(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Fill this rank's shard of `tensor`."""
        self.add_local(entry, local_shard(entry.fqn, tensor).box, detached_shard(tensor))

    def add_local(self, entry: TensorEntry, box: Box, local: torch.Tensor) -> None:
        """Fill `local`, which is `box` of the stored tensor, on any device and in any dtype and layout."""
        if _is_direct(local, TORCH_DTYPE[entry.dtype]):
            self._add_regions(self._direct, entry, box, local)
            return
        copy = torch.empty(box.sizes, dtype=TORCH_DTYPE[entry.dtype], pin_memory=local.is_cuda)
        self._add_regions(self._staged, entry, box, copy)
        self._copies.append(_StagedCopy(entry.fqn, copy, local))

    def add_copy(self, fqn: str, value: torch.Tensor, local: torch.Tensor) -> None:
        """Fill `local` with a value that was read, when all is read."""
        self._copies.append(_StagedCopy(fqn, value.reshape(local.shape), local))

    def add_box(self, entry: TensorEntry, box: Box, target: torch.Tensor) -> None:
        """Fill the contiguous CPU tensor `target`, which is `box` of the stored tensor."""
        self._add_regions(self._direct, entry, box, target)

    def _add_regions(self, regions: list[_Region], entry: TensorEntry, box: Box, target: torch.Tensor) -> None:
        for chunk in self._checkpoint.manifest.chunks_touching(entry, box) if box.num_elements else ():
            part = chunk.box.intersect(box)
            if part is not None:
                regions.append(_Region(entry, chunk, part, _narrow(target, part.relative_to(box))))

    def _located(self, regions: list[_Region], pool: ThreadPoolExecutor) -> Iterable[Chunk]:
        """The regions' chunks with payload offsets. In foreign blobs that takes small reads, which run in parallel."""
        chunks = [region.chunk for region in regions]
        if all(chunk.payload_offset >= 0 for chunk in chunks):
            return chunks
        return pool.map(partial(self._checkpoint.locate, row_major=False), chunks)

    def _add_chunk(self, region: _Region, chunk: Chunk) -> None:
        """Plan the read of a region from its chunk, whose payload offset is known."""
        entry, part, view = region.entry, region.box, region.target
        inner = part.relative_to(chunk.box)
        needs_whole = self._policy.verify == VerifyReads.ALL and part != chunk.box
        inner_read = Box.whole(chunk.box.sizes) if needs_whole else inner
        size = view.element_size()
        strides = chunk.strides or row_major(chunk.box.sizes)
        first, last = _span(inner_read, strides)
        expected = self._digest(chunk, entry) if inner_read.sizes == chunk.box.sizes else None
        path, payload = self._checkpoint.path(chunk.file), chunk.offset + chunk.payload_offset
        start = payload + (first * size if chunk.codec == RAW else 0)
        is_straight = chunk.strides is None and view.is_contiguous() and (last - first) == inner.num_elements

        def finish(data: memoryview) -> None:
            if expected is not None and not matches(data, expected):
                raise DamagedError(damage(self._checkpoint, path, chunk.fqn, start, len(data)))
            if not is_straight:
                _copy_box(data, inner, first, strides, view)

        self._count(part, size, (last - first) * size, is_verified=expected is not None)
        memory = as_bytes(view) if is_straight else None
        length, source = (last - first) * size, None
        if chunk.codec == PLANES_ZSTD:
            encoded = EncodedPayload(
                path=path,
                start=payload,
                length=chunk.payload_length,
                raw_length=chunk.box.num_elements * size,
                itemsize=size,
            )
            source = partial(read_raw, self._checkpoint.store, encoded, first * size)
        self._reads.append(Request(path=path, start=start, length=length, target=memory, done=finish, source=source))

    def _count(self, part: Box, size: int, fetched: int, *, is_verified: bool) -> None:
        self._report.needed_bytes += part.num_elements * size
        self._report.fetched_bytes += fetched
        if not is_verified:
            self._report.unverified_bytes += part.num_elements * size

    def _digest(self, chunk: Chunk, entry: TensorEntry) -> bytes | None:
        return None if self._policy.verify == VerifyReads.NONE else self._checkpoint.digest_of(entry, chunk)

    def run(self) -> None:
        """Read everything in parallel; stops at the first error. Nothing is changed before every cast has been judged."""
        with ThreadPoolExecutor(max_workers=self._policy.threads, thread_name_prefix="titan-ckpt-load") as pool:
            self._read(self._staged, pool)
            if is_judged_by_values(self._policy):
                self._judge_values()
            self._read(self._direct, pool)
        for copy in self._copies:
            _copy_into(copy.target, copy.read)

    def _read(self, regions: list[_Region], pool: ThreadPoolExecutor) -> None:
        self._reads = []
        for region, chunk in zip(regions, self._located(regions, pool), strict=True):
            self._add_chunk(region, chunk)
        futures = [pool.submit(fetch, self._checkpoint.store, group) for group in grouped(self._reads)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise

    def _judge_values(self) -> None:
        """LoadContractError for casts that would change values, before any destination is written."""
        lost = []
        for copy in self._copies:
            changed = count_changed(copy.read, copy.target.dtype)
            if changed:
                cast = f"{DTYPE_NAME[copy.read.dtype]} -> {DTYPE_NAME.get(copy.target.dtype, str(copy.target.dtype))}"
                lost.append(f"{copy.fqn}: {cast} changes {changed} of {copy.read.numel()} values")
        if lost:
            raise LoadContractError(
                f"{self._checkpoint} does not fit the state, and lossy_cast is 'error':{listed(lost)}"
            )


def _span(inner: Box, strides: tuple[int, ...]) -> tuple[int, int]:
    """Element range [first, last) that covers the box `inner` of a chunk stored with `strides`."""
    first = sum(offset * stride for offset, stride in zip(inner.offsets, strides, strict=True))
    return first, first + sum((size - 1) * stride for size, stride in zip(inner.sizes, strides, strict=True)) + 1


def _narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _copy_box(data: memoryview, inner: Box, first: int, strides: tuple[int, ...], view: torch.Tensor) -> None:
    """Copy the box `inner` of a chunk into `view`; `data` starts at element `first` of the chunk."""
    offset = sum(o * s for o, s in zip(inner.offsets, strides, strict=True)) - first
    flat = torch.frombuffer(data, dtype=view.dtype)
    view.copy_(flat.as_strided(inner.sizes, strides, storage_offset=offset))


def _is_direct(local: torch.Tensor, stored: torch.dtype) -> bool:
    """Whether stored bytes can be read straight into the memory of `local`."""
    is_as_shown = not (local.is_conj() or local.is_neg())
    return local.is_contiguous() and is_as_shown and local.device.type == "cpu" and local.dtype == stored


def _copy_into(local: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.inference_mode(local.is_inference()), torch.no_grad():
        local.copy_(copy)
