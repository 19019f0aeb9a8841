"""Staging: copy the tensors of a training job into one host buffer that every save reuses.

`Arena` lays this rank's tensors out one after another, so that staging is one copy per tensor and an upload sends slices of the
buffer without another copy. With a GPU the buffer is pinned and the copies run on a stream of their own: `stage` returns when
they are launched, and work queued after it waits for them on the device. `Direct` reads the tensors in place, for a save
that blocks.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence

import torch

from titan_ckpt.format.digest import digest
from titan_ckpt.format.torch_blob import align
from titan_ckpt.saving.apart.shared_memory import SharedMemory
from titan_ckpt.saving.replicas import bucket_digests
from titan_ckpt.saving.upload import PayloadSource, naming
from titan_ckpt.state.local_shard import LocalShard
from titan_ckpt.state.state_dict import as_bytes, detached_shard, plain

log = logging.getLogger(__name__)
MOST_REPEATS, SHOWN = 16, 10


class Arena:
    """Host memory for the payloads of one set of items."""

    def __init__(self, items: Sequence[LocalShard], *, is_pinned: bool, is_shared: bool = False) -> None:
        self.items = list(items)
        self.starts, length = list[int](), 0
        for item in self.items:
            self.starts.append(length)
            length = align(length + item.size_bytes)
        self.shared = SharedMemory(length) if is_shared else None
        if self.shared is None:
            self._buffer = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        else:
            self._buffer = torch.frombuffer(self.shared.view, dtype=torch.uint8)
            if is_pinned:
                _pin(self._buffer)
        self._stream = torch.cuda.Stream() if is_pinned else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    def stage(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors' local shards, one per item; the caller may change them as soon as this returns."""
        if self._stream is None:
            self._copy(tensors, non_blocking=False)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(tensors, non_blocking=True)
            self._copied = self._stream.record_event()
        torch.cuda.current_stream().wait_event(self._copied)

    def _copy(self, tensors: Sequence[torch.Tensor], *, non_blocking: bool) -> None:
        for index, (tensor, item) in enumerate(zip(tensors, self.items, strict=True)):
            with naming(item.fqn):
                local = plain(tensor)
                self._bytes(index).view(local.dtype).view(item.sizes).copy_(local, non_blocking=non_blocking)

    def _bytes(self, index: int) -> torch.Tensor:
        start = self.starts[index]
        return self._buffer[start : start + self.items[index].size_bytes]

    def wait(self) -> None:
        """Wait for a pending copy from a GPU."""
        if self._copied is not None:
            self._copied.synchronize()

    def payload(self, index: int) -> memoryview:
        """The bytes of item `index`; waits for a pending copy from a GPU."""
        self.wait()
        return as_bytes(self._bytes(index))


def _pin(buffer: torch.Tensor) -> None:
    """Register memory for copies that run beside kernels, until `buffer` is freed (torch has no public call for it)."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)))
    weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False


class Staging:
    """Where the bytes of each save come from. Keeps one arena, which the next save of the same items uses again.

    `is_shared`: in memory that another process can map.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self._arena: Arena | None = None
        self._is_shared = is_shared

    def source(self, items: Sequence[LocalShard], tensors: Sequence[torch.Tensor], *, is_staged: bool) -> PayloadSource:
        """A copy of the tensors that is in the making or done, or the tensors themselves."""
        is_on_gpu = are_on_gpu(tensors)
        if not is_staged:
            if is_on_gpu:
                torch.cuda.synchronize()  # the upload thread reads them on a stream of its own
            return Direct(tensors)
        if self._arena is None or self._arena.items != items:
            self._arena = None  # free the old one before the new one is allocated
            self._arena = Arena(items, is_pinned=is_on_gpu, is_shared=self._is_shared)
        self._arena.stage(tensors)
        return self._arena


class Direct:
    """Reads the tensors in place; one that is not contiguous in CPU memory is copied when it is sent."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def payload(self, index: int) -> memoryview:
        """The bytes of item `index`."""
        return as_bytes(plain(self._tensors[index]).cpu().contiguous())


class Copies:
    """Fingerprints of this rank's copies of what other ranks hold too, taken while the save stages.

    In CPU memory a fingerprint is the digest of the bytes; on another device, sums that stay there until `digests` is called.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], buckets: list[list[int]]) -> None:
        self._buckets = buckets
        self._taken = {index: _fingerprint(plain(tensors[index])) for bucket in buckets for index in bucket}

    def digests(self) -> list[bytes]:
        """One digest for each bucket."""
        return bucket_digests(self._buckets, lambda index: _as_digest(self._taken[index]))


def are_on_gpu(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a shard of this rank is on a CUDA device."""
    return any(detached_shard(tensor).is_cuda for tensor in tensors)


def warn_expanded(tensors: Iterable[tuple[str, torch.Tensor]], said: set[str]) -> None:
    """Log, once for each name, tensors that repeat their memory so often (`Tensor.expand`) that what is stored is a surprise."""
    found = []
    for fqn, tensor in tensors:
        local = plain(tensor)
        if fqn in said or local.is_contiguous():
            continue
        held = local.untyped_storage().nbytes()
        if local.nbytes > MOST_REPEATS * held:
            said.add(fqn)
            found.append(f"{fqn} ({local.nbytes} bytes, {held} in memory)")
    if found:
        log.warning(
            "%d tensors repeat their memory and are stored with every element, as DCP does: %s%s",
            len(found), ", ".join(found[:SHOWN]), ", ..." if len(found) > SHOWN else "",
        )  # fmt: skip


def _fingerprint(local: torch.Tensor) -> bytes | torch.Tensor:
    if local.device.type == "cpu":
        return digest(as_bytes(local.contiguous()))
    return device_sums(local)


def _as_digest(taken: bytes | torch.Tensor) -> bytes:
    return taken if isinstance(taken, bytes) else digest(as_bytes(taken.cpu()))


def device_sums(local: torch.Tensor) -> torch.Tensor:
    """Three sums of a tensor's bits modulo 2^64, on its device: plain, and weighted by row and by column of rows of `SUM_ROW`.

    Any single difference changes the first; elements that changed places change the others.
    """
    bits = local.contiguous().view(-1).view(_BITS[min(local.element_size(), 8)])
    whole = bits[: len(bits) // SUM_ROW * SUM_ROW].view(-1, SUM_ROW)
    sums = []
    for part in (whole, bits[whole.numel() :].view(1, -1)):
        rows, columns = part.sum(1, dtype=torch.int64), part.sum(0, dtype=torch.int64)
        sums += [rows.sum(), _weighted(rows), _weighted(columns)]
    return torch.stack(sums)


def _weighted(values: torch.Tensor) -> torch.Tensor:
    return (values * (torch.arange(len(values), device=values.device) * _ODD + 1)).sum()


SUM_ROW, _ODD = 4096, 0x9E3779B97F4A7C1
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
