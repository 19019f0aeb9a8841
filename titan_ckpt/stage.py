"""Staging: from the tensors of a training job into one host buffer that is reused and that already is the file.

The buffer holds every blob of the file where it will stand, frames included, so that staging is one copy per tensor and an
upload sends slices of the buffer without another copy. With a GPU the buffer is pinned and the copies run on a stream of
their own: `stage` returns when they are launched, and work that is queued after it waits for them on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan_ckpt.blob import Frame, align, frame
from titan_ckpt.state import Item, as_bytes, local_part


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one blob in the file."""

    offset: int
    frame: Frame

    @property
    def payload_start(self) -> int:
        """Where the tensor's bytes begin."""
        return self.offset + len(self.frame.prefix)

    @property
    def payload_end(self) -> int:
        """Where they end."""
        return self.payload_start + self.frame.payload_length


def lay_out(items: Sequence[Item]) -> tuple[list[Slot], int]:
    """The slots of these items one after another, and the length of the file."""
    slots, end = [], 0
    for item in items:
        slot = Slot(offset=align(end), frame=frame(item.dtype, item.sizes))
        slots.append(slot)
        end = slot.offset + slot.frame.length
    return slots, end


class Arena:
    """A file's image in host memory; one per layout, reused by every save of that layout."""

    def __init__(self, items: Sequence[Item], *, is_pinned: bool) -> None:
        self.items = list(items)
        self.slots, self.length = lay_out(self.items)
        self._buffer = torch.empty(self.length, dtype=torch.uint8, pin_memory=is_pinned)
        self.view = as_bytes(self._buffer)
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream() if is_pinned else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._write_frames()

    def _write_frames(self) -> None:
        end = 0
        for slot in self.slots:
            self.view[end : slot.offset] = bytes(slot.offset - end)
            self.view[slot.offset : slot.payload_start] = slot.frame.prefix
            end = slot.offset + slot.frame.length
            self.view[slot.payload_end : end] = slot.frame.suffix

    def stage(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors' local parts, one per item; they may be changed as soon as this returns."""
        if self._stream is None:
            self._copy(tensors, non_blocking=False)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(tensors, non_blocking=True)
            self._copied = self._stream.record_event()
        torch.cuda.current_stream().wait_event(self._copied)

    def _copy(self, tensors: Sequence[torch.Tensor], *, non_blocking: bool) -> None:
        for tensor, item, slot in zip(tensors, self.items, self.slots, strict=True):
            local = local_part(tensor)
            target = self._buffer[slot.payload_start : slot.payload_end].view(local.dtype).view(item.sizes)
            target.copy_(local, non_blocking=non_blocking)

    def wait(self) -> None:
        """Return when the bytes are really in the buffer; called off the training thread, before the upload."""
        if self._copied is not None:
            self._copied.synchronize()

    def payload(self, slot: Slot) -> memoryview:
        """A tensor's bytes."""
        return self.view[slot.payload_start : slot.payload_end]
