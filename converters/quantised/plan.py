"""Which tensors of a model are packed, by its config.json and the names and shapes in its files; every contradiction is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from titan_ckpt.converters.quantised.formats import VALUES_PER_SCALE
from titan_ckpt.converters.quantised.store import Float4Groups, Float8Blocks, Packed, Stored
from titan_ckpt.errors import LoadContractError
from titan_ckpt.sharding.placement import Shape

SETTINGS = "quantization_config"
_SCALES, _BLOCKS, _GROUP_SCALES = "_scale_inv", "_blocks", "_scales"
_MAX_BLOCK = 1 << 20


class Tensor(Protocol):
    """A tensor in a file."""

    @property
    def dtype(self) -> str:
        """Its dtype as stored."""

    @property
    def shape(self) -> Shape:
        """Its shape as stored."""

    @property
    def offset(self) -> int:
        """Where its bytes begin in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """A way to pack that is read: `fp8` with its block, or `mxfp4`."""

    name: str
    block: tuple[int, int] = (1, VALUES_PER_SCALE)


def block_format(config: Mapping[str, Any]) -> BlockFormat | None:
    """The format in config.json's `quantization_config`; None if there is none, or none that is read."""
    settings = config.get(SETTINGS)
    if not isinstance(settings, Mapping):
        return None
    if settings.get("quant_method") == "mxfp4":
        return BlockFormat(name="mxfp4")
    block = settings.get("weight_block_size")
    is_block = (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and 1 <= n <= _MAX_BLOCK for n in block)
    )
    if settings.get("quant_method") != "fp8" or not is_block or settings.get("fmt", "e4m3") != "e4m3":
        return None
    assert isinstance(block, list)
    return BlockFormat(name="fp8", block=(block[0], block[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensors:
    """Packed tensors by the names of the plain ones; `parts`: the stored tensors that they are made from."""

    packed: Mapping[str, Packed]
    parts: frozenset[str]


def find_packed(
    found: BlockFormat, tensors: Mapping[str, Tensor], paths: Mapping[str, str], *, where: str
) -> PackedTensors:
    """Pair values and scales; LoadContractError for a part that is missing or of another dtype or shape, or if none is packed."""
    pair = _float8 if found.name == "fp8" else _float4
    pairs = pair(found, tensors, paths, where)
    if not pairs.packed:
        raise LoadContractError(
            f"{where}: config.json has {SETTINGS} for {found.name}, but no tensor is packed so: delete the key if the weights "
            "are plain"
        )
    return pairs


def _float8(found: BlockFormat, tensors: Mapping[str, Tensor], paths: Mapping[str, str], where: str) -> PackedTensors:
    packed: dict[str, Packed] = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) not in tensors:
            raise LoadContractError(f"{where}: {name} has no weight {name.removesuffix(_SCALES)}")
        if not tensor.dtype.startswith("float8_e4m3"):
            continue
        scales = _part(tensors, name + _SCALES, "float32", where)
        if tensor.dtype != "float8_e4m3fn" or len(tensor.shape) != 2:
            raise LoadContractError(
                f"{where}: {name} is {tensor.dtype} of {tensor.shape}, expected a float8_e4m3fn matrix"
            )
        expected = tuple(-(-size // per) for size, per in zip(tensor.shape, found.block, strict=True))
        _check_shape(name + _SCALES, scales, expected, f"{name} {tensor.shape} in blocks of {found.block}", where)
        packed[name] = Float8Blocks(
            name=name,
            values=_stored(tensors, paths, name),
            scales=_stored(tensors, paths, name + _SCALES),
            block=found.block,
        )
    return PackedTensors(packed=packed, parts=frozenset({*packed, *(name + _SCALES for name in packed)}))


def _float4(found: BlockFormat, tensors: Mapping[str, Tensor], paths: Mapping[str, str], where: str) -> PackedTensors:
    packed: dict[str, Packed] = {}
    parts = set()
    for name in tensors:
        for end, other in ((_BLOCKS, _GROUP_SCALES), (_GROUP_SCALES, _BLOCKS)):
            if name.endswith(end):
                _part(tensors, name.removesuffix(end) + other, "uint8", where)
        if not name.endswith(_BLOCKS):
            continue
        base = name.removesuffix(_BLOCKS)
        values, scales = _part(tensors, name, "uint8", where), tensors[base + _GROUP_SCALES]
        if len(values.shape) != 4 or values.shape[-1] != found.block[1] // 2:
            raise LoadContractError(f"{where}: {name} has shape {values.shape}, expected [experts, rows, groups, 16]")
        _check_shape(base + _GROUP_SCALES, scales, values.shape[:-1], f"{name} {values.shape}", where)
        packed[base] = Float4Groups(
            name=base, values=_stored(tensors, paths, name), scales=_stored(tensors, paths, base + _GROUP_SCALES)
        )
        parts |= {name, base + _GROUP_SCALES}
    return PackedTensors(packed=packed, parts=frozenset(parts))


def _part(tensors: Mapping[str, Tensor], name: str, dtype: str, where: str) -> Tensor:
    if name not in tensors:
        raise LoadContractError(f"{where}: {name} is missing: without it the packed values mean nothing")
    if tensors[name].dtype != dtype:
        raise LoadContractError(f"{where}: {name} is {tensors[name].dtype}, expected {dtype}")
    return tensors[name]


def _check_shape(name: str, scales: Tensor, expected: Shape, of: str, where: str) -> None:
    if scales.shape != expected:
        raise LoadContractError(f"{where}: {name} has shape {scales.shape}, expected {expected} for {of}")


def _stored(tensors: Mapping[str, Tensor], paths: Mapping[str, str], name: str) -> Stored:
    return Stored(path=paths[name], offset=tensors[name].offset, shape=tensors[name].shape)
