"""DCP's own index, `.metadata`: written for plain `dcp.load`, read from checkpoints that others wrote. No torch.

It is a pickle, so it is read by an unpickler that knows DCP's own record classes and nothing else: each becomes a plain
stand-in, no code of the pickle runs. Format: torch/distributed/checkpoint/metadata.py and filesystem.py (torch 2.3 to 2.13).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_ckpt.errors import DamagedError, UnsafeContentError
from titan_ckpt.index import ELEMENT_SIZE, RAW, ChunkTable, FileEntry, Manifest, ObjectEntry, TensorEntry
from titan_ckpt.location import check_relative
from titan_ckpt.pickle_codes import INT, POP, get, get_global, put, text, tuple_of
from titan_ckpt.placement import Box, Shape

FOREIGN_ATTEMPT = "a-19700101T000000Z-00000000"
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


class _Writer:
    """Pickle opcodes of one Metadata record; classes, dtypes, names and paths are said once, in a preamble, then referred to."""

    def __init__(self) -> None:
        self._memo: dict[bytes, int] = {}
        self._preamble: list[bytes] = []

    def once(self, opcodes: bytes) -> bytes:
        """A reference to the value of `opcodes`, which the preamble makes and remembers."""
        index = self._memo.get(opcodes)
        if index is None:
            index = self._memo[opcodes] = len(self._memo)
            self._preamble.append(opcodes + put(index) + POP)
        return get(index)

    def finish(self, body: bytes) -> bytes:
        """The whole pickle."""
        return b"\x80\x02" + b"".join(self._preamble) + body + b"."

    def text(self, value: str) -> bytes:
        return self.once(text(value))

    def size(self, values: Shape) -> bytes:
        """A torch.Size."""
        numbers = tuple_of(*(INT(value) for value in values))
        return self.once(get_global("torch", "Size")) + numbers + b"\x85R"

    def record(self, module: str, name: str, fields: Mapping[str, bytes]) -> bytes:
        """An instance made without calling its class, its `__dict__` set to `fields`."""
        head = self.once(get_global(module, name))
        items = b"".join(self.text(key) + value for key, value in fields.items())
        return head + b")\x81}(" + items + b"ub"

    def mapping(self, items: list[tuple[bytes, bytes]]) -> bytes:
        return b"}(" + b"".join(key + value for key, value in items) + b"u"


def dcp_metadata(manifest: Manifest, *, paths: Mapping[str, tuple[str, ...]] | None = None) -> bytes:
    """The `.metadata` that lets a stock DCP reader open the step's folder.

    `paths` say where each FQN stood in a nested state dict (DCP's `planner_data`); an FQN that is not in it was at the top.
    """
    writer, paths = _Writer(), paths or {}
    state, storage, planner = [], [], []
    for tensor in manifest.tensors:
        state.append((writer.text(tensor.fqn), _tensor_record(writer, manifest, tensor)))
        storage += _storage_of_tensor(writer, manifest, tensor)
    for entry in manifest.objects:
        state.append((writer.text(entry.fqn), writer.record(_METADATA, "BytesStorageMetadata", {})))
        key = _index_record(writer, entry.fqn, b"N")
        storage.append((key, _storage_record(writer, entry.file, entry.offset, entry.length)))
    for fqn in [*manifest.by_fqn, *manifest.objects_by_fqn]:
        planner.append((writer.text(fqn), tuple_of(*(writer.text(part) for part in paths.get(fqn, (fqn,))))))
    body = writer.record(
        _METADATA,
        "Metadata",
        {
            "state_dict_metadata": writer.mapping(state),
            "planner_data": writer.mapping(planner),
            "storage_data": writer.mapping(storage),
            "storage_meta": b"N",
            "version": writer.text("1.0.0"),
        },
    )
    return writer.finish(body)


def _tensor_record(writer: _Writer, manifest: Manifest, tensor: TensorEntry) -> bytes:
    chunks = b"".join(
        writer.record(_METADATA, "ChunkStorageMetadata", {"offsets": writer.size(offsets), "sizes": writer.size(sizes)})
        for offsets, sizes in _box_tuples(manifest, tensor)
    )
    layout = get_global("torch.serialization", "_get_layout") + text("torch.strided") + b"\x85R"
    encoding = get_global(_METADATA, "_MEM_FORMAT_ENCODING") + INT(0) + b"\x85R"
    state = tuple_of(
        writer.once(get_global("torch", tensor.dtype)), writer.once(layout), b"\x89", writer.once(encoding), b"\x89"
    )
    properties = writer.once(get_global(_METADATA, "TensorProperties")) + b")\x81" + state + b"b"
    fields = {"properties": properties, "size": writer.size(tensor.global_shape), "chunks": b"](" + chunks + b"e"}
    return writer.record(_METADATA, "TensorStorageMetadata", fields)


def _box_tuples(manifest: Manifest, tensor: TensorEntry) -> list[tuple[Shape, Shape]]:
    offsets, sizes = manifest.boxes(tensor)
    return [(tuple(o), tuple(s)) for o, s in zip(offsets.tolist(), sizes.tolist(), strict=True)]


def _storage_of_tensor(writer: _Writer, manifest: Manifest, tensor: TensorEntry) -> list[tuple[bytes, bytes]]:
    rows = slice(tensor.first_chunk, tensor.first_chunk + tensor.num_chunks)
    table = manifest.chunks
    places = zip(
        _box_tuples(manifest, tensor), table.file[rows].tolist(), table.offset[rows].tolist(),
        table.length[rows].tolist(), strict=True,
    )  # fmt: skip
    return [
        (
            _index_record(writer, tensor.fqn, writer.size(offsets)),
            _storage_record(writer, manifest.files[file].path, offset, length),
        )
        for (offsets, _), file, offset, length in places
    ]


def _index_record(writer: _Writer, fqn: str, offset: bytes) -> bytes:
    fields = {"fqn": writer.text(fqn), "offset": offset, "index": b"N"}
    return writer.record(_METADATA, "MetadataIndex", fields)


def _storage_record(writer: _Writer, path: str, offset: int, length: int) -> bytes:
    fields = {"relative_path": writer.text(path), "offset": INT(offset), "length": INT(length)}
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
    """Knows DCP's records, torch.Size, dtypes and layouts, and nothing else."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        known = _RECORDS.get((module, name)) or _FUNCTIONS.get((module, name))
        if known is not None:
            return known
        if module == "torch" and name in ELEMENT_SIZE:
            return name
        raise UnsafeContentError(
            f"{self._where}: asks for {module}.{name}, which DCP's own index never needs; it was not loaded"
        )

    def persistent_load(self, _pid: Any) -> Any:
        raise UnsafeContentError(f"{self._where}: refers to something outside the file; it was not loaded")


def _plain_tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


def _ignore(*_: Any) -> None:
    return None


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _plain_tuple,
    ("torch.serialization", "_get_layout"): _ignore,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _ignore,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib._local", "PosixPath"): lambda *parts: "/".join(parts),
}


