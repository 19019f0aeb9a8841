"""Cast tensors in transit from one checkpoint to another; the only part of a reshard that needs torch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from titan_ckpt.arguments import nearest
from titan_ckpt.errors import PlanError
from titan_ckpt.rewrite.plan import Transform
from titan_ckpt.rewrite.selection import FLOATING, Overflows, Selection, is_cast
from titan_ckpt.sharding.placement import Box


def cast_to(source_dtype: str, dtype: str, *, name: str, overflows: Overflows) -> Transform:
    """A transform of tensor `name` from one floating-point dtype to another, with torch's rounding.

    Values out of range become what torch makes of them: infinity, NaN, or the largest value (float8). Then `name` is added to
    `overflows`.
    """
    source = getattr(torch, source_dtype)

    def apply(raw: memoryview, _box: Box) -> memoryview:
        if len(raw) == 0:
            return raw
        values = to_dtype(torch.frombuffer(raw, dtype=source), dtype, name=name, overflows=overflows)
        return memoryview(np.asarray(values.view(torch.uint8)).data)

    return Transform(dtype=dtype, apply=apply)


def to_dtype(values: torch.Tensor, dtype: str, *, name: str, overflows: Overflows) -> torch.Tensor:
    """`values.to(dtype)`; adds `name` to `overflows` if a value is out of range of `dtype`."""
    target: torch.dtype = getattr(torch, dtype)
    cast, info = values.to(target), torch.finfo(target)
    if info.max >= torch.finfo(values.dtype).max or values.numel() == 0:
        return cast
    wide = values.float() if values.itemsize == 1 else values
    low, high = torch.aminmax(wide)
    may_have_lost = not (low >= -info.max and high <= info.max)  # NaN compares false
    if may_have_lost and _has_lost(wide, cast, info):
        overflows.add(name, dtype, info.max)
    return cast


def _has_lost(wide: torch.Tensor, cast: torch.Tensor, info: torch.finfo) -> bool:
    """Whether a value was clamped (it was further out of range than rounding explains), or changed between finite and not."""
    reach = info.max + 2.0 ** math.floor(math.log2(info.max)) * info.eps / 2
    is_clamped = wide.isfinite() & (wide.abs() > reach)
    return bool((is_clamped | (wide.isfinite() != cast.float().isfinite())).any())


def with_dtype(selection: Selection, dtype: str) -> Selection:
    """Cast the selection's floating-point weights to `dtype`; optimizer state, integers and booleans keep their dtype."""
    if dtype not in FLOATING:
        raise PlanError(f"--dtype {dtype!r}: {nearest(dtype, FLOATING)}use one of {', '.join(FLOATING)}")
    items, transforms = [], {}
    for item in selection.items:
        if is_cast(item.entry, dtype):
            transforms[item.fqn] = cast_to(item.entry.dtype, dtype, name=item.fqn, overflows=selection.overflows)
            items.append(replace(item, entry=replace(item.entry, dtype=dtype)))
        else:
            items.append(item)
    return replace(selection, items=tuple(items), transforms=transforms)
