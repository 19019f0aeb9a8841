"""Transforms of a strip of rows, bytes to bytes: the permutation of q and k, and casts.

Only a cast needs torch, which takes 2 s and 200 MB to import; it is torch's own `tensor.to`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from titan_ckpt.converters.models.mixtures import CORRECTION
from titan_ckpt.converters.models.tensor_names import RowOrder
from titan_ckpt.errors import PlanError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.rewrite.plan import Buffer, Transform
from titan_ckpt.rewrite.selection import Overflows
from titan_ckpt.sharding.placement import Box

FLOATS = tuple(name for name in ELEMENT_SIZE if "float" in name)
Apply = Callable[[memoryview, Box], Buffer]


def transform(
    name: RowOrder,
    *,
    tensor: str,
    to_trainer: bool,
    head_dim: int,
    dtype: str,
    target_dtype: str,
    overflows: Overflows,
    merge: Apply | None = None,
) -> Transform | None:
    """The transform of tensor `tensor` from `dtype` to `target_dtype` and from one row order to the other; None if bytes stay.

    `overflows` collects tensors with values that a cast cannot keep. `merge` replaces the cast; it runs on reordered rows.
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


def target_dtype(name: str, dtype: str, wanted: str | None) -> str:
    """The target dtype of a tensor of `dtype` if floats become `wanted` (None: keep every dtype).

    The correction bias of a router keeps its own, as in transformers: rounded, it would choose other experts.
    """
    if wanted is None or dtype not in FLOATS or name.endswith(CORRECTION):
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
    """Permute the rows of each head: halves (Hugging Face rotates row j of both halves together) to adjacent pairs, or back."""
    inner = (2, head_dim // 2) if to_pairs else (head_dim // 2, 2)

    def apply(raw: memoryview, box: Box) -> Buffer:
        rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, *inner, prod(box.sizes[1:]) * element_size)
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1).data

    return apply
