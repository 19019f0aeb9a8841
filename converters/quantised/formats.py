"""The arithmetic of block formats, in numpy: packed values times the scale of their block, in float32, rounded once.

block-FP8   float8_e4m3 values [R, C], a float32 scale for each block of 128 x 128, the last ones smaller: `weight_dequant` in
            DeepSeek-V3's inference code, and `Fp8Dequantize` in transformers
MXFP4       float4_e2m1 values, two to a byte, low half first; a power of two (E8M0) for each 32 values of a row (OCP Microscaling
            1.0). GPT-OSS stores [E, R, C / 32, 16]; the plain tensor is [E, C, R], as transformers' `convert_moe_packed_tensors`

Shapes: E experts, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from titan_ckpt.errors import DamagedError
from titan_ckpt.format.dtypes import decode

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
VALUES_PER_SCALE = 32  # of MXFP4
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
_E8M0_NAN, _E8M0_BIAS = 255, 127


def float8_rows(
    packed_RC: Bytes, scales: Floats, *, first_row: int, block: tuple[int, int], dtype: str = "float32"
) -> npt.NDArray[Any]:
    """Rows from `first_row` on of a matrix, of which `scales` has all blocks, rounded to `dtype`.

    A block has 256 different values at most: they are computed once and looked up.
    """
    values = decode(np.arange(256, dtype=np.uint8), "float8_e4m3fn").astype(np.float32)
    rows, columns = packed_RC.shape
    of_columns = np.arange(columns) // block[1] * len(values)
    parts = []
    start = 0
    while start < rows:
        of_row = (first_row + start) // block[0]
        stop = min(rows, (of_row + 1) * block[0] - first_row)
        with np.errstate(over="ignore"):
            table = ROUND[dtype](values * scales[of_row, :, None]).reshape(-1)
        parts.append(table.take(packed_RC[start:stop] + of_columns, mode="clip"))  # no index is outside
        start = stop
    return np.concatenate(parts)


def float4_columns(packed_RGB: Bytes, scales_RG: Bytes) -> Floats:
    """Groups of 32 columns of one expert, transposed: [32 G, R]."""
    rows, groups = scales_RG.shape
    values = np.empty((rows, groups, VALUES_PER_SCALE), dtype=np.float32)
    values[..., 0::2] = _FLOAT4[packed_RGB & 0x0F]
    values[..., 1::2] = _FLOAT4[packed_RGB >> 4]
    with np.errstate(over="ignore", under="ignore"):
        values *= np.ldexp(np.float32(1.0), scales_RG.astype(np.int32) - _E8M0_BIAS)[..., None]
    return values.reshape(rows, -1).T


def check_float_scales(scales: Floats, name: str) -> Floats:
    """DamagedError for scales that are not finite; they would make a whole block NaN."""
    if not np.isfinite(scales).all():
        raise DamagedError(
            f"{name}: {int((~np.isfinite(scales)).sum())} of {scales.size} scales are not finite numbers"
        )
    return scales


def check_power_scales(scales: Bytes, name: str) -> Bytes:
    """DamagedError for E8M0 scales that are NaN (byte 255)."""
    if (wrong := int((scales == _E8M0_NAN).sum())) > 0:
        raise DamagedError(f"{name}: {wrong} of {scales.size} scales are NaN (byte {_E8M0_NAN})")
    return scales


def _to_bfloat16(values: Floats) -> npt.NDArray[Any]:
    """Rounded to the nearest, ties to even; NaN as torch writes it."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded


def _to_float16(values: Floats) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def _to_float32(values: Floats) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values)


ROUND: dict[str, Callable[[Floats], npt.NDArray[Any]]] = {
    "bfloat16": _to_bfloat16, "float16": _to_float16, "float32": _to_float32,
}  # fmt: skip
