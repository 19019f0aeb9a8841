"""Read DCP's own index, `.metadata`, of checkpoints that other programs wrote. No code of the pickle runs.

The unpickler accepts DCP's record classes alone and replaces each by a plain stand-in; every value is then checked where it is
used.
Format: torch/distributed/checkpoint/metadata.py and filesystem.py (torch 2.3 to 2.15). Megatron-Core adds the plans of all
ranks, which hold records of planner.py and are not used here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_ckpt.errors import DamagedError, UnsafeContentError, UsageError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import RAW, ChunkTable, FileEntry, Manifest, ObjectEntry, TensorEntry
from titan_ckpt.format.manifest_json import MAX_DIMENSIONS, MAX_RATIO
from titan_ckpt.format.structure import Path, Structure, of_paths, planner_paths
from titan_ckpt.location import check_relative
from titan_ckpt.parsing.json_values import MAX_INT64, show
from titan_ckpt.parsing.pickle_check import check_pickle
from titan_ckpt.sharding.placement import Box
from titan_ckpt.sharding.repeating_columns import Int64s

FOREIGN_ATTEMPT = "a-19700101T000000Z-00000000"
QUANTISED = frozenset({"qint8", "quint8", "qint32"})  # numbers with scales: stored by DCP as tensors, by us as values
MAX_ITEMS, MAX_PATH, DEEPEST = 1000, 4096, 256
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_PLANNER = "torch.distributed.checkpoint.planner"


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
        _PLANNER: ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData"),
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
        if module == "torch" and (name in ELEMENT_SIZE or name in QUANTISED):
            return name
        raise UnsafeContentError(
            f"{self._where}: contains {module}.{name}, which is not part of a DCP index; nothing was loaded"
        )

    def persistent_load(self, _pid: Any) -> Any:
        raise UnsafeContentError(f"{self._where}: contains a reference to another file; nothing was loaded")


def _plain_tuple(values: Any = ()) -> tuple[int, ...]:
    """A torch.Size. Bounded: one short call of a pickle must not copy a long list."""
    if len(values) > MAX_DIMENSIONS:
        raise ValueError(f"a size of {len(values)} dimensions")
    return tuple(values)


def _plain_dict(items: Any = ()) -> dict[Any, Any]:
    """An OrderedDict; pickles fill it afterwards, or from a short list."""
    if len(items) > MAX_ITEMS:
        raise ValueError(f"an OrderedDict of {len(items)} items at once")
    return dict(items)


def _ignore(*_: Any) -> None:
    return None


def _join(*parts: str) -> str:
    path = "/".join(parts)
    if len(path) > MAX_PATH:
        raise ValueError(f"a path of {len(path)} characters")
    return path


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
    (_PLANNER, "WriteItemType"): _Function(_ignore),
    ("collections", "OrderedDict"): _Function(_plain_dict),
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
        return _manifest_of(_Reader(data, where).load(), len(data), sizes, step, where)
    except _MALFORMED as error:
        raise DamagedError(f"{where}: not a DCP index: {type(error).__name__}: {_text(error)}") from error


def dcp_paths(data: bytes, *, where: str) -> dict[str, Path]:
    """Keys of each FQN in the nested state dict, from the `planner_data` of a `.metadata`; empty if it has none."""
    try:
        return _paths(_Reader(data, where).load())
    except _MALFORMED as error:
        raise DamagedError(f"{where}: not a DCP index: {type(error).__name__}: {_text(error)}") from error


def data_paths(data: bytes, *, where: str) -> frozenset[str]:
    """Every data file that a `.metadata` names, relative to its folder. DamagedError if it is not a DCP index."""
    try:
        storage = _items(_field(_Reader(data, where).load(), "storage_data"), dict)
        return frozenset(_path(info) for info in storage.values())
    except _MALFORMED as error:
        raise DamagedError(f"{where}: not a DCP index: {type(error).__name__}: {_text(error)}") from error


def _text(error: BaseException) -> str:
    try:
        return str(error)[:200]
    except (ValueError, RecursionError):  # a number of more digits than Python prints
        return "an argument that cannot be shown"


# The values of a `.metadata` may have any type: each is checked where it is used.


def _field(record: Any, name: str) -> Any:
    """An attribute of one of DCP's records."""
    if not isinstance(record, _Record) or not isinstance(state := getattr(record, "state", None), dict):
        raise ValueError(f"expected a record with {name!r}, found {type(record).__name__}")
    return state.get(name)


