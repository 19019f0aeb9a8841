"""Read and write safetensors headers; every offset is checked before it is used, and a written header is byte-identical.

Format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data, which the
tensors cover without gap or overlap (https://huggingface.co/docs/safetensors). Offsets count from the end of the header.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

from titan_ckpt.errors import DamagedError, PlanError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.parsing.json_values import JsonValue, parse_json, show
from titan_ckpt.sharding.placement import Shape
from titan_ckpt.store.base import Store

MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
ALIGNMENT = 8
METADATA_KEY = "__metadata__"
MAX_DIMENSIONS = 64
_MOST = (1 << 60) - 1

DTYPE_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_OTHER_FORMATS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file it stands for: run `git lfs pull`, or download it again",
    b"PK\x03\x04": "a zip archive (a torch file?), not safetensors",
    b"\x80\x02": "a pickle, not safetensors",
    b"GGUF": "a GGUF file, not safetensors",
    b"<!DOCTYPE": "a web page, not safetensors: the download failed",
    b"<html": "a web page, not safetensors: the download failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor at bytes `[offset, offset + length)` of a safetensors file."""

    name: str
    dtype: str
    shape: Shape
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A checked header; tensors are in byte order, `size_bytes` is where the data starts."""

    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]
    size_bytes: int


def read_header(store: Store, path: str) -> Header:
    """Read and check the header of `path`; DamagedError unless it is a complete, consistent safetensors file."""
    size_bytes = store.stat(path).size_bytes
    where = store.where(path)
    start = store.read(path, 0, min(size_bytes, 64))
    length = header_length(start, size_bytes, where)
    return parse_header(store.read(path, LENGTH_BYTES, length), size_bytes=size_bytes, where=where)


def header_length(start: bytes, size_bytes: int, where: str) -> int:
    """Length of the JSON from the first 8 bytes, checked against the file's size."""
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if len(start) < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size_bytes - LENGTH_BYTES):
        # Not before: a length of 640 starts with the same bytes as a pickle.
        for magic, text in _OTHER_FORMATS.items():
            if start.startswith(magic):
                _damaged(where, text)
    if len(start) < LENGTH_BYTES:
        _damaged(where, f"{size_bytes} bytes are too few for a safetensors file: it is empty or truncated")
    if length > MAX_HEADER_BYTES:
        _damaged(where, f"announces a header of {length} bytes (limit {MAX_HEADER_BYTES}): not a safetensors file")
    if LENGTH_BYTES + length > size_bytes:
        _damaged(where, f"announces a header of {length} bytes but has only {size_bytes}: truncated")
    return length


def parse_header(text: bytes, *, size_bytes: int, where: str) -> Header:
    """Parse the header `text` of a file of `size_bytes`."""
    if not text.startswith(b"{"):
        _damaged(where, "the header is not a JSON object: not a safetensors file")
    content: dict[str, Any] = parse_json(text, where)
    metadata = content.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _damaged(where, f"{METADATA_KEY} is not a table of strings")
    data_start = LENGTH_BYTES + len(text)
    tensors = sorted(
        (_parse_tensor(name, JsonValue(entry, where, show(name)[1:-1]), data_start) for name, entry in content.items()),
        key=lambda tensor: (tensor.offset, tensor.length),
    )
    _check_cover(tensors, data_start, size_bytes, where)
    return Header(tensors=tuple(tensors), metadata=metadata, size_bytes=data_start)


def _parse_tensor(name: str, entry: JsonValue, data_start: int) -> StoredTensor:
    code, shape, offsets = (
        entry["dtype"].text(),
        entry["shape"].wholes(0, _MOST),
        entry["data_offsets"].wholes(0, _MOST),
    )
    if len(shape) > MAX_DIMENSIONS:
        entry["shape"].fail(f"at most {MAX_DIMENSIONS} dimensions")
    if len(offsets) != 2:
        entry["data_offsets"].fail("[start, stop]")
    if code not in _DTYPES:
        raise PlanError(f"{entry.where}: {name} has dtype {show(code)}; readable are {', '.join(sorted(_DTYPES))}")
    start, stop = offsets
    length = prod(shape) * ELEMENT_SIZE[_DTYPES[code]]
    if stop - start != length:
        _damaged(
            entry.where,
            f"{name}: {code} of shape {tuple(shape)} takes {show(length)} bytes, offsets [{start}, {stop}] give {stop - start}",
        )
    return StoredTensor(name=name, dtype=_DTYPES[code], shape=tuple(shape), offset=data_start + start, length=length)


def _check_cover(tensors: Sequence[StoredTensor], data_start: int, size_bytes: int, where: str) -> None:
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            problem = "overlaps the tensor before it" if tensor.offset < position else "leaves a gap before it"
            _damaged(where, f"{tensor.name} {problem}: starts at byte {tensor.offset}, expected {position}")
        position += tensor.length
        if position > size_bytes:
            _damaged(where, f"{tensor.name} ends at byte {position} of a file of {size_bytes} bytes: truncated")
    if position != size_bytes:
        _damaged(where, f"{size_bytes - position} bytes follow the last tensor: not a file that the header describes")


def encode_header(tensors: Iterable[tuple[str, str, Shape]], metadata: Mapping[str, str]) -> bytes:
    """Encode the header of `tensors` (name, dtype, shape) in the given order, padded to 8 bytes."""
    content: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        if dtype not in DTYPE_CODES:
            raise PlanError(f"{name}: safetensors has no dtype {dtype}; choose another with --dtype")
        stop = position + prod(shape) * ELEMENT_SIZE[dtype]
        content[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise PlanError(f"a safetensors header of {len(text)} bytes is past the limit of {MAX_HEADER_BYTES}")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _damaged(where: str, text: str) -> NoReturn:
    raise DamagedError(f"{where}: {text}")
