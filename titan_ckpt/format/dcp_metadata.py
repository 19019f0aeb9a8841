"""DCP's own index, `.metadata`: written for plain `dcp.load`, read from foreign checkpoints.

It is a pickle. The unpickler here accepts DCP's record classes alone and replaces each by a plain stand-in, so no code of the
pickle runs. Format: torch/distributed/checkpoint/metadata.py and filesystem.py (torch 2.3 to 2.13).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from titan_ckpt.errors import DamagedError, UnsafeContentError, UsageError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import RAW, ChunkTable, FileEntry, Manifest, ObjectEntry, TensorEntry
from titan_ckpt.format.manifest_json import MAX_RATIO
from titan_ckpt.format.pickle_check import check_pickle
from titan_ckpt.format.pickle_write import INT, POP, get, get_global, gets, ints, put, rows, text, tuple_of
from titan_ckpt.location import check_relative
from titan_ckpt.sharding.placement import Box
from titan_ckpt.sharding.repeating_columns import Int64s

FOREIGN_ATTEMPT = "a-19700101T000000Z-00000000"
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


Opcodes: TypeAlias = bytes | npt.NDArray[np.uint8]


class _Writer:
    """Pickle opcodes of one Metadata record. Classes, dtypes, names and paths are in a preamble, memoized once each."""

    def __init__(self) -> None:
        self._memo: dict[bytes, int] = {}
        self._preamble: list[bytes] = []

    def once(self, opcodes: bytes) -> bytes:
        """A reference to the value of `opcodes`, memoized in the preamble."""
        return get(self.index(opcodes))

    def index(self, opcodes: bytes) -> int:
        """The memo index of the value of `opcodes`."""
        index = self._memo.get(opcodes)
        if index is None:
            index = self._memo[opcodes] = len(self._memo)
            self._preamble.append(opcodes + put(index) + POP)
        return index

    def finish(self, body: bytes) -> bytes:
        """The complete pickle."""
        return b"\x80\x02" + b"".join(self._preamble) + body + b"."

    def text(self, value: str) -> bytes:
        return self.once(text(value))

    def size(self, *numbers: Opcodes) -> list[Opcodes]:
        """A torch.Size; `numbers` are given as opcodes."""
        return [self.once(get_global("torch", "Size")), b"(", *numbers, b"t\x85R"]

    def record(self, module: str, name: str, fields: Mapping[str, list[Opcodes]]) -> list[Opcodes]:
        """An instance with `__dict__` set to `fields`; its `__init__` is not called."""
        pieces: list[Opcodes] = [self.once(get_global(module, name)), b")\x81}("]
        for key, value in fields.items():
            pieces += [self.text(key), *value]
        return [*pieces, b"ub"]


def _mapping(items: Iterable[bytes]) -> bytes:
    return b"}(" + b"".join(items) + b"u"


def _one(pieces: list[Opcodes]) -> bytes:
    """Opcodes of a single value."""
    return rows(1, pieces)


def dcp_metadata(manifest: Manifest, *, paths: Mapping[str, tuple[str, ...]] | None = None) -> bytes:
    """The `.metadata` with which any DCP reader can open the step's folder.

    `paths` are the keys of each FQN in the nested state dict (DCP's `planner_data`); by default the FQN is a top-level key.
    """
    writer, paths = _Writer(), paths or {}
    file_names = np.array([writer.index(text(file.path)) for file in manifest.files], dtype=np.int64)
    state, storage, planner = [], [], []
    for tensor in manifest.tensors:
        state.append(writer.text(tensor.fqn) + _tensor_record(writer, manifest, tensor))
        storage.append(_storage_of_tensor(writer, manifest, tensor, file_names))
    for entry in manifest.objects:
        state.append(writer.text(entry.fqn) + _one(writer.record(_METADATA, "BytesStorageMetadata", {})))
        info = _storage_info(writer, writer.text(entry.file), INT(entry.offset), INT(entry.length))
        storage.append(_one([*_storage_index(writer, entry.fqn, [b"N"]), *info]))
    for fqn in [*manifest.by_fqn, *manifest.objects_by_fqn]:
        planner.append(writer.text(fqn) + tuple_of(*(writer.text(part) for part in paths.get(fqn, (fqn,)))))
    fields: dict[str, list[Opcodes]] = {
        "state_dict_metadata": [_mapping(state)],
        "planner_data": [_mapping(planner)],
        "storage_data": [_mapping(storage)],
        "storage_meta": [b"N"],
        "version": [writer.text("1.0.0")],
    }
    return writer.finish(_one(writer.record(_METADATA, "Metadata", fields)))


def _tensor_record(writer: _Writer, manifest: Manifest, tensor: TensorEntry) -> bytes:
    offsets, sizes = manifest.boxes(tensor)
    box = {"offsets": writer.size(*map(ints, offsets.T)), "sizes": writer.size(*map(ints, sizes.T))}
    chunks = rows(tensor.num_chunks, writer.record(_METADATA, "ChunkStorageMetadata", box))
    layout = get_global("torch.serialization", "_get_layout") + text("torch.strided") + b"\x85R"
    encoding = get_global(_METADATA, "_MEM_FORMAT_ENCODING") + INT(0) + b"\x85R"
    state = tuple_of(
        writer.once(get_global("torch", tensor.dtype)), writer.once(layout), b"\x89", writer.once(encoding), b"\x89"
    )
    fields: dict[str, list[Opcodes]] = {
        "properties": [writer.once(get_global(_METADATA, "TensorProperties")), b")\x81", state, b"b"],
        "size": writer.size(*(INT(number) for number in tensor.global_shape)),
        "chunks": [b"](", chunks, b"e"],
    }
    return _one(writer.record(_METADATA, "TensorStorageMetadata", fields))


def _storage_of_tensor(writer: _Writer, manifest: Manifest, tensor: TensorEntry, file_names: Int64s) -> bytes:
    table, span = manifest.chunks, slice(tensor.first_chunk, tensor.first_chunk + tensor.num_chunks)
    offsets, _ = manifest.boxes(tensor)
    key = _storage_index(writer, tensor.fqn, writer.size(*map(ints, offsets.T)))
    path = gets(file_names[table.file[span]])
    info = _storage_info(writer, path, ints(table.offset[span]), ints(table.length[span]))
    codecs = table.codec[span]
    if any(manifest.codecs[number] != RAW for number in np.unique(codecs)):
        names = np.array([_descriptors(writer, codec) for codec in manifest.codecs], dtype=np.int64)
        info[-1:-1] = [writer.text("transform_descriptors"), gets(names[codecs])]
    return rows(tensor.num_chunks, [*key, *info])


def _descriptors(writer: _Writer, codec: str) -> int:
    """Memo index of the DCP extensions of a blob: a list, or None for a raw one."""
    return writer.index(b"N" if codec == RAW else b"](" + text(codec) + b"e")


def _storage_index(writer: _Writer, fqn: str, offset: list[Opcodes]) -> list[Opcodes]:
    return writer.record(_METADATA, "MetadataIndex", {"fqn": [writer.text(fqn)], "offset": offset, "index": [b"N"]})


def _storage_info(writer: _Writer, path: Opcodes, offset: Opcodes, length: Opcodes) -> list[Opcodes]:
    fields = {"relative_path": [path], "offset": [offset], "length": [length]}
    return writer.record(_FILESYSTEM, "_StorageInfo", fields)


@dataclass
class _Record:
    """Stand-in for an instance of one of DCP's classes."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


def _stand_in(name: str) -> type[_Record]:
    return type(name, (_Record,), {"__hash__": object.__hash__, "__eq__": object.__eq__})


_RECORDS = {
    (module, name): _stand_in(name)
    for module, names in {
        _METADATA: (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "StorageMeta",
        ),
        _FILESYSTEM: ("_StorageInfo", "_StoragePrefix"),
    }.items()
    for name in names
}  # fmt: skip
_RECORDS[("torch.distributed.checkpoint.hf_storage", "_HFStorageInfo")] = _stand_in("_HFStorageInfo")


class _Reader(pickle.Unpickler):
    """Accepts DCP's records, torch.Size, dtypes and layouts, and nothing else."""

    def __init__(self, data: bytes, where: str) -> None:
        check_pickle(data, where=where)
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        known = _RECORDS.get((module, name)) or _FUNCTIONS.get((module, name))
        if known is not None:
            return known
        if module == "torch" and name in ELEMENT_SIZE:
            return name
        raise UnsafeContentError(
            f"{self._where}: contains {module}.{name}, which is not part of a DCP index; nothing was loaded"
        )

    def persistent_load(self, _pid: Any) -> Any:
        raise UnsafeContentError(f"{self._where}: contains a reference to another file; nothing was loaded")


def _plain_tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


def _ignore(*_: Any) -> None:
    return None


def _join(*parts: str) -> str:
    return "/".join(parts)


class _Function:
    """A function that a pickle can call, but whose attributes it cannot set."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, _: Any) -> None:
        raise UnsafeContentError("the DCP index tries to modify the code that reads it; nothing was loaded")


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _Function(_plain_tuple),
    ("torch.serialization", "_get_layout"): _Function(_ignore),
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Function(_ignore),
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): _Function(_join),
    ("pathlib._local", "PosixPath"): _Function(_join),
}
_MALFORMED = (
    pickle.UnpicklingError, KeyError, TypeError, ValueError, AttributeError, EOFError, IndexError, OverflowError, MemoryError,
    RecursionError, UsageError, AssertionError,
)  # fmt: skip


def read_dcp_metadata(data: bytes, *, sizes: Mapping[str, int], step: int, where: str) -> Manifest:
    """The manifest of a checkpoint that plain DCP (torchtitan, any trainer) wrote, from its `.metadata`.

    `sizes` are the bytes of each data file. The manifest has no digests, mesh or placements. `payload_offset` is -1: it must be
    read from the ZIP directory of each blob (see `foreign_blob.locate_payload`).
    """
    try:
        root = _Reader(data, where).load()
        return _manifest_of(root, sizes, step, where)
    except _MALFORMED as error:
        raise DamagedError(f"{where}: not a DCP index: {type(error).__name__}: {error}") from error


def dcp_paths(data: bytes, *, where: str) -> dict[str, tuple[str, ...]]:
    """Keys of each FQN in the nested state dict, from the `planner_data` of a `.metadata`; empty if it has none."""
    try:
        planner = _Reader(data, where).load().state.get("planner_data") or {}
        return {str(fqn): tuple(map(str, path)) for fqn, path in planner.items()}
    except _MALFORMED as error:
        raise DamagedError(f"{where}: not a DCP index: {type(error).__name__}: {error}") from error


def data_paths(data: bytes, *, where: str) -> frozenset[str]:
    """Every data file that a `.metadata` names, relative to its folder. DamagedError if it is not a DCP index."""
    try:
        storage = _Reader(data, where).load().state["storage_data"]
        return frozenset(str(info["relative_path"]) for info in storage.values())
    except _MALFORMED as error:
        raise DamagedError(f"{where}: not a DCP index: {type(error).__name__}: {error}") from error


def _manifest_of(root: Any, sizes: Mapping[str, int], step: int, where: str) -> Manifest:
    places = {(index["fqn"], index.state.get("offset")): info for index, info in root["storage_data"].items()}
    paths = sorted({check_relative(str(info["relative_path"])) for info in places.values()})
    for path in paths:
        if path not in sizes:
            raise DamagedError(f"{where}: data file {path} is missing")
    number = {path: n for n, path in enumerate(paths)}
    tensors, boxes, objects = [], [], []
    rows: list[tuple[int, ...]] = []
    for fqn in sorted(root["state_dict_metadata"]):
        entry = root["state_dict_metadata"][fqn]
        if "chunks" not in (getattr(entry, "state", None) or {}):
            info = places[(fqn, None)]
            objects.append(_foreign_object(fqn, info))
            continue
        # DCP finds a blob by its box, so a box that is listed twice (replicas that were not merged) is one blob.
        chunks = list(dict.fromkeys(Box(tuple(c["offsets"]), tuple(c["sizes"])) for c in entry["chunks"]))
        tensors.append(_foreign_tensor(fqn, entry, first_chunk=len(rows), num_chunks=len(chunks)))
        for box in chunks:
            info = places.get((fqn, box.offsets)) or places[(fqn, None)]
            rows.append(
                (number[str(info["relative_path"])], info["offset"], info["length"], -1, -1, _codec(info, fqn, where))
            )
            boxes.append(box)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    file_sizes = np.array([sizes[path] for path in paths] or [0], dtype=np.int64)[columns[0]]
    if bool(((columns[1] < 0) | (columns[2] < 0) | (columns[2] > file_sizes - columns[1])).any()):
        raise DamagedError(f"{where}: a chunk reaches past the end of its file")
    for entry in objects:
        if entry.offset < 0 or not 0 <= entry.length <= sizes[entry.file] - entry.offset:
            raise DamagedError(f"{where}: {entry.fqn}: the value reaches past the end of its file")
    for tensor in tensors:
        _check_foreign_room(tensor, columns[2], where)
    table = ChunkTable(
        file=columns[0], offset=columns[1], length=columns[2], payload_offset=columns[3], payload_length=columns[4],
        codec=columns[5],
        box_offsets=np.array([n for box in boxes for n in box.offsets], dtype=np.int64),
        box_sizes=np.array([n for box in boxes for n in box.sizes], dtype=np.int64),
        digests=None,
    )  # fmt: skip
    return Manifest(
        step=step, attempt=FOREIGN_ATTEMPT, kind="foreign", created="", versions={}, mesh=None, pipeline=None,
        tensors=tuple(tensors), chunks=table, codecs=(RAW,), objects=tuple(objects),
        files=tuple(FileEntry(path=path, size_bytes=sizes[path], digest=None) for path in paths),
    )  # fmt: skip


def _foreign_tensor(fqn: str, entry: Any, *, first_chunk: int, num_chunks: int) -> TensorEntry:
    return TensorEntry(
        fqn=fqn,
        dtype=entry["properties"].state[0],
        global_shape=tuple(entry["size"]),
        placements=None,
        stages=None,
        first_chunk=first_chunk,
        num_chunks=num_chunks,
    )


def _check_foreign_room(tensor: TensorEntry, lengths: Int64s, where: str) -> None:
    stored = int(lengths[tensor.first_chunk : tensor.first_chunk + tensor.num_chunks].sum())
    if min(tensor.global_shape, default=0) < 0 or tensor.size_bytes > stored * MAX_RATIO:
        raise DamagedError(f"{where}: {tensor.fqn}: {stored} bytes cannot hold shape {tensor.global_shape}")


def _foreign_object(fqn: str, info: Any) -> ObjectEntry:
    return ObjectEntry(
        fqn=fqn, file=str(info["relative_path"]), offset=info["offset"], length=info["length"], digest=None
    )


def _codec(info: Any, fqn: str, where: str) -> int:
    extensions = (info.state or {}).get("transform_descriptors")
    if extensions:
        raise DamagedError(
            f"{where}: {fqn} is stored with the DCP extensions {list(extensions)}; only plain storage can be read"
        )
    return 0
