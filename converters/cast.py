"""Casts by torch, so that an exported value is exactly what `tensor.to(dtype)` gives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from titan_ckpt.placement import Box
from titan_ckpt.plan import Buffer


def cast(dtype: str, target: str) -> Callable[[memoryview, Box], Buffer]:
    """A function from the raw bytes of `dtype` to those of `target`."""
    source_dtype: torch.dtype = getattr(torch, dtype)
    target_dtype: torch.dtype = getattr(torch, target)

    def apply(raw: memoryview, _box: Box) -> Buffer:
        if len(raw) == 0:
            return b""
        writable = bytearray(raw) if raw.readonly else raw
        values = torch.frombuffer(writable, dtype=source_dtype).to(target_dtype)
        return values.view(torch.uint8).numpy().data

    return apply
