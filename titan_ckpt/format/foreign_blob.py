"""Locate and check the tensor in a foreign blob, without torch and without running its pickle.

A blob is the output of `torch.save(tensor)`: a ZIP archive whose `data.pkl` has storage, offset and strides, and whose `data/0`
is the storage. DCP stores a dense tensor in its memory order, which need not be row-major.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

from titan_ckpt.errors import DamagedError, UnsafeContentError
from titan_ckpt.format.digest import crc_digest
from titan_ckpt.format.dtypes import ELEMENT_SIZE, can_show
from titan_ckpt.format.manifest import Chunk
from titan_ckpt.format.torch_blob import STORAGE_DTYPE
from titan_ckpt.parsing.json_values import show
from titan_ckpt.parsing.pickle_check import check_pickle
from titan_ckpt.sharding.placement import Shape
from titan_ckpt.sharding.placement import strides as row_major
from titan_ckpt.store.base import Store

_LOCAL_HEADER_BYTES = 30
_PICKLE_BYTES = 1 << 20
WINDOW_BYTES = 8 << 20
_NOT_A_ZIP = (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, OverflowError, struct.error, RuntimeError)
_NOT_A_TENSOR = (KeyError, pickle.UnpicklingError, TypeError, IndexError, AttributeError, MemoryError, RecursionError)


class _Range(io.RawIOBase):
    """A byte range of a stored object as a read-only file."""

    def __init__(self, store: Store, path: str, start: int, length: int) -> None:
        self._store, self._path, self._start, self._length, self._at = store, path, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._length - self._at)
        size = rest if size is None or size < 0 else min(size, rest)
        if size > 2 * WINDOW_BYTES:
            raise ValueError(f"a directory of {size} bytes; torch.save writes a few hundred")
        data = self._store.read(self._path, self._start + self._at, size) if size else b""
        self._at += size
        return data


class _TensorReader(pickle.Unpickler):
    """Reads the pickle of one tensor as the arguments of `_rebuild_tensor_v2/v3`, in plain values."""

    def __init__(self, data: bytes, where: str) -> None:
        check_pickle(data, where=where)
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return lambda *arguments: arguments
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage") and (name.endswith("Storage") or name in ELEMENT_SIZE):
            return f"{module}.{name}"
        raise UnsafeContentError(
            f"{self._where}: contains {module}.{name}, which is not part of a plain tensor; nothing was loaded"
        )

    def persistent_load(self, pid: Any) -> Any:
        return pid


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes `[start, end)` of a file that differ from what torch.save wrote."""

    start: int
    end: int
    message: str


def check_records(store: Store, path: str, start: int, length: int) -> tuple[list[Damage], int]:
    """Check the CRC-32 of each record of a blob: (damages, number of records without CRC, which torch may omit)."""
    damages, unchecked = [], 0
    if length > WINDOW_BYTES:
        file: Any = _Range(store, path, start, length)
    else:
        file = io.BytesIO(store.read(path, start, length))
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if sum(info.compress_size for info in records) > length:
                raise zipfile.BadZipFile("records that overlap")
            ends = sorted({*(info.header_offset for info in records), archive.start_dir, length})
            for info in records:
                has_crc = info.CRC != 0 or not info.file_size
                message = _size_problem(info) or (_record_problem(archive, info) if has_crc else None)
                unchecked += not has_crc and message is None
                if message is not None:
                    at = min(max(info.header_offset, 0), length)
                    end = ends[min(bisect_right(ends, at), len(ends) - 1)]
                    damages.append(Damage(start + at, start + min(end, length), f"record {info.filename!r}: {message}"))
    except _NOT_A_ZIP as error:
        damages.append(Damage(start, start + length, f"not what torch.save wrote: {type(error).__name__}: {error}"))
    return damages, unchecked


def _size_problem(info: zipfile.ZipInfo) -> str | None:
    """torch.save stores records as they are, so that both sizes in the directory are equal."""
    if not info.compress_type and info.file_size != info.compress_size:
        return f"has {info.compress_size} bytes, its directory says {info.file_size}"
    return None


