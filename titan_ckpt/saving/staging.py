"""Staging: copy the tensors of a training job into one host buffer that every save reuses.

`Arena` lays this rank's tensors out one after another, so that staging is one copy per tensor and an upload sends slices of the
buffer without another copy. With a GPU the buffer is pinned and the copies run on a stream of their own: `stage` returns when
they are launched, and work queued after it waits for them on the device. `Direct` reads the tensors in place, for a save
that blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from titan_ckpt.format.torch_blob import align
from titan_ckpt.state.state_dict import LocalShard, as_bytes, detached_shard


class PayloadSource(Protocol):
    """Gives an upload the bytes of each item."""

    def payload(self, index: int) -> memoryview:
        """The raw bytes of the `index`-th item."""


class Arena:
    """Host memory for the payloads of one set of items."""

    def __init__(self, items: Sequence[LocalShard], *, is_pinned: bool) -> None:
        self.items = list(items)
        self._starts, length = [], 0
        for item in self.items:
            self._starts.append(length)
            length = align(length + item.size_bytes)
        self._buffer = torch.empty(length, dtype=torch.uint8, pin_memory=is_pinned)
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
            local = detached_shard(tensor)
            self._bytes(index).view(local.dtype).view(item.sizes).copy_(local, non_blocking=non_blocking)

    def _bytes(self, index: int) -> torch.Tensor:
        start = self._starts[index]
        return self._buffer[start : start + self.items[index].size_bytes]

    def payload(self, index: int) -> memoryview:
        """The bytes of item `index`; waits for a pending copy from a GPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return as_bytes(self._bytes(index))


class Direct:
    """Reads the tensors in place; one that is not contiguous in CPU memory is copied when it is sent."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def payload(self, index: int) -> memoryview:
        """The bytes of item `index`."""
        return as_bytes(detached_shard(self._tensors[index]).cpu().contiguous())
