"""The file of `torch.save` around a pickled value: a ZIP archive with `data.pkl`, and a record for each storage of a tensor."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from functools import lru_cache

from titan_ckpt.errors import DamagedError
from titan_ckpt.parsing.torch_archive import check_torch_file
from titan_ckpt.parsing.zip_write import zip_archive

_HEAD_BYTES, _SIZE_AT = 30, 18
_NAME = b"archive/data.pkl"


def write_archive(pickled: bytes) -> bytes:
    """The file for a value without tensors."""
    head, tail = _around(len(pickled))
    return head + pickled + tail


@lru_cache(maxsize=4096)
def _around(length: int) -> tuple[bytes, bytes]:
    """What comes before and after a pickle of that length; it has no sum over the content."""
    blank = bytes(length)
    data = zip_archive([(_NAME, blank), (b"archive/byteorder", b"little"), (b"archive/version", b"3\n")])
    start = _HEAD_BYTES + len(_NAME)
    return data[:start], data[start + length :]


def read_archive(data: bytes, *, where: str) -> tuple[bytes, Mapping[str, memoryview]]:
    """The pickle, and the bytes of each storage by key. DamagedError if the file is not whole, or packed."""
    plain = _plain_pickle(data)
    if plain is not None:
        return plain, {}
    check_torch_file(io.BytesIO(data), where=where, are_surrogates_allowed=True)
    if not data.startswith(b"PK"):
        raise DamagedError(f"{where}: in the format before torch 1.6, which no checkpoint of DCP has")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        folder = next(name for name in archive.namelist() if name.endswith("/data.pkl")).removesuffix("data.pkl")
        order = next((info for info in archive.infolist() if info.filename == f"{folder}byteorder"), None)
        if order is not None and bytes(_record(data, order, where)) != b"little":
            raise DamagedError(f"{where}: written on a big-endian machine")
        storages = {
            info.filename.removeprefix(f"{folder}data/"): _record(data, info, where)
            for info in archive.infolist()
            if info.filename.startswith(f"{folder}data/")
        }
        return bytes(_record(data, archive.getinfo(f"{folder}data.pkl"), where)), storages


def _plain_pickle(data: bytes) -> bytes | None:
    """The pickle in a file of `write_archive`; None for any other file."""
    if len(data) < _HEAD_BYTES + len(_NAME):
        return None
    (size,) = struct.unpack_from("<I", data, _SIZE_AT)
    pickled = data[_HEAD_BYTES + len(_NAME) :][:size]
    return pickled if write_archive(pickled) == data else None


def _record(data: bytes, info: zipfile.ZipInfo, where: str) -> memoryview:
    name_length, extra_length = struct.unpack_from("<HH", data, info.header_offset + 26)
    start = info.header_offset + _HEAD_BYTES + name_length + extra_length
    if start + info.file_size > len(data):
        raise DamagedError(f"{where}: record {info.filename!r} reaches past the end")
    return memoryview(data)[start : start + info.file_size]
