"""Casting tensors on their way from one checkpoint to another; the one part of a reshard that needs torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from titan_ckpt.errors import PlanError
from titan_ckpt.placement import Box
from titan_ckpt.plan import Transform
from titan_ckpt.select import FLOATING, Selection, is_cast


def cast_to(source_dtype: str, dtype: str) -> Transform:
    """A transform from one floating-point dtype to another, rounding as torch does.

    What a narrower dtype cannot hold becomes infinity or NaN, as in torch; nothing is clamped.
    """
    return Transform(dtype=dtype, apply=partial(_cast, getattr(torch, source_dtype), getattr(torch, dtype)))


def _cast(source: torch.dtype, target: torch.dtype, raw: memoryview, _box: Box) -> memoryview:
    if len(raw) == 0:
        return raw
    values = torch.frombuffer(raw, dtype=source).to(target)
    return memoryview(np.asarray(values.view(torch.uint8)).data)


def with_dtype(selection: Selection, dtype: str) -> Selection:
    """The selection with its floating-point weights in `dtype`; optimizer state, integers and booleans stay as they are."""
    if dtype not in FLOATING:
        raise PlanError(f"--dtype {dtype!r} is not one of {', '.join(FLOATING)}")
    items, transforms = [], {}
    for item in selection.items:
        if is_cast(item.entry, dtype):
            transforms[item.fqn] = cast_to(item.entry.dtype, dtype)
            items.append(replace(item, entry=replace(item.entry, dtype=dtype)))
        else:
            items.append(item)
    return replace(selection, items=tuple(items), transforms=transforms)
