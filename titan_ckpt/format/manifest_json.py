"""`manifest.json`: the JSON form of `Manifest`, checked strictly. The contract is docs/format.md.

Short columns of the chunk table are plain lists, readable by people; longer ones are `{"count": n, "zstd": base64}` of the
little-endian int64 differences, which compress to almost nothing if ranks repeat. Digests are base64 in the manifest; past
MAX_INLINE_DIGESTS they are in a file beside it, `digests.bin`, 16 bytes per chunk.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import zstandard

from titan_ckpt.errors import ConfigError, DamagedError, NewerFormatError, UnsafeContentError, UsageError
from titan_ckpt.format.codec import CODECS
from titan_ckpt.format.digest import digest
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import DIGEST_BYTES, RAW, ChunkTable, FileEntry, Manifest, ObjectEntry, TensorEntry
from titan_ckpt.format.names import DIGESTS, is_attempt, is_data_file
from titan_ckpt.location import check_relative
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Placements, Shard
from titan_ckpt.sharding.repeating_columns import Column, Int64s, shared_column

MANIFEST_FORMAT = "titan-ckpt"
MANIFEST_VERSION = 1
MAX_PLAIN_VALUES = 4096
MAX_INLINE_DIGESTS = 100_000
MAX_VALUES, MOST_VALUES = 1 << 27, 1 << 29
VALUES_PER_CHUNK = 6 + 2 * 8
MAX_RATIO = 1 << 18
_MALFORMED = (
    KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, zstandard.ZstdError, ConfigError,
)  # fmt: skip
MIN_SHARED_ROWS = 1 << 20
CHECKED_AT_ONCE = 1 << 20
_INT_COLUMNS = (
    "file", "offset", "length", "payload_offset", "payload_length", "codec", "box_offsets", "box_sizes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedManifest:
    """Content of `manifest.json` and, for large checkpoints, of `digests.bin`."""

    manifest: bytes
    digests: bytes | None


def encode_manifest(manifest: Manifest) -> EncodedManifest:
    """Encode `manifest` as the files to store."""
    table: list[Placements | None] = []
    rows = [_encode_tensor(tensor, table) for tensor in manifest.tensors]
    digests = manifest.chunks.digests
    beside = digests is not None and len(manifest.chunks) > MAX_INLINE_DIGESTS
    content = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "kind": manifest.kind,
        "created": manifest.created,
        "versions": dict(manifest.versions),
        "mesh": None if manifest.mesh is None else dict(manifest.mesh.items()),
        "pipeline": manifest.pipeline,
        "training": manifest.training,
        "config": manifest.config,
        "assets": dict(manifest.assets),
        "user": manifest.user,
        "placements": [None if p is None else [[axes, shard.dim] for axes, shard in p.items()] for p in table],
        "tensors": rows,
        "codecs": list(manifest.codecs),
        "chunks": {name: _encode_column(getattr(manifest.chunks, name)) for name in _INT_COLUMNS},
        "digests": _encode_digests(digests, beside),
        "objects": [
            {"fqn": o.fqn, "file": o.file, "offset": o.offset, "length": o.length, "digest": _hex(o.digest)}
            for o in manifest.objects
        ],
        "files": [{"path": f.path, "size": f.size_bytes, "digest": _hex(f.digest)} for f in manifest.files],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return EncodedManifest(manifest=text, digests=digests if beside else None)


def decode_manifest(data: bytes, *, where: str, num_digests: Callable[[], int] = lambda: 0) -> Manifest:
    """The manifest in `data`, without the digests of a separate file (see `digests_beside`).

    A few compressed bytes can claim to be a huge column. A table of more than MAX_VALUES is therefore accepted only if
    `num_digests()`, called in that case, shows as many stored digests. Digests do not compress, so memory stays within a small
    multiple of the stored bytes.

    DamagedError if it is not a manifest, NewerFormatError if a later release wrote it, UnsafeContentError for a path outside the
    run.
    """
    content = _parse(data, where)
    try:
        return _decode(content, where, num_digests)
    except _MALFORMED as error:
        raise DamagedError(f"{where}: not a valid manifest: {type(error).__name__}: {error}") from error


def digests_beside(data: bytes) -> str | None:
    """Hex digest of this manifest's `digests.bin`, None if the digests are in the manifest itself."""
    digests = json.loads(data)["digests"]
    return digests["xxh3_128"] if isinstance(digests, dict) else None


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != MANIFEST_FORMAT:
        raise DamagedError(f"{where}: not a titan-ckpt manifest")
    check_version(content.get("version"), MANIFEST_VERSION, where)
    return content