def _record_problem(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> str | None:
    if info.compress_type or info.flag_bits & 1:
        return "is compressed or encrypted, which torch.save never does"
    try:
        with archive.open(info) as record:
            while record.read(WINDOW_BYTES):
                pass
    except _NOT_A_ZIP as error:
        return f"is not what was saved: {error}"
    return None


def locate_payload(store: Store, path: str, chunk: Chunk, dtype: str) -> Chunk:
    """`chunk`, of a tensor of `dtype`, with payload, strides and CRC-32 as found in its blob.

    DamagedError if the blob is not a plain tensor of this dtype and size.
    """
    where = f"{store.where(path)}: {chunk.fqn} at byte {chunk.offset}"
    try:
        with zipfile.ZipFile(_Range(store, path, chunk.offset, chunk.length)) as archive:
            names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if len(names) < len(archive.infolist()):
                raise DamagedError(f"{where}: not a tensor that torch.save wrote: two records of one name")
            data = names["data/0"]
            if names["data.pkl"].file_size > _PICKLE_BYTES or any(i.compress_type for i in names.values()):
                raise DamagedError(
                    f"{where}: not a tensor that torch.save wrote: compressed, or its pickle is too large"
                )
            pickled = names["data.pkl"]
            code = store.read(path, chunk.offset + _start_of(store, path, chunk, pickled, where), pickled.file_size)
            if pickled.CRC not in (0, zlib.crc32(code)):  # 0: torch was configured to omit it
                raise DamagedError(f"{where}: record {pickled.filename!r} is not what was saved: its CRC-32 differs")
            arguments = _TensorReader(code, where).load()
            is_conj, is_neg = _views(arguments, dtype, where)
            strides = _strides(arguments, chunk, where)
            start = _start_of(store, path, chunk, data, where)
            _check_storage(names, chunk, dtype, where)
    except (*_NOT_A_ZIP, *_NOT_A_TENSOR) as error:
        raise DamagedError(f"{where}: not a tensor that torch.save wrote: {type(error).__name__}: {error}") from error
    crc = crc_digest(data.CRC) if _reach(chunk.box.sizes, strides) == chunk.box.num_elements else None
    return replace(
        chunk,
        payload_offset=start,
        payload_length=data.file_size,
        strides=strides,
        digest=crc,
        is_conj=is_conj,
        is_neg=is_neg,
    )


def _reach(sizes: Shape, strides: Shape | None) -> int:
    """Elements from the first to the last of a tensor: fewer than its storage has if they overlap."""
    if 0 in sizes:
        return -1
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides or row_major(sizes), strict=True))


def _check_storage(records: dict[str, zipfile.ZipInfo], chunk: Chunk, dtype: str, where: str) -> None:
    """DamagedError unless the storage has the bytes of its elements, little-endian."""
    needed, found = chunk.box.num_elements * ELEMENT_SIZE[dtype], records["data/0"].file_size
    if found != needed:
        raise DamagedError(
            f"{where}: its storage has {found} bytes; {chunk.box.sizes} elements of {dtype} take {needed}"
        )
    order = records.get("byteorder")
    if order is not None and order.file_size != len("little"):
        raise DamagedError(
            f"{where}: was written on a big-endian machine, whose bytes are not turned around here: load it with torch and save "
            "it again"
        )


def _start_of(store: Store, path: str, chunk: Chunk, info: zipfile.ZipInfo, where: str) -> int:
    """Offset of a record's bytes in its blob; DamagedError if they reach past its end."""
    if not 0 <= info.header_offset <= chunk.length - _LOCAL_HEADER_BYTES:
        raise DamagedError(f"{where}: not a tensor that torch.save wrote: {info.filename!r} is not inside the blob")
    header = store.read(path, chunk.offset + info.header_offset, _LOCAL_HEADER_BYTES)
    name_length, extra_length = struct.unpack_from("<HH", header, 26)
    start = int(info.header_offset + _LOCAL_HEADER_BYTES + name_length + extra_length)
    if info.file_size > chunk.length - start:
        raise DamagedError(f"{where}: not a tensor that torch.save wrote: {info.filename!r} reaches past the blob")
    return start


def _views(arguments: Any, dtype: str, where: str) -> tuple[bool, bool]:
    """Whether the values show as conjugates and as negatives. DamagedError unless the pickled tensor has `dtype`."""
    storage, of_v2 = arguments[0][1], arguments[6:]
    if storage.endswith("UntypedStorage"):
        found, flags = arguments[6].removeprefix("torch."), arguments[7:]
    else:
        found, flags = STORAGE_DTYPE.get(storage.rpartition(".")[2], storage), of_v2
    if found != dtype:
        raise DamagedError(
            f"{where}: the index says {show(dtype)}, the stored tensor is {show(found)}: one of them is damaged"
        )
    views = flags[0] if flags and flags[0] else {}
    are_known = type(views) is dict and views.keys() <= {"conj", "neg"} and all(each is True for each in views.values())
    is_conj, is_neg = (are_known and mark in views for mark in ("conj", "neg"))
    if any(flags[1:]) or not are_known or not can_show(dtype, is_conj=is_conj, is_neg=is_neg):
        raise DamagedError(f"{where}: stored as {show(flags[0])} of {dtype}; torch has no such view")
    return is_conj, is_neg


def _strides(arguments: Any, chunk: Chunk, where: str) -> Shape | None:
    """The stored strides, None for row-major. DamagedError if the tensor is not all of its storage."""
    storage, offset, found, strides = arguments[:4]
    if any(type(number) is not int for number in (storage[4], offset, *found, *strides)):
        raise DamagedError(f"{where}: stored with sizes {show(found)} and strides {show(strides)}, not whole numbers")
    num_elements = storage[4] // (ELEMENT_SIZE[arguments[6][6:]] if storage[1].endswith("UntypedStorage") else 1)
    if tuple(found) != chunk.box.sizes or offset != 0 or num_elements != chunk.box.num_elements:
        raise DamagedError(
            f"{where}: stored with sizes {show(found)}, offset {show(offset)}, {show(num_elements)} elements; "
            f"expected {chunk.box.sizes}"
        )
    pairs = zip(strides, row_major(chunk.box.sizes), found, strict=True)
    if min(strides, default=0) < 0 or _reach(tuple(found), tuple(strides)) > max(num_elements, 1):
        raise DamagedError(
            f"{where}: stored with strides {show(strides)}, which reach past its {num_elements} elements"
        )
    is_row_major = 0 in found or all(a == b for a, b, size in pairs if size > 1)
    return None if is_row_major else tuple(strides)
