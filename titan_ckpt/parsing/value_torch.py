"""Constructors of torch's plain types, and of dense tensors inside other values. Imported when a value names torch."""

from __future__ import annotations

import math
from typing import Any

import torch

from titan_ckpt.parsing.value_build import Builder, Constructor
from titan_ckpt.parsing.value_records import Record, Storage

_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn")
_STORED = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip

MOST_EXPANDED_BYTES = 1 << 30
"""Of a tensor whose elements share memory: a file of a few bytes could ask for any size."""


def _tensor(builder: Builder, record: Record) -> torch.Tensor:
    """`_rebuild_tensor_v2` and `_v3`: a view of a storage, which tensors of one value may share."""
    storage, offset, size, stride, requires_grad = record.args[:5]
    named = record.call[1] == "_rebuild_tensor_v3"
    if not isinstance(storage, Storage):
        raise ValueError("not a tensor's storage")
    dtype = builder.value(record.args[6]) if named else getattr(torch, _STORED[storage.kind[1]])
    found = rebuilt(builder, storage, (offset, size, stride), dtype)
    found = _lazy(
        found, builder.value(record.args[7 if named else 6]) if len(record.args) > (7 if named else 6) else None
    )
    return found.requires_grad_(bool(requires_grad)) if requires_grad else found


def rebuilt(builder: Builder, storage: Storage, place: tuple[Any, Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """A view of a storage, at `place`: offset, sizes and strides in elements. ValueError if it lies outside."""
    offset, size, stride = place[0], tuple(builder.value(place[1])), tuple(builder.value(place[2]))
    if any(type(n) is not int or n < 0 for n in (offset, *size, *stride)):
        raise ValueError("not a tensor's sizes and strides")
    reach = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1 if 0 not in size else 0
    memory = _memory(builder, storage)
    if reach * dtype.itemsize > len(memory):
        raise ValueError(f"a tensor that reaches {reach} elements into a storage of {len(memory)} bytes")
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes > max(len(memory), 1) and not _is_small_expansion(size, stride, num_bytes, len(memory)):
        raise ValueError("a tensor with more elements than its storage")
    found = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
    return found.as_strided(size, stride, offset) if reach else torch.empty(size, dtype=dtype, device="cpu")


def _is_small_expansion(size: tuple[int, ...], stride: tuple[int, ...], num_bytes: int, stored: int) -> bool:
    """Whether a tensor repeats its storage along dimensions of stride 0 alone, as after `expand`, and not to any size."""
    own = math.prod(n for n, step in zip(size, stride, strict=True) if step) * (num_bytes // max(math.prod(size), 1))
    return own <= stored and num_bytes <= MOST_EXPANDED_BYTES


def _lazy(tensor: torch.Tensor, marks: Any) -> torch.Tensor:
    """The view that `marks` (`torch._utils.get_tensor_metadata`) say: its numbers are the conjugated or negated ones stored."""
    if marks is None or marks == {}:
        return tensor
    if not isinstance(marks, dict) or not set(marks) <= {"conj", "neg"}:
        raise ValueError(f"a tensor with unknown marks {str(marks)[:80]}")
    tensor = tensor.conj() if marks.get("conj") else tensor
    return torch._neg_view(tensor) if marks.get("neg") else tensor


def _memory(builder: Builder, storage: Storage) -> torch.Tensor:
    """The bytes of a storage, one tensor for all who share it."""
    if storage.key not in builder.shared:
        data = bytearray(builder.storages[storage.key])
        builder.shared[storage.key] = (
            torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
    found: torch.Tensor = builder.shared[storage.key]
    return found


def _parameter(builder: Builder, record: Record) -> torch.nn.Parameter:
    data, requires_grad = builder.value(record.args[0]), builder.value(record.args[1])
    return torch.nn.Parameter(data, requires_grad=bool(requires_grad))


def _generator(builder: Builder, record: Record) -> torch.Generator:
    device = builder.value(record.args[0])
    if device.type != "cpu":
        raise ValueError(f"a generator on {device}; store its get_state() instead")
    found = torch.Generator()
    _seed, _offset, state = builder.value(record.state[0])
    return found.set_state(state)


def _size(builder: Builder, record: Record) -> torch.Size:
    return torch.Size(builder.value(record.args[0]) if record.args else ())


def _device(builder: Builder, record: Record) -> torch.device:
    return torch.device(*builder.args(record))


def _layout(builder: Builder, record: Record) -> torch.layout:
    name = str(builder.args(record)[0]).removeprefix("torch.")
    if name not in _LAYOUTS:
        raise ValueError(f"an unknown layout {name[:40]}")
    found: torch.layout = getattr(torch, name)
    return found


_SCHEMES = (
    "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)  # fmt: skip
_DTYPES = (
    *_STORED.values(),
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "quint8",
    "qint8",
    "qint32",
    "quint4x2",
    "quint2x4",
    "complex32",
    "bits8",
    "bits16",
)
CONSTANTS: dict[tuple[str, str], Any] = {
    ("torch", name): getattr(torch, name)
    for name in (*_DTYPES, *(f"{u}int{n}" for u in ("", "u") for n in range(1, 8)), *_SCHEMES)
    if hasattr(torch, name)
}
CONSTRUCTORS: dict[tuple[str, str], Constructor] = {
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch._C", "Generator"): _generator,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}
