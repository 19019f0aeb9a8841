"""Constructors of tensors that are not dense and plain, inside other values: sparse, nested and quantised ones, and subclasses.

What the pickle says is checked before torch gets it: none of them takes memory, or reads it, by a number that the pickle states.
Format: `Tensor.__reduce_ex__` and `torch/_utils.py` (torch 2.3 to 2.15).
"""

from __future__ import annotations

from typing import Any

import torch

from titan_ckpt.parsing.own_objects import set_attributes
from titan_ckpt.parsing.value_build import Builder, Constructor
from titan_ckpt.parsing.value_records import Record, Storage, is_name
from titan_ckpt.parsing.value_torch import rebuilt

_NESTED = ("torch.nested._internal.nested_tensor", "NestedTensor")
_PLAIN = {("torch", "Tensor"): torch.Tensor, ("torch.nn.parameter", "Parameter"): torch.nn.Parameter}
_QUANTISED = {"QInt8Storage": torch.int8, "QUInt8Storage": torch.uint8, "QInt32Storage": torch.int32}


def _sparse(builder: Builder, record: Record) -> torch.Tensor:
    layout, (*parts, size) = builder.value(record.args[0]), builder.value(record.args[1])
    if layout == torch.sparse_coo:
        indices, values, size, *coalesced = (*parts, size)[:4]
        is_coalesced = coalesced[0] if coalesced else None
        return torch.sparse_coo_tensor(
            indices, values, size, device=values.device, check_invariants=True, is_coalesced=is_coalesced
        )
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, size, layout=layout, device=values.device, check_invariants=True
    )


def _nested(builder: Builder, record: Record) -> torch.Tensor:
    """A nested tensor of the older layout: one buffer, and for each component its sizes, strides and offset."""
    buffer, sizes, strides, offsets = builder.args(record)
    if not buffer.dim() == offsets.dim() == 1 or not sizes.dim() == strides.dim() == 2 or sizes.shape != strides.shape:
        raise ValueError("not a nested tensor's buffer, sizes, strides and offsets")
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        reach = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if min(*size, *stride, offset, 0) < 0 or (0 not in size and reach >= len(buffer)):
            raise ValueError(f"a component of {size} that reaches beyond its buffer of {len(buffer)} elements")
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


def _jagged(builder: Builder, record: Record) -> torch.Tensor:
    """A nested tensor of the jagged layout: values, and where each component begins along one dimension."""
    from torch.nested._internal.nested_tensor import NestedTensor  # takes a second, and few values hold one

    given = builder.value(record.args[0])
    dim, values, offsets = given["_ragged_idx"] - 1, given["values"], given["offsets"]
    bounds, lengths = offsets.tolist(), None if given["lengths"] is None else given["lengths"].tolist()
    starts = bounds[:-1]
    ends = bounds[1:] if lengths is None else [a + b for a, b in zip(starts, lengths, strict=True)]
    if not 0 <= dim < values.dim() or any(
        not 0 <= a <= b <= values.shape[dim] for a, b in zip(starts, ends, strict=True)
    ):
        raise ValueError("a nested tensor whose components lie outside of its values")
    found: torch.Tensor = NestedTensor(**given)
    return found


def _quantised(builder: Builder, record: Record) -> torch.Tensor:
    """Numbers of a storage with a scale and a zero point, for all or for each place along an axis."""
    storage, offset, size, stride, (scheme, *how) = (*record.args[:4], builder.value(record.args[4]))
    if not isinstance(storage, Storage) or storage.kind[1] not in _QUANTISED:
        raise ValueError("a quantised tensor of unknown numbers")
    numbers = rebuilt(builder, storage, (offset, size, stride), _QUANTISED[storage.kind[1]])
    if scheme == torch.per_tensor_affine:
        return torch._make_per_tensor_quantized_tensor(numbers, *how)
    scales, zero_points, axis = how
    if not 0 <= axis < numbers.dim() or not scales.numel() == zero_points.numel() == numbers.shape[axis]:
        raise ValueError("a quantised tensor whose scales do not fit its shape")
    return torch._make_per_channel_quantized_tensor(numbers, scales, zero_points, axis)


def _parameter(builder: Builder, record: Record) -> torch.nn.Parameter:
    """A parameter with attributes of the caller's."""
    found = torch.nn.Parameter(builder.value(record.args[0]), requires_grad=bool(builder.value(record.args[1])))
    vars(found).update(_attributes(builder.value(record.args[3])))
    return found


def _wrapper(builder: Builder, record: Record) -> torch.Tensor:
    """A tensor of an allowed class without numbers of its own; its attributes, other tensors among them, are set afterwards."""
    kind = builder.own(record.args[0].call) if is_name(record.args[0]) else None
    if not isinstance(kind, type) or not issubclass(kind, torch.Tensor):
        raise ValueError("not a class of tensors")
    dtype, size, stride, offset, layout, device, requires_grad = map(builder.value, record.args[1:])
    device = torch.device("meta" if torch.device(device).type == "meta" else "cpu")
    make: Any = torch.Tensor._make_wrapper_subclass
    found: torch.Tensor = make(
        kind, size, strides=stride, storage_offset=offset, dtype=dtype, layout=layout, device=device,
        requires_grad=bool(requires_grad),
    )  # fmt: skip
    return found


def _of_type(builder: Builder, record: Record) -> torch.Tensor:
    """`_rebuild_from_type_v2`: a tensor as one of another class, with attributes. Other classes than torch's must be allowed."""
    function, name, args, state = record.args
    make = CONSTRUCTORS.get(function.call) if is_name(function) else None
    if make is None or make is _of_type or not is_name(name):
        raise ValueError("not a way to make a tensor")
    inner = Record(*args)
    inner.call = function.call
    made = make(builder, inner)
    if name.call in _PLAIN or name.call == _NESTED:
        kept: torch.Tensor = (
            made if name.call == _NESTED or type(made) is _PLAIN[name.call] else made.as_subclass(_PLAIN[name.call])
        )
        vars(builder.keep(record, kept)).update(_attributes(builder.value(_without_marks(state))))
        return kept
    kind = builder.own(name.call)
    found: torch.Tensor = made if type(made) is kind else made.as_subclass(kind)
    builder.keep(record, found)
    own = getattr(kind, "__setstate__", None)
    set_attributes(found, builder.value(state), by_own_method=own is not getattr(torch.Tensor, "__setstate__", None))
    return found


def _without_marks(state: Any) -> Any:
    """Attributes without those of `torch.compile`, which its own classes describe; a new tensor gets new ones."""
    if not isinstance(state, dict):
        return state
    return {key: value for key, value in state.items() if not str(key).startswith("_dynamo_")}


def _attributes(state: Any) -> dict[str, Any]:
    if isinstance(state, tuple) and len(state) == 2 and not state[1]:
        state = state[0]
    if state is not None and not isinstance(state, dict):
        raise ValueError("not a tensor's attributes")
    return state or {}


def _dense(builder: Builder, record: Record) -> Any:
    return builder.value(record)


CONSTRUCTORS: dict[tuple[str, str], Constructor] = {
    ("torch._utils", "_rebuild_tensor_v2"): _dense,
    ("torch._utils", "_rebuild_tensor_v3"): _dense,
    ("torch._utils", "_rebuild_sparse_tensor"): _sparse,
    ("torch._utils", "_rebuild_sparse_csr_tensor"): _sparse,
    ("torch._utils", "_rebuild_nested_tensor"): _nested,
    ("torch._utils", "_rebuild_qtensor"): _quantised,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._utils", "_rebuild_wrapper_subclass"): _wrapper,
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): _jagged,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
}
