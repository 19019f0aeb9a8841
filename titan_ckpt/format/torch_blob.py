"""A chunk's blob: the bytes of `torch.save(tensor)`, as an envelope around a payload that is never copied.

A blob is a ZIP archive with stored (uncompressed) members: `data.pkl` rebuilds the tensor, `data/0` is the raw payload,
little-endian and row-major. `Envelope.prefix` is everything before the payload, `Envelope.suffix` everything after it; both
depend on dtype and sizes only. If a blob starts at a multiple of 64, so does its payload. The CRC fields are zero, as with
`torch.serialization.set_crc32_options(False)`: torch does not check them, and our digests are stronger.

Formats: PKWARE APPNOTE 6.3 (ZIP, ZIP64); torch/serialization.py (`_save`); pickle protocol 2.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.pickle_write import INT, call_global, get_global, text, tuple_of
from titan_ckpt.sharding.placement import Box, Shape

BLOB_ALIGNMENT = 64
_MAX_32 = 0xFFFFFFFF
_LEGACY_STORAGE = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage", "uint8": "ByteStorage",
    "bool": "BoolStorage", "complex64": "ComplexFloatStorage", "complex128": "ComplexDoubleStorage",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The bytes before and after a payload of `payload_length` bytes."""

    prefix: bytes
    suffix: bytes
    payload_length: int

    @property
    def length(self) -> int:
        """Bytes of the whole blob."""
        return len(self.prefix) + self.payload_length + len(self.suffix)


@dataclass(frozen=True, slots=True)
class _Member:
    name: bytes
    offset: int
    size: int


def align(offset: int) -> int:
    """The first offset at or after `offset` where a blob may start."""
    return -(-offset // BLOB_ALIGNMENT) * BLOB_ALIGNMENT


@lru_cache(maxsize=4096)
def envelope(dtype: str, sizes: Shape) -> Envelope:
    """The envelope of a contiguous tensor of `dtype` (a name such as `bfloat16`) and `sizes`."""
    payload_length = Box.whole(sizes).num_elements * ELEMENT_SIZE[dtype]
    prefix = bytearray()
    members = []
    for name, content in (
        (b"archive/data.pkl", _tensor_pickle(dtype, sizes)),
        (b"archive/byteorder", b"little"),
        (b"archive/version", b"3\n"),
    ):
        members.append(_Member(name, len(prefix), len(content)))
        prefix += _local_header(name, len(content), padding=0) + content
    data = _Member(b"archive/data/0", len(prefix), payload_length)
    bare = len(prefix) + len(_local_header(data.name, data.size, padding=0))
    prefix += _local_header(data.name, data.size, padding=_padding(bare))
    end = len(prefix) + payload_length
    return Envelope(prefix=bytes(prefix), suffix=_directory([*members, data], end), payload_length=payload_length)


def zip_archive(records: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A ZIP archive of stored records, (name, content) each."""
    found, members = bytearray(), []
    for name, content in records:
        members.append(_Member(name, len(found), len(content)))
        found += _local_header(name, len(content), padding=0) + content
    return bytes(found) + _directory(members, len(found))


def _padding(bare: int) -> int:
    """Bytes of an extra field (at least its 4-byte header) that bring `bare` to a multiple of BLOB_ALIGNMENT."""
    return align(bare + 4) - bare


def _local_header(name: bytes, size: int, *, padding: int) -> bytes:
    zip64 = size >= _MAX_32
    extra = struct.pack("<HHQQ", 1, 16, size, size) if zip64 else b""
    if padding:
        extra += struct.pack("<2sH", b"FB", padding - 4) + b"Z" * (padding - 4)
    shown = _MAX_32 if zip64 else size
    fields = (b"PK\x03\x04", 45 if zip64 else 20, 0x0800, 0, 0, 0, 0, shown, shown, len(name), len(extra))
    return struct.pack("<4sHHHHHIIIHH", *fields) + name + extra


def _directory(members: list[_Member], start: int) -> bytes:
    """The central directory, at byte `start` of the blob, and the end records."""
    entries = b"".join(_directory_entry(member) for member in members)
    zip64 = b""
    if start >= _MAX_32:
        record = struct.pack(
            "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, len(members), len(members), len(entries), start
        )
        zip64 = record + struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(entries), 1)
    shown = min(start, _MAX_32)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(members), len(members), len(entries), shown, 0)
    return entries + zip64 + end


def _directory_entry(member: _Member) -> bytes:
    zip64 = member.size >= _MAX_32
    extra = struct.pack("<HHQQ", 1, 16, member.size, member.size) if zip64 else b""
    shown = _MAX_32 if zip64 else member.size
    version = 45 if zip64 else 20
    head = struct.pack("<4sHHHHHHIII", b"PK\x01\x02", version, version, 0x0800, 0, 0, 0, 0, shown, shown)
    return head + struct.pack("<HHHHHII", len(member.name), len(extra), 0, 0, 0, 0, member.offset) + member.name + extra


def _tensor_pickle(dtype: str, sizes: Shape) -> bytes:
    """Protocol 2 pickle of a contiguous tensor whose storage is member `data/0`."""
    num_elements = Box.whole(sizes).num_elements
    strides = _contiguous_strides(sizes)
    legacy = _LEGACY_STORAGE.get(dtype)
    if legacy is not None:
        storage = _persistent("torch", legacy, num_elements)
        arguments = [storage, INT(0), _shape(sizes), _shape(strides), b"\x89", _ORDERED_DICT]
        rebuild = "_rebuild_tensor_v2"
    else:
        storage = _persistent("torch.storage", "UntypedStorage", num_elements * ELEMENT_SIZE[dtype])
        arguments = [
            storage,
            INT(0),
            _shape(sizes),
            _shape(strides),
            b"\x89",
            _ORDERED_DICT,
            get_global("torch", dtype),
        ]
        rebuild = "_rebuild_tensor_v3"
    return b"\x80\x02" + call_global("torch._utils", rebuild, *arguments) + b"."


_ORDERED_DICT = call_global("collections", "OrderedDict")


def _persistent(module: str, storage: str, num_elements: int) -> bytes:
    return tuple_of(text("storage"), get_global(module, storage), text("0"), text("cpu"), INT(num_elements)) + b"Q"


def _shape(values: Shape) -> bytes:
    return tuple_of(*(INT(value) for value in values))


def _contiguous_strides(sizes: Shape) -> Shape:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