def _items(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise ValueError(f"expected a {kinds[0].__name__}, found {show(value)}")
    return value


def _name(value: Any) -> str:
    if type(value) is not str or not value:
        raise ValueError(f"expected a name, found {show(value)}")
    return value


def _fqn(value: Any) -> str:
    """A name in the state; the empty one is the name of what stands under the key ""."""
    found: str = _items(value, str)
    return found


def _paths(root: Any) -> dict[str, Path]:
    planner = _field(root, "planner_data") or {}
    return {_fqn(fqn): tuple(map(_key, _items(path, tuple, list))) for fqn, path in _items(planner, dict).items()}


def _key(value: Any) -> str | int:
    """One part of a path in the nested state dict: a key's text, or a place in a list."""
    return _whole(value) if type(value) is int else _items(value, str)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INT64:
        raise ValueError(f"expected a whole number, found {show(value)}")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    found = tuple(map(_whole, _items(value, tuple, list)))
    if len(found) > MAX_DIMENSIONS:
        raise ValueError(f"a shape of {len(found)} dimensions")
    return found


@dataclass(slots=True)
class _Rows:
    """The chunk table while it is read; `left` bounds what a few shared records can make of a small file."""

    left: int
    rows: list[tuple[int, int, int]]
    offsets: list[int]
    sizes: list[int]

    def add(self, file: int, info: Any, box: Box) -> None:
        self.left -= 1 + len(box.offsets)
        if self.left < 0:
            raise ValueError("more chunks than its bytes can list")
        self.rows.append((file, _whole(_field(info, "offset")), _whole(_field(info, "length"))))
        self.offsets += box.offsets
        self.sizes += box.sizes


def _manifest_of(root: Any, num_bytes: int, sizes: Mapping[str, int], step: int, where: str) -> Manifest:
    storage, states = (_items(_field(root, name), dict) for name in ("storage_data", "state_dict_metadata"))
    places = {_place(index): info for index, info in storage.items()}
    paths = sorted({check_relative(_path(info)) for info in places.values()})
    for path in paths:
        if path not in sizes:
            raise DamagedError(f"{where}: data file {path} is missing")
    number = {path: n for n, path in enumerate(paths)}
    tensors: list[TensorEntry] = []
    objects: list[ObjectEntry] = []
    table = _Rows(left=num_bytes, rows=[], offsets=[], sizes=[])
    for fqn in sorted(map(_fqn, states)):
        entry = states[fqn]
        if "chunks" not in (getattr(entry, "state", None) or {}):
            objects.append(_foreign_object(fqn, places[(fqn, None)]))
            continue
        first = len(table.rows)
        # DCP finds a blob by its box, so a box that is listed twice (replicas that were not merged) is one blob.
        ndim = len(_sizes(_field(entry, "size")))
        boxes = dict.fromkeys(_box(chunk, fqn, ndim) for chunk in _chunks(entry, table))
        if _dtype(entry) in QUANTISED:
            objects.append(_foreign_object(fqn, places[_whole_box(fqn, entry, boxes)]))
            continue
        for box in boxes:
            info = places.get((fqn, box.offsets)) or places[(fqn, None)]
            _check_plain(info, fqn, where)
            table.add(number[_path(info)], info, box)
        tensors.append(_foreign_tensor(fqn, entry, first_chunk=first, num_chunks=len(table.rows) - first))
    columns = np.array(table.rows, dtype=np.int64).reshape(-1, 3).T
    _check_spans(columns, [sizes[path] for path in paths], tensors, objects, sizes, where)
    nothing = np.zeros(len(table.rows), dtype=np.int64)
    chunks = ChunkTable(
        file=columns[0], offset=columns[1], length=columns[2], payload_offset=nothing - 1, payload_length=nothing - 1,
        codec=nothing, box_offsets=np.array(table.offsets, dtype=np.int64), box_sizes=np.array(table.sizes, dtype=np.int64),
        digests=None,
    )  # fmt: skip
    return Manifest(
        step=step, attempt=FOREIGN_ATTEMPT, kind="foreign", created="", versions={}, mesh=None, pipeline=None,
        tensors=tuple(tensors), chunks=chunks, codecs=(RAW,), objects=tuple(objects),
        files=tuple(FileEntry(path=path, size_bytes=sizes[path], digest=None) for path in paths),
        structure=_structure(root, states, num_bytes),
    )  # fmt: skip


def _structure(root: Any, states: Mapping[str, Any], size: int) -> Structure | None:
    """The nesting that the index records; None if it records none, or one that does not lead to its names."""
    paths = {fqn: path for fqn, path in _paths(root).items() if fqn in states}
    if max(map(len, paths.values()), default=0) > DEEPEST or sum(map(len, paths.values())) > size:
        return None  # no state is that deep; and each key of a path takes at least a byte of the index
    try:
        structure = of_paths(paths)
    except UsageError:
        return None
    return structure if paths and set(planner_paths(structure)) == set(states) else None


def _chunks(entry: Any, table: _Rows) -> Any:
    """The chunk records of a tensor."""
    chunks = _items(_field(entry, "chunks"), list, tuple)
    if len(chunks) > table.left:
        raise ValueError("more chunks than its bytes can list")
    return chunks


def _place(index: Any) -> tuple[str, tuple[int, ...] | None]:
    offset = _field(index, "offset")
    return _fqn(_field(index, "fqn")), None if offset is None else _sizes(offset)


def _path(info: Any) -> str:
    return _name(_field(info, "relative_path"))


def _box(chunk: Any, fqn: str, ndim: int) -> Box:
    box = Box(_sizes(_field(chunk, "offsets")), _sizes(_field(chunk, "sizes")))
    if not len(box.offsets) == len(box.sizes) == ndim:
        raise ValueError(f"{show(fqn)}: {ndim} dimensions, a chunk with offsets {box.offsets} and sizes {box.sizes}")
    return box


def _check_spans(
    columns: Int64s, file_sizes: list[int], tensors: list[TensorEntry], objects: list[ObjectEntry], sizes: Mapping[str, int],
    where: str,
) -> None:  # fmt: skip
    """DamagedError unless all that is named lies inside its file, and no tensor is larger than its bytes can hold."""
    of_chunk = np.array(file_sizes or [0], dtype=np.int64)[columns[0]]
    if bool((columns[2] > of_chunk - columns[1]).any()):
        raise DamagedError(f"{where}: a chunk reaches past the end of its file")
    for entry in objects:
        if entry.length > sizes[entry.file] - entry.offset:
            raise DamagedError(f"{where}: {entry.fqn}: the value reaches past the end of its file")
    for tensor in tensors:
        stored = int(columns[2][tensor.first_chunk : tensor.first_chunk + tensor.num_chunks].sum())
        if tensor.size_bytes > stored * MAX_RATIO:
            raise DamagedError(f"{where}: {tensor.fqn}: {stored} bytes cannot hold shape {tensor.global_shape}")


def _foreign_tensor(fqn: str, entry: Any, *, first_chunk: int, num_chunks: int) -> TensorEntry:
    dtype = _dtype(entry)
    if type(dtype) is not str or dtype not in ELEMENT_SIZE:
        raise ValueError(f"{show(fqn)}: {show(dtype)} is not a dtype")
    return TensorEntry(
        fqn=fqn,
        dtype=dtype,
        global_shape=_sizes(_field(entry, "size")),
        placements=None,
        stages=None,
        first_chunk=first_chunk,
        num_chunks=num_chunks,
    )


def _dtype(entry: Any) -> Any:
    return getattr(_field(entry, "properties"), "state", (None,))[0]


def _whole_box(fqn: str, entry: Any, boxes: Iterable[Box]) -> tuple[str, tuple[int, ...]]:
    """The place of a quantised tensor, which only one chunk can hold: each part would have scales of its own."""
    found = list(boxes)
    if [box.sizes for box in found] != [_sizes(_field(entry, "size"))]:
        raise ValueError(f"{show(fqn)}: a quantised tensor in {len(found)} parts")
    return fqn, found[0].offsets


def _foreign_object(fqn: str, info: Any) -> ObjectEntry:
    return ObjectEntry(
        fqn=fqn,
        file=_path(info),
        offset=_whole(_field(info, "offset")),
        length=_whole(_field(info, "length")),
        digest=None,
    )


def _check_plain(info: Any, fqn: str, where: str) -> None:
    extensions = _field(info, "transform_descriptors")
    if extensions:
        raise DamagedError(
            f"{where}: {fqn} is stored with the DCP extensions {show(extensions)}; only plain storage can be read"
        )
