"""Rebuild wrapper subclasses from their inner tensors: those of known classes, or of classes that the caller allows."""

from __future__ import annotations

import importlib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from titan_ckpt.errors import DamagedError, UnsafeContentError
from titan_ckpt.format.structure import MARK, Mark, mark_of
from titan_ckpt.sharding.placement import strides

if TYPE_CHECKING:
    import torch

_QUANTIZATION, _FORMATS = "torchao.quantization", "torchao.prototype.mx_formats"
_WORKFLOWS = f"{_QUANTIZATION}.quantize_.workflows"
_CLASSES = {
    _QUANTIZATION: "Int8Tensor Float8Tensor IntxUnpackedToInt8Tensor Int4Tensor Int4PlainInt32Tensor Int4TilePackedTo4dTensor",
    f"{_WORKFLOWS}.int8.int8_tensor": "Int8Tensor QuantizeTensorToInt8Kwargs",
    f"{_WORKFLOWS}.float8.float8_tensor": "Float8Tensor QuantizeTensorToFloat8Kwargs",
    f"{_WORKFLOWS}.intx.intx_unpacked_to_int8_tensor": "IntxUnpackedToInt8Tensor",
    f"{_WORKFLOWS}.int4.int4_tensor": "Int4Tensor",
    f"{_WORKFLOWS}.nf4.nf4_tensor": "NF4Tensor SubclassTensorArgs",
    f"{_QUANTIZATION}.quantize_.common.kernel_preference": "KernelPreference",
    f"{_QUANTIZATION}.quant_primitives": "MappingType ZeroPointDomain",
    f"{_QUANTIZATION}.granularity": "PerRow PerTensor PerGroup PerAxis PerBlock PerToken",
    "torchao.float8.inference": "Float8MMConfig",
    "torchao.float8.float8_training_tensor": "Float8TrainingTensor LinearMMConfig ScaledMMConfig GemmInputRole",
    "torchao.sparsity.blocksparse": "BlockSparseTensor",
    f"{_FORMATS}.mx_tensor": "MXTensor QuantizeTensorToMXKwargs",
    f"{_FORMATS}.config": "ScaleCalculationMode",
    f"{_FORMATS}.nvfp4_tensor": "NVFP4Tensor QuantizeTensorToNVFP4Kwargs",
    "torchao.prototype.quantized_training.int8": "Int8QuantizedTrainingLinearWeight",
    "torchao.optim.subclass_8bit": "OptimState8bit",
    "torchao.optim.subclass_4bit": "OptimState4bit",
    "torchao.optim.subclass_fp8": "OptimStateFp8",
}


class _Known(Mapping[str, Any]):
    """Classes of torch's own libraries that a checkpoint may name: imported when one is asked for, if they are installed."""

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = name.rpartition(".")
        if attribute not in _CLASSES.get(module, "").split():
            raise KeyError(name)
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise KeyError(name) from error

    def __iter__(self) -> Iterator[str]:
        return (f"{module}.{name}" for module, names in _CLASSES.items() for name in names.split())

    def __len__(self) -> int:
        return sum(len(names.split()) for names in _CLASSES.values())


def known_and(*allowed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Classes by name: those that are `allowed`, and the known ones."""
    found: ChainMap[str, Any] = ChainMap()
    found.maps = [*allowed, _Known()]  # type: ignore[list-item]
    return found


def put_together(state: Any, allowed: Mapping[str, Any], where: str) -> Any:
    """`state` with the tensors that its mappings of parts make, in their place. DamagedError if it is too deep."""
    try:
        return _put_together(state, allowed, where)
    except RecursionError as error:
        raise DamagedError(f"{where}: nested too deeply to be put together; read its parts by name") from error


def _put_together(state: Any, allowed: Mapping[str, Any], where: str) -> Any:
    if isinstance(state, list | tuple):
        for place, value in enumerate(state):
            if isinstance(value, dict | list | tuple) and (made := _put_together(value, allowed, where)) is not value:
                state = _replaced(state, place, made)
        return state
    if not isinstance(state, dict):
        return state
    mark = mark_of(state.get(MARK))
    for key, value in state.items():
        if key != MARK and isinstance(value, dict | list | tuple):
            state[key] = _put_together(value, allowed, where)
    return state if mark is None else _tensor(state, mark, allowed, where)


def _replaced(items: Any, place: int, value: Any) -> Any:
    if isinstance(items, list):
        items[place] = value
        return items
    return (*items[:place], value, *items[place + 1 :])


def _tensor(parts: dict[str, Any], mark: Mark, allowed: Mapping[str, Any], where: str) -> Any:
    """The tensor; the mapping of its parts as it is, if its shards have parts of their own that differ."""
    if set(parts) != {*mark.parts, MARK}:
        raise DamagedError(f"{where}: a {mark.name} with the parts {sorted(parts)}, expected {list(mark.parts)}")
    kind = known_and(allowed).get(mark.name)
    if kind is None:
        short = mark.name.rpartition(".")[2]
        raise UnsafeContentError(
            f"{where} holds tensors of {mark.name}, which is not known to be safe, or not installed; read their parts by name, "
            f"or allow the class: allow=[{short}]"
        )
    tensors = {name: parts[name] for name in mark.parts}
    for name, num_dims in mark.own.items():
        tensors[name] = one_for_all(tensors[name], num_dims)
    if any(each is None for each in tensors.values()):
        return parts
    try:
        return kind.__tensor_unflatten__(tensors, _on_cpu(mark.context), mark.shape, strides(mark.shape))
    except Exception as error:
        raise DamagedError(
            f"{where}: a {mark.name} cannot be made of its parts: {type(error).__name__}: {error}"
        ) from error


def _on_cpu(context: Any) -> Any:
    """A context with the device where the parts are now, in place of the one that the tensor was on."""
    import torch  # most tools run without

    if isinstance(context, torch.device):
        return torch.device("cpu")
    if type(context) in (list, tuple):
        return type(context)(map(_on_cpu, context))
    if type(context) is dict:
        return {key: _on_cpu(each) for key, each in context.items()}
    if is_dataclass(context) and not isinstance(context, type):
        devices = [each.name for each in fields(context) if isinstance(getattr(context, each.name), torch.device)]
        return replace(context, **dict.fromkeys(devices, torch.device("cpu"))) if devices else context
    return context


def one_for_all(stored: torch.Tensor, num_dims: int) -> torch.Tensor | None:
    """The value of a part of which every shard has its own, with `num_dims` dimensions; None if they differ."""
    import torch  # most tools run without

    rows = stored.reshape(-1, *stored.shape[max(stored.dim() - num_dims, 0) :])
    if not rows.numel():
        return None
    raw = rows.reshape(len(rows), -1).contiguous().view(torch.uint8)
    return rows[0] if bool((raw == raw[:1]).all()) else None