def check_version(found: Any, known: int, where: str) -> None:
    """Check a format version: NewerFormatError if it is later than `known`, DamagedError if it is anything else."""
    if found == known:
        return
    if isinstance(found, int) and found > known:
        raise NewerFormatError(
            f"{where}: format version {found}; this release reads version {known}: upgrade titan-ckpt "
            f"(pip install -U titan-ckpt)"
        )
    raise DamagedError(f"{where}: format version {found!r}, expected {known}")


def _decode(content: Mapping[str, Any], where: str, num_digests: Callable[[], int]) -> Manifest:
    placements = [None if p is None else {axes: Shard(dim) for axes, dim in p} for p in content["placements"]]
    files = tuple(
        FileEntry(path=_safe_path(f["path"], where), size_bytes=int(f["size"]), digest=_unhex(f["digest"]))
        for f in content["files"]
    )
    tensors = _decode_tensors(content["tensors"], placements)
    if not is_attempt(content["attempt"]):
        raise UnsafeContentError(f"{where}: {content['attempt']!r} is not a valid attempt name")
    count = sum(_count(content["chunks"][name]) for name in _INT_COLUMNS)
    if count > MAX_VALUES and count > min(MOST_VALUES, VALUES_PER_CHUNK * (stored := num_digests())):
        raise ValueError(f"a chunk table of {count} values, but only {stored} stored digests")
    columns = {name: _decode_shared(name, content["chunks"][name], tensors) for name in _INT_COLUMNS}
    manifest = Manifest(
        step=int(content["step"]),
        attempt=content["attempt"],
        kind=content["kind"],
        created=content["created"],
        versions=content["versions"],
        mesh=None if content["mesh"] is None else MeshSpec.of(content["mesh"]),
        pipeline=content["pipeline"],
        tensors=tensors,
        chunks=ChunkTable(**columns, digests=_decode_digests(content["digests"])),
        codecs=tuple(content["codecs"]),
        objects=tuple(
            ObjectEntry(
                fqn=o["fqn"],
                file=_safe_path(o["file"], where),
                offset=int(o["offset"]),
                length=int(o["length"]),
                digest=_unhex(o["digest"]),
            )
            for o in content["objects"]
        ),
        files=files,
        training=content["training"],
        config=content["config"],
        assets={_safe_asset(name, where): str(value) for name, value in content["assets"].items()},
        user=content["user"],
    )
    _check(manifest, where)
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    """Refuse a manifest that contradicts itself, before any of its offsets is used."""
    table, sizes = manifest.chunks, np.array([f.size_bytes for f in manifest.files] or [0], dtype=np.int64)
    rows = sum(t.num_chunks for t in manifest.tensors)
    coordinates = sum(t.num_chunks * len(t.global_shape) for t in manifest.tensors)
    _check_objects(manifest, where)
    for name in _INT_COLUMNS:
        found = len(getattr(table, name))
        if found != (coordinates if name.startswith("box_") else rows):
            _damaged(where, f"column {name!r} has {found} values")
    if table.digests is not None and len(table.digests) != rows * DIGEST_BYTES:
        _damaged(where, f"{len(table.digests)} bytes of digests for {rows} chunks")
    if rows == 0:
        return
    if min(int(getattr(table, name).min(initial=0)) for name in _INT_COLUMNS) < 0:
        _damaged(where, "a negative number in the chunk table")
    if int(table.file.max()) >= len(manifest.files) or int(table.codec.max()) >= len(manifest.codecs):
        _damaged(where, "a chunk names a file or codec that is not listed")
    if unknown := set(manifest.codecs) - set(CODECS):
        raise DamagedError(f"{where}: uses the codecs {sorted(unknown)}, unknown to this release: upgrade titan-ckpt")
    # Compare differences: a sum of two huge numbers would overflow.
    for start in range(0, rows, CHECKED_AT_ONCE):
        at = slice(start, start + CHECKED_AT_ONCE)
        if bool((table.length[at] > sizes[table.file[at]] - table.offset[at]).any()):
            _damaged(where, "a chunk reaches past the end of its file")
        if bool((table.payload_length[at] > table.length[at] - table.payload_offset[at]).any()):
            _damaged(where, "a chunk's payload reaches past its blob")
    for tensor in manifest.tensors:
        offsets, box_sizes = manifest.boxes(tensor)
        if bool((box_sizes > np.array(tensor.global_shape, dtype=np.int64) - offsets).any()):
            _damaged(where, f"{tensor.fqn}: a chunk lies outside the global shape {tensor.global_shape}")
        _check_room(manifest, tensor, where)


def _check_objects(manifest: Manifest, where: str) -> None:
    sizes = {file.path: file.size_bytes for file in manifest.files}
    for entry in manifest.objects:
        if entry.offset < 0 or not 0 <= entry.length <= sizes.get(entry.file, -1) - entry.offset:
            _damaged(where, f"{entry.fqn}: the value is not inside a listed file")


