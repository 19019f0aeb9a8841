"""Arithmetic on a strip of rows: the reversible permutation of q and k, and casts. Bytes in, bytes out.

Without a cast nothing here needs torch, which costs 2 s and 200 MB to import; a cast is torch's own `tensor.to`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from titan_ckpt.converters.models.tensor_names import TransformName
from titan_ckpt.errors import PlanError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.rewrite.plan import Transform
from titan_ckpt.rewrite.selection import Overflows
from titan_ckpt.sharding.placement import Box
from titan_ckpt.store.base import Buffer

FLOATS = tuple(name for name in ELEMENT_SIZE if "float" in name)
Apply = Callable[[memoryview, Box], Buffer]


def transform(
    name: TransformName,
    *,
    tensor: str,
    to_trainer: bool,
    head_dim: int,
    dtype: str,
    target_dtype: str,
    overflows: Overflows,
    merge: Apply | None = None,
) -> Transform | None:
    """What takes tensor `tensor` of `dtype` to the other side as `target_dtype`; None where the bytes stay as they are.

    `overflows` is told of what a cast cannot keep. `merge` makes `target_dtype` of `dtype` itself, after the rows have their
    new order.
    """
    steps: list[Apply] = []
    if name:
        steps.append(_permute(head_dim, ELEMENT_SIZE[dtype], to_pairs=to_trainer))
    if merge is not None:
        steps.append(merge)
    elif target_dtype != dtype:
        from titan_ckpt.rewrite.cast import cast_to  # torch, only where a value changes

        steps.append(cast_to(dtype, target_dtype, name=tensor, overflows=overflows).apply)
    if not steps:
        return None
    return Transform(dtype=target_dtype, apply=_chain(steps), row_multiple=head_dim if name else 1)


def target_dtype(dtype: str, wanted: str | None) -> str:
    """The dtype that a tensor of `dtype` gets when floats are to be `wanted` (None: every dtype stays)."""
    if wanted is None or dtype not in FLOATS:
        return dtype
    if wanted not in FLOATS:
        raise PlanError(f"--dtype {wanted!r} is not a floating-point dtype; choose from {', '.join(FLOATS)}")
    return wanted


def _chain(steps: list[Apply]) -> Apply:
    def apply(raw: memoryview, box: Box) -> Buffer:
        data: Buffer = raw
        for step in steps:
            data = step(memoryview(data), box)
        return data

    return apply


def _permute(head_dim: int, element_size: int, *, to_pairs: bool) -> Apply:
    """Rows of each head: halves (Hugging Face: row j of both halves turns together) to neighbouring pairs, or back."""
    inner = (2, head_dim // 2) if to_pairs else (head_dim // 2, 2)

    def apply(raw: memoryview, box: Box) -> Buffer:
        rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, *inner, prod(box.sizes[1:]) * element_size)
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1).data

    return apply
