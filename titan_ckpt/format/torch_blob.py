"""A chunk's blob: the bytes of `torch.save(tensor)`, as an envelope around a payload that is never copied.

A blob is a ZIP archive with stored (uncompressed) members: `data.pkl` rebuilds the tensor, `data/0` is the raw payload,
little-endian and row-major. `Envelope.prefix` is everything before the payload, `Envelope.suffix` everything after it; both
depend on dtype and sizes only. If a blob starts at a multiple of 64, so does its payload. The CRC fields are zero, as with
`torch.serialization.set_crc32_options(False)`: torch does not check them, and our digests are stronger.

Formats: PKWARE APPNOTE 6.3 (ZIP, ZIP64); torch/serialization.py (`_save`); pickle protocol 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.pickle_write import INT, call_global, get_global, text, tuple_of
from titan_ckpt.parsing.zip_write import ZipMember, directory, local_header
from titan_ckpt.sharding.placement import Box, Shape

BLOB_ALIGNMENT = 64
_LEGACY_STORAGE = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage", "uint8": "ByteStorage",
    "bool": "BoolStorage", "complex64": "ComplexFloatStorage", "complex128": "ComplexDoubleStorage",
}  # fmt: skip
STORAGE_DTYPE = {storage: dtype for dtype, storage in _LEGACY_STORAGE.items()}
"""The dtype of each of torch's typed storages."""


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
        members.append(ZipMember(name, len(prefix), len(content)))
        prefix += local_header(name, len(content), padding=0) + content
    data = ZipMember(b"archive/data/0", len(prefix), payload_length)
    bare = len(prefix) + len(local_header(data.name, data.size, padding=0))
    prefix += local_header(data.name, data.size, padding=_padding(bare))
    end = len(prefix) + payload_length
    return Envelope(prefix=bytes(prefix), suffix=directory([*members, data], end), payload_length=payload_length)


def _padding(bare: int) -> int:
    """Bytes of an extra field (at least its 4-byte header) that bring `bare` to a multiple of BLOB_ALIGNMENT."""
    return align(bare + 4) - bare


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