def _check_room(manifest: Manifest, tensor: TensorEntry, where: str) -> None:
    """Refuse a tensor larger than its stored bytes can decode to, before a reader allocates memory for it."""
    rows = slice(tensor.first_chunk, tensor.first_chunk + tensor.num_chunks)
    stored = int(manifest.chunks.payload_length[rows].sum())
    if tensor.size_bytes > stored * (1 if manifest.codecs == (RAW,) else MAX_RATIO):
        _damaged(where, f"{tensor.fqn}: {stored} stored bytes cannot hold {tensor.size_bytes}")


def _damaged(where: str, text: str) -> NoReturn:
    raise DamagedError(f"{where}: {text}: the manifest is damaged")


def _encode_tensor(tensor: TensorEntry, table: list[Placements | None]) -> dict[str, Any]:
    items = None if tensor.placements is None else list(tensor.placements.items())
    known = [None if p is None else list(p.items()) for p in table]
    if items not in known:
        table.append(tensor.placements)
        known.append(items)
    row = {
        "fqn": tensor.fqn,
        "dtype": tensor.dtype,
        "shape": list(tensor.global_shape),
        "placement": known.index(items),
        "chunks": tensor.num_chunks,
    }
    return row if tensor.stages is None else row | {"stages": list(tensor.stages)}


def _decode_tensors(rows: list[dict[str, Any]], placements: list[Any]) -> tuple[TensorEntry, ...]:
    tensors, first = [], 0
    for row in rows:
        if row["dtype"] not in ELEMENT_SIZE:
            raise ValueError(f"{row['fqn']}: unknown dtype {row['dtype']!r}")
        tensors.append(
            TensorEntry(
                fqn=row["fqn"],
                dtype=row["dtype"],
                global_shape=tuple(int(n) for n in row["shape"]),
                placements=placements[row["placement"]],
                stages=tuple(row["stages"]) if "stages" in row else None,
                first_chunk=first,
                num_chunks=int(row["chunks"]),
            )
        )
        first += int(row["chunks"])
    if any(a.fqn >= b.fqn for a, b in pairwise(tensors)):
        raise ValueError("tensors are not in order of name, or one is repeated")
    return tuple(tensors)


def _encode_column(values: Int64s) -> list[int] | dict[str, Any]:
    if len(values) <= MAX_PLAIN_VALUES:
        return [int(v) for v in values]
    differences = np.diff(values, prepend=np.int64(0)).astype("<i8")
    packed = zstandard.ZstdCompressor(level=3).compress(differences.tobytes())
    return {"count": len(values), "zstd": base64.b64encode(packed).decode("ascii")}


def _decode_shared(name: str, column: list[int] | dict[str, Any], tensors: tuple[TensorEntry, ...]) -> Column:
    """A column; in a long table as a SharedColumn with one block per tensor."""
    values = _decode_column(column)
    widths = [t.num_chunks * (len(t.global_shape) if name.startswith("box_") else 1) for t in tensors]
    is_long = sum(t.num_chunks for t in tensors) >= MIN_SHARED_ROWS and sum(widths) == len(values)
    return shared_column(values, widths) if is_long and name != "offset" else values


def _decode_column(column: list[int] | dict[str, Any]) -> Int64s:
    if isinstance(column, list):
        return np.array(column, dtype=np.int64)
    count = _count(column)
    packed = base64.b64decode(column["zstd"], validate=True)
    if zstandard.get_frame_parameters(packed).content_size != count * 8:
        raise ValueError(f"a column of {count} values is compressed with another size")
    raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=count * 8)
    if len(raw) != count * 8:
        raise ValueError(f"a column has {len(raw)} bytes for {count} values")
    return np.cumsum(np.frombuffer(raw, dtype="<i8"), dtype=np.int64)


def _count(column: list[int] | dict[str, Any]) -> int:
    count = len(column) if isinstance(column, list) else int(column["count"])
    if count < 0:
        raise ValueError(f"a column of {count} values")
    return count


def _encode_digests(digests: bytes | None, beside: bool) -> str | dict[str, str] | None:
    if digests is None:
        return None
    if beside:
        return {"file": DIGESTS, "xxh3_128": digest(digests).hex()}
    return base64.b64encode(digests).decode("ascii")


def _decode_digests(value: str | dict[str, str] | None) -> bytes | None:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else None


def _safe_path(path: str, where: str) -> str:
    if not is_data_file(path):
        raise UnsafeContentError(f"{where}: {path!r} is not a data file of this run")
    return path


def _safe_asset(name: str, where: str) -> str:
    try:
        return check_relative(name)
    except UsageError as error:
        raise UnsafeContentError(f"{where}: asset {name!r} is not a path inside the checkpoint") from error


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def _unhex(value: str | None) -> bytes | None:
    return None if value is None else bytes.fromhex(value)
