"""Which casts between dtypes can change a value, and whether one did, decided exactly, for every pair of dtypes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_PART = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
PAIRS = torch.float4_e2m1fn_x2
"""Two numbers in an element: it can be cast to nothing else."""
BLOCK_ELEMENTS = 4 << 20


@cache
def holds_every_value(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether `target` can represent every value of `source`; `torch.promote_types` does not say (int64 to float16).

    >>> holds_every_value(torch.int8, torch.bfloat16), holds_every_value(torch.int64, torch.float16)
    (True, False)
    """
    if source == target:
        return True
    if PAIRS in (source, target):
        return False
    if source.itemsize == 1:  # few enough to try: torch.finfo is wrong for some of them (float8_e5m2fnuz, torch 2.13)
        codes = torch.arange(2 if source == torch.bool else 256, dtype=torch.int32, device="cpu").to(torch.uint8)
        return not _is_changed(codes.view(source), target).any()
    if target in _PART:
        return holds_every_value(_PART.get(source, source), _PART[target])
    if source in _PART or target.itemsize == 1:
        return False
    if source.is_floating_point:
        return target.is_floating_point and _float_holds_float(source, target)
    low, high = torch.iinfo(source).min, torch.iinfo(source).max
    if not target.is_floating_point:
        return torch.iinfo(target).min <= low and high <= torch.iinfo(target).max
    info = torch.finfo(target)
    return high < 2 / info.eps and high <= info.max


def _float_holds_float(source: torch.dtype, target: torch.dtype) -> bool:
    a, b = torch.finfo(source), torch.finfo(target)
    return b.eps <= a.eps and b.smallest_normal * b.eps <= a.smallest_normal * a.eps and a.max <= b.max


def count_changed(values: torch.Tensor, target: torch.dtype) -> int:
    """Number of elements of `values`, in CPU memory, that a cast to `target` changes. A NaN that stays one is not changed."""
    if holds_every_value(values.dtype, target):
        return 0
    flat = values.detach().reshape(-1)
    blocks = (flat[start : start + BLOCK_ELEMENTS] for start in range(0, len(flat), BLOCK_ELEMENTS))
    return sum(int(np.count_nonzero(_is_changed(block, target))) for block in blocks)


def _is_changed(values: torch.Tensor, target: torch.dtype) -> Any:
    if values.dtype in _PART:
        parts = torch.view_as_real(values.resolve_conj())
        if target in _PART:
            return _is_changed(parts[:, 0], _PART[target]) | _is_changed(parts[:, 1], _PART[target])
        return (parts[:, 1].numpy() != 0) | _is_changed(parts[:, 0], target)
    if target in _PART:
        return _is_changed(values, _PART[target])
    shown = _as_numpy(values)
    if target == torch.bool:
        return (shown != 0) & (shown != 1)
    if not target.is_floating_point:
        return ~_fits(shown, torch.iinfo(target))
    cast = _as_numpy(values.to(target))
    if shown.dtype.kind == "f":
        return ~((cast == shown) | (np.isnan(cast) & np.isnan(shown)))
    is_inside = _fits(cast, np.iinfo(shown.dtype))
    return ~is_inside | (np.where(is_inside, cast, 0).astype(shown.dtype) != shown)


def _fits(shown: npt.NDArray[Any], info: Any) -> Any:
    """Whether each value is an integer between `info.min` and `info.max`."""
    if shown.dtype.kind == "f":
        # Both bounds are exact as float64: a power of two, and one past the largest.
        is_inside = (shown >= float(info.min)) & (shown < float(info.max + 1))
        return is_inside & (np.trunc(shown) == shown)
    own = np.iinfo(shown.dtype)
    return (shown >= max(info.min, own.min)) & (shown <= min(info.max, own.max))


def _as_numpy(values: torch.Tensor) -> npt.NDArray[Any]:
    """The values exactly: floats as float64, booleans as uint8, integers as they are."""
    if values.dtype.is_floating_point:
        return np.asarray(values.float().double() if values.itemsize == 1 else values.double())
    return np.asarray(values.view(torch.uint8) if values.dtype == torch.bool else values)