def read_dcp_metadata(data: bytes, *, sizes: Mapping[str, int], step: int, where: str) -> Manifest:
    """The manifest of a checkpoint that plain DCP (torchtitan, any trainer) wrote, from its `.metadata`.

    `sizes` are the bytes of each data file. There are no digests, no mesh and no placements in such a checkpoint, and the
    payload's place inside a blob is not known: `payload_offset` is -1 and the ZIP in the blob says where it is.
    """
    try:
        root = _Reader(data, where).load()
        return _manifest_of(root, sizes, step, where)
    except (pickle.UnpicklingError, KeyError, TypeError, ValueError, AttributeError, EOFError, IndexError) as error:
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
        chunks = [Box(tuple(c["offsets"]), tuple(c["sizes"])) for c in entry["chunks"]]
        tensors.append(_foreign_tensor(fqn, entry, first_chunk=len(rows), num_chunks=len(chunks)))
        for box in chunks:
            info = places.get((fqn, box.offsets)) or places[(fqn, None)]
            rows.append(
                (number[str(info["relative_path"])], info["offset"], info["length"], -1, -1, _codec(info, fqn, where))
            )
            boxes.append(box)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
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


def _foreign_object(fqn: str, info: Any) -> ObjectEntry:
    return ObjectEntry(
        fqn=fqn, file=str(info["relative_path"]), offset=info["offset"], length=info["length"], digest=None
    )


def _codec(info: Any, fqn: str, where: str) -> int:
    extensions = (info.state or {}).get("transform_descriptors")
    if extensions:
        raise DamagedError(
            f"{where}: {fqn} is stored through the DCP extension {list(extensions)}; only plain storage can be read"
        )
    return 0
