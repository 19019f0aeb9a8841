"""Check a file of `torch.save` before torch reads it: no record lies, repeats, unpacks or differs from its CRC-32, and each
storage has its bytes.

torch's own reader trusts the number of elements in the pickle: a storage longer than its record is read past its end, and a
compressed record is unpacked whatever it unpacks to. It checks no CRC-32 either.
Formats: torch/serialization.py (`_save`, `_legacy_save`); PKWARE APPNOTE 6.3.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from typing import Any, BinaryIO

from titan_ckpt.errors import DamagedError, TitanError
from titan_ckpt.parsing.json_values import show
from titan_ckpt.parsing.pickle_check import check_pickle

MAX_PICKLE_BYTES = 64 << 20
MAX_RECORDS = 1 << 20
MAX_NAME = 200
WINDOW_BYTES = 8 << 20
_ZIP, _LOCAL_HEADER_BYTES = b"PK\x03\x04", 30
_LEGACY_PICKLES = 4  # magic number, protocol version, system information, the object
# Element sizes of torch's storage classes, in bytes.
_STORAGES = {
    "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "LongStorage": 8, "IntStorage": 4,
    "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1, "BoolStorage": 1, "ComplexDoubleStorage": 16,
    "ComplexFloatStorage": 8, "QUInt8Storage": 1, "QInt8Storage": 1, "QInt32Storage": 4, "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1, "UntypedStorage": 1,
}  # fmt: skip


def check_torch_file(file: BinaryIO, *, where: str, are_surrogates_allowed: bool = False) -> None:
    """Read directory and pickle of a torch file. DamagedError unless every storage that it names is as long as its record.

    `are_surrogates_allowed`: text may have half of a surrogate pair, as Python's names of files that are not UTF-8 have.
    """
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(len(_ZIP))
    try:
        if head == _ZIP:
            _check_zip(file, size_bytes, where, are_surrogates_allowed)
        elif head[:1] != pickle.PROTO:
            raise DamagedError(f"{where}: not a torch file: it begins with neither a zip archive nor a pickle")
        else:
            file.seek(0)
            _check_legacy(file.read(MAX_PICKLE_BYTES), size_bytes, where)
    except TitanError:
        raise
    except Exception as error:  # whatever a broken directory or pickle makes the standard library raise
        raise DamagedError(f"{where}: not a whole torch file: {type(error).__name__}: {show(str(error))}") from error


def _check_zip(file: BinaryIO, size_bytes: int, where: str, are_surrogates_allowed: bool) -> None:
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        sizes = {info.filename: info.file_size for info in records}
        if len(sizes) < len(records) or len(records) > MAX_RECORDS:
            raise DamagedError(f"{where}: {len(records)} records with {len(sizes)} names: not a file of torch.save")
        if any(info.compress_type or info.flag_bits & 1 for info in records):
            raise DamagedError(f"{where}: has compressed or encrypted records, which torch.save never writes")
        if sum(sizes.values()) > size_bytes or any(i.header_offset + i.file_size > size_bytes for i in records):
            raise DamagedError(f"{where}: its records are longer than the file: damaged, or not a file of torch.save")
        name = next((name for name in sizes if name.endswith("/data.pkl")), None)
        if name is None or sizes[name] > MAX_PICKLE_BYTES:
            raise DamagedError(
                f"{where}: has no data.pkl of at most {MAX_PICKLE_BYTES} bytes: not a file of torch.save"
            )
        _check_crcs(archive, records, where)
        folder = name.removesuffix("data.pkl")
        pickled = _record(file, archive.getinfo(name))
        for key, needed in _storages(pickled, where, are_surrogates_allowed).items():
            found = sizes.get(f"{folder}data/{key}")
            if found is None or found < needed:
                raise DamagedError(f"{where}: storage {show(key)} needs {needed} bytes, its record has {found}")


def _check_crcs(archive: zipfile.ZipFile, records: list[zipfile.ZipInfo], where: str) -> None:
    """DamagedError if a record is not what its CRC-32 says; 0 stands for one that torch was told not to compute."""
    for info in records:
        if not info.CRC:
            continue
        try:
            with archive.open(info) as record:
                while record.read(WINDOW_BYTES):
                    pass
        except zipfile.BadZipFile as error:
            raise DamagedError(
                f"{where}: record {show(info.filename)} is not what was saved: {error}. Nothing was read; "
                "use another copy of the file"
            ) from error


def _record(file: BinaryIO, info: zipfile.ZipInfo) -> bytes:
    """The bytes of a record."""
    file.seek(info.header_offset)
    name_length, extra_length = struct.unpack_from("<HH", file.read(_LOCAL_HEADER_BYTES), 26)
    file.seek(name_length + extra_length, os.SEEK_CUR)
    return file.read(info.file_size)


def _check_legacy(data: bytes, size_bytes: int, where: str) -> None:
    """The format before torch 1.6: pickles one after the other, then the storages."""
    start = 0
    for number in range(_LEGACY_PICKLES):
        end = start + check_pickle(data[start:], where=where)
        if number == _LEGACY_PICKLES - 1:
            needed = sum(_storages(data[start:end], where).values())
            if needed > size_bytes - end:
                raise DamagedError(
                    f"{where}: its storages need {needed} bytes, but {size_bytes - end} follow the pickle"
                )
        start = end


def _storages(data: bytes, where: str, are_surrogates_allowed: bool = False) -> dict[str, int]:
    """Bytes of each storage that a pickle names, by key."""
    check_pickle(data, where=where, are_surrogates_allowed=are_surrogates_allowed)
    reader = _Reader(data, where)
    reader.load()
    return reader.storages


class _Inert:
    """Stands for any class or function of a pickle, and for what it makes; does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any) -> _Inert:
        return self

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """As of a list."""

    def extend(self, _: Any) -> None:
        """As of a list."""

    def add(self, _: Any) -> None:
        """As of a set."""


class _Member(_Inert):
    """Stands for what `getattr` gives: a class inside of another one, a method, a member of an Enum."""


def _member(*_: Any) -> type[_Inert]:
    return _Member


class _Reader(pickle.Unpickler):
    """Reads the storages that a pickle names; every class and function in it is replaced by one that does nothing."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        self._where = where
        self.storages: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        if len(module) + len(name) > MAX_NAME:  # torch searches its own message for names, in quadratic time
            raise DamagedError(f"{self._where}: names a class of {len(module) + len(name)} characters")
        if module in ("torch", "torch.storage", "torch.cuda") and name in _STORAGES:
            return _STORAGES[name]
        if module in ("builtins", "__builtin__") and name == "getattr":
            return _member
        return type(name.encode("ascii", "replace").decode() or "?", (_Inert,), {})

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] not in ("storage", b"storage"):
            raise DamagedError(f"{self._where}: names {show(pid)}, which is not a storage")
        size, key, num_elements = pid[1], pid[2], pid[4]
        if type(size) is not int or type(key) is not str or type(num_elements) is not int or num_elements < 0:
            raise DamagedError(f"{self._where}: names {show(pid)}, which is not a storage")
        self.storages[key] = max(self.storages.get(key, 0), size * num_elements)
        return _Inert()
