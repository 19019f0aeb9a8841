"""Write DCP's own index, `.metadata`, a pickle, for plain `dcp.load`.

Format: torch/distributed/checkpoint/metadata.py and filesystem.py (torch 2.3 to 2.15).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from titan_ckpt.format.manifest import RAW, Manifest, TensorEntry
from titan_ckpt.format.pickle_write import INT, POP, get, get_global, gets, ints, put, rows, text, tuple_of
from titan_ckpt.format.structure import Path, names, planner_paths
from titan_ckpt.sharding.repeating_columns import Int64s

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


def dcp_metadata(manifest: Manifest, *, paths: Mapping[str, Path] | None = None) -> bytes:
    """The `.metadata` with which any DCP reader can open the step's folder.

    `paths` are the keys of each FQN in the nested state dict (DCP's `planner_data`): by default those of the manifest's
    structure. An FQN without one is a top-level key.
    """
    if paths is None:
        paths = {} if manifest.structure is None else planner_paths(manifest.structure)
    writer = _Writer()
    file_names = np.array([writer.index(text(file.path)) for file in manifest.files], dtype=np.int64)
    state, storage, planner = dict[str, bytes](), [], []
    for tensor in manifest.tensors:
        state[tensor.fqn] = writer.text(tensor.fqn) + _tensor_record(writer, manifest, tensor)
        storage.append(_storage_of_tensor(writer, manifest, tensor, file_names))
    for entry in manifest.objects:
        state[entry.fqn] = writer.text(entry.fqn) + _one(writer.record(_METADATA, "BytesStorageMetadata", {}))
        info = _storage_info(writer, writer.text(entry.file), INT(entry.offset), INT(entry.length))
        storage.append(_one([*_storage_index(writer, entry.fqn, [b"N"]), *info]))
    ordered = [fqn for fqn in names(manifest.structure) if fqn in state] if manifest.structure else []
    ordered = list(dict.fromkeys([*ordered, *state]))
    for fqn in ordered:
        path = paths.get(fqn, (fqn,))
        planner.append(writer.text(fqn) + tuple_of(*(INT(p) if isinstance(p, int) else writer.text(p) for p in path)))
    fields: dict[str, list[Opcodes]] = {
        "state_dict_metadata": [_mapping(state[fqn] for fqn in ordered)],
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
