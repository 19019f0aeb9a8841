"""Element sizes of torch dtypes, and their bytes as numpy values: bfloat16 by bit shift, the float8 formats by table.

Formats: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2), OCP Microscaling 1.0 (E8M0), and the "fnuz" forms of
Noune et al. 2022 (no infinities, no negative zero, one NaN).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
ELEMENT_SIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex32": 4, "complex64": 8, "complex128": 16, "float4_e2m1fn_x2": 1,
}  # fmt: skip


_FLOAT8 = {  # mantissa bits, exponent bias
    "float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15), "float8_e4m3fnuz": (3, 8), "float8_e5m2fnuz": (2, 16),
}  # fmt: skip
_STORED = {
    "bfloat16": "<u2",
    "bool": "?",
    "complex32": "<u4",
    **dict.fromkeys([*_FLOAT8, "float8_e8m0fnu", "float4_e2m1fn_x2"], "<u1"),
}

_NO_NEGATIVES = ("bool", "float8", "float4", "uint16", "uint32", "uint64")


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that can hold the bytes of a tensor of `dtype`."""
    return np.dtype(_STORED.get(dtype) or np.dtype(dtype).newbyteorder("<"))


def can_show(dtype: str, *, is_conj: bool, is_neg: bool) -> bool:
    """Whether torch has conjugated, or negated, views of this dtype."""
    return (not is_conj or dtype.startswith("complex")) and (not is_neg or not dtype.startswith(_NO_NEGATIVES))


def shown(stored: Array, dtype: str, *, is_conj: bool, is_neg: bool) -> Array:
    """The conjugates, the negatives, or both, of stored elements. Signs alone change, also of zeros and NaNs."""
    if dtype.startswith("int") or dtype == "uint8":
        return -stored if is_neg else stored
    parts = 2 if dtype.startswith("complex") else 1
    size = stored.dtype.itemsize // parts
    signs = np.array([is_neg, is_neg != is_conj][:parts], dtype=f"<u{size}") << (8 * size - 1)
    flipped: Array = np.ascontiguousarray(stored).reshape(-1).view(f"<u{size}").reshape(-1, parts) ^ signs
    values: Array = flipped.reshape(-1).view(stored.dtype).reshape(stored.shape)
    return values


def decode(stored: Array, dtype: str) -> Array:
    """The values: floats as float64, bool as uint8, integers and complex unchanged, of float4 the byte of each pair.

    >>> decode(np.array([0x3F80, 0xC000], dtype="<u2"), "bfloat16").tolist()
    [1.0, -2.0]
    >>> decode(np.array([0x38, 0x7E, 0x7F], dtype="u1"), "float8_e4m3fn").tolist()
    [1.0, 448.0, nan]
    """
    if dtype == "bfloat16":
        return _as_float64((stored.astype(np.uint32) << 16).view(np.float32))
    if dtype in _FLOAT8 or dtype == "float8_e8m0fnu":
        return _float8_table(dtype)[stored]
    if dtype == "complex32":
        halves = np.ascontiguousarray(stored).reshape(-1).view("<f2").astype(np.float32)
        return halves.view(np.complex64).reshape(stored.shape)
    if dtype == "bool":
        return stored.astype(np.uint8)
    return _as_float64(stored) if stored.dtype.kind == "f" else stored


def _as_float64(values: Array) -> Array:
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return values.astype(np.float64)


@lru_cache
def _float8_table(dtype: str) -> npt.NDArray[np.float64]:
    codes = np.arange(256)
    if dtype == "float8_e8m0fnu":
        return np.where(codes == 255, np.nan, np.exp2(codes - 127.0))
    mantissa_bits, bias = _FLOAT8[dtype]
    exponent, mantissa = (codes & 0x7F) >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * np.exp2(exponent - float(bias)))
    value = np.where(codes & 0x80, -value, value)
    if dtype.endswith("fnuz"):
        value[0x80] = np.nan
    elif dtype == "float8_e4m3fn":
        value[[0x7F, 0xFF]] = np.nan
    else:
        value[[0x7C, 0xFC]] = np.inf, -np.inf
        value[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return value
