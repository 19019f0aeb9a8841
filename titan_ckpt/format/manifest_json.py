"""`manifest.json`: the JSON form of `Manifest`, checked strictly. The contract is docs/format.md.

Short columns of the chunk table are plain lists, readable by people; longer ones are `{"count": n, "zstd": base64}` of the
little-endian int64 differences, which compress to almost nothing if ranks repeat. Digests are base64 in the manifest; past
MAX_INLINE_DIGESTS they are in a file beside it, `digests.bin`, 16 bytes per chunk.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
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
from titan_ckpt.format.structure import decode_structure
from titan_ckpt.location import check_relative
from titan_ckpt.parsing.json_values import MAX_INT64, JsonValue, parse_json, show
from titan_ckpt.sharding.mesh import AXES, FOLD, MeshSpec
from titan_ckpt.sharding.placement import Placements, Shard
from titan_ckpt.sharding.repeating_columns import Column, Int64s, shared_column

MANIFEST_FORMAT = "titan-ckpt"
MANIFEST_VERSION = 1
MAX_PLAIN_VALUES = 4096
MAX_INLINE_DIGESTS = 100_000
MAX_VALUES, MOST_VALUES = 1 << 24, 1 << 29
MAX_TEXT = 1 << 30
MAX_DIMENSIONS = 64
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
    if manifest.structure is not None:
        content["structure"] = manifest.structure
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
    document = JsonValue(_parse(data, where), where)
    try:
        return _decode(document, where, num_digests)
    except _MALFORMED as error:
        raise DamagedError(f"{where}: not a valid manifest: {type(error).__name__}: {error}") from error


def digests_beside(data: bytes, where: str) -> str | None:
    """Hex digest of this manifest's `digests.bin`, None if the digests are in the manifest itself."""
    digests = JsonValue(_parse(data, where), where)["digests"]
    return digests["xxh3_128"].text() if isinstance(digests.value, dict) else None


def _parse(data: bytes, where: str) -> dict[str, Any]:
    content = parse_json(data, where)
    if not isinstance(content, dict) or content.get("format") != MANIFEST_FORMAT:
        raise DamagedError(f"{where}: not a titan-ckpt manifest")
    check_version(content.get("version"), MANIFEST_VERSION, where)
    return content


def check_version(found: Any, known: int, where: str) -> None:
    """Check a format version: NewerFormatError if it is later than `known`, DamagedError if it is anything else."""
    if type(found) is int and found == known:
        return
    if type(found) is int and found > known:
        raise NewerFormatError(
            f"{where}: format version {show(found)}; this release reads version {known}: upgrade titan-ckpt "
            f"(pip install -U titan-ckpt)"
        )
    raise DamagedError(f"{where}: format version {show(found)}, expected {known}")


def _decode(document: JsonValue, where: str, num_digests: Callable[[], int]) -> Manifest:
    attempt = document["attempt"].text()
    if not is_attempt(attempt):
        raise UnsafeContentError(f"{where}: {show(attempt)} is not a valid attempt name")
    tensors = _decode_tensors(document["tensors"], [_decode_placements(p) for p in document["placements"].entries()])
    chunks, digests = document["chunks"], document["digests"].value
    _check_counts(chunks, tensors, num_digests)
    columns = {name: _decode_shared(name, chunks[name], tensors) for name in _INT_COLUMNS}
    mesh, pipeline, structure = (document.find(name) for name in ("mesh", "pipeline", "structure"))
    manifest = Manifest(
        step=document["step"].whole(),
        attempt=attempt,
        kind=document["kind"].text(),
        created=document["created"].text(),
        versions={name: version.text() for name, version in document["versions"].items()},
        mesh=None if mesh is None else MeshSpec.of({axis: degree.whole(1) for axis, degree in mesh.items()}),
        pipeline=None if pipeline is None else pipeline.free(),
        tensors=tensors,
        chunks=ChunkTable(**columns, digests=_decode_digests(digests)),
        codecs=tuple(codec.text() for codec in document["codecs"].entries()),
        objects=tuple(_decode_object(value, where) for value in document["objects"].entries()),
        files=tuple(_decode_file(value, where) for value in document["files"].entries()),
        training=document["training"].free(),
        config=document["config"].free(),
        assets={_safe_asset(name, where): value.text() for name, value in document["assets"].items()},
        user=document["user"].free(),
        structure=None if structure is None else decode_structure(structure),
    )
    _check(manifest, where)
    return manifest


def _decode_placements(value: JsonValue) -> Placements | None:
    if value.value is None:
        return None
    placements: dict[str, Shard] = {}
    for entry in value.entries():
        pair = list(entry.entries())
        if len(pair) != 2 or any(axis not in AXES for axis in pair[0].text().split(FOLD)):
            entry.fail("[axes, dimension]")
        placements[pair[0].text()] = Shard(pair[1].whole(0, MAX_DIMENSIONS))
    return placements


def _decode_file(value: JsonValue, where: str) -> FileEntry:
    return FileEntry(
        path=_safe_path(value["path"].text(), where), size_bytes=value["size"].whole(), digest=_unhex(value["digest"])
    )


def _decode_object(value: JsonValue, where: str) -> ObjectEntry:
    return ObjectEntry(
        fqn=value["fqn"].text(),
        file=_safe_path(value["file"].text(), where),
        offset=value["offset"].whole(),
        length=value["length"].whole(),
        digest=_unhex(value["digest"]),
    )


def _check_counts(chunks: JsonValue, tensors: Sequence[TensorEntry], num_digests: Callable[[], int]) -> None:
    """Refuse columns of other lengths than the tensors' chunks need, or of more than is stored, before they are unpacked."""
    widths = {False: sum(t.num_chunks for t in tensors), True: sum(t.num_chunks * len(t.global_shape) for t in tensors)}
    total = 0
    for name in _INT_COLUMNS:
        count, needed = _count(chunks[name]), widths[name.startswith("box_")]
        if count != needed:
            _damaged(chunks.where, f"column {name!r} has {show(count)} values, but the tensors need {needed}")
        total += count
    if total > MAX_VALUES and total > min(MOST_VALUES, VALUES_PER_CHUNK * (stored := num_digests())):
        raise ValueError(f"a chunk table of {total} values, but only {stored} stored digests")


def _check(manifest: Manifest, where: str) -> None:
    """Refuse a manifest that contradicts itself, before any of its offsets is used."""
    table, sizes = manifest.chunks, np.array([f.size_bytes for f in manifest.files] or [0], dtype=np.int64)
    rows = sum(t.num_chunks for t in manifest.tensors)
    _check_objects(manifest, where)
    if table.digests is not None and len(table.digests) != rows * DIGEST_BYTES:
        _damaged(where, f"{len(table.digests)} bytes of digests for {rows} chunks")
    if rows:
        _check_rows(manifest, sizes, where)
    for tensor in manifest.tensors:
        offsets, box_sizes = manifest.boxes(tensor)
        if bool((box_sizes > np.array(tensor.global_shape, dtype=np.int64) - offsets).any()):
            _damaged(where, f"{tensor.fqn}: a chunk lies outside the global shape {tensor.global_shape}")
        _check_room(manifest, tensor, where)


def _check_rows(manifest: Manifest, sizes: Int64s, where: str) -> None:
    """Check the chunk table against the `sizes` of the files."""
    table = manifest.chunks
    if min(int(getattr(table, name).min(initial=0)) for name in _INT_COLUMNS) < 0:
        _damaged(where, "a negative number in the chunk table")
    if int(table.file.max()) >= len(manifest.files) or int(table.codec.max()) >= len(manifest.codecs):
        _damaged(where, "a chunk names a file or codec that is not listed")
    if unknown := set(manifest.codecs) - set(CODECS):
        raise DamagedError(
            f"{where}: uses the codecs {show(sorted(unknown))}, unknown to this release: upgrade titan-ckpt"
        )
    raw = manifest.codecs.index(RAW) if RAW in manifest.codecs else -1
    # Compare differences: a sum of two huge numbers would overflow.
    for start in range(0, len(table), CHECKED_AT_ONCE):
        at = slice(start, start + CHECKED_AT_ONCE)
        if bool((table.length[at] > sizes[table.file[at]] - table.offset[at]).any()):
            _damaged(where, "a chunk reaches past the end of its file")
        if bool((table.payload_length[at] > table.length[at] - table.payload_offset[at]).any()):
            _damaged(where, "a chunk's payload reaches past its blob")
        encoded = table.codec[at] != raw
        if bool((table.payload_length[at] != table.length[at] - table.payload_offset[at])[encoded].any()):
            _damaged(where, "an encoded chunk does not end with its payload")


def _check_objects(manifest: Manifest, where: str) -> None:
    sizes = {file.path: file.size_bytes for file in manifest.files}
    seen = set(manifest.by_fqn)
    for entry in manifest.objects:
        if entry.fqn in seen:
            _damaged(where, f"{show(entry.fqn)} is listed twice, as a value and as another value or a tensor")
        seen.add(entry.fqn)
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


def _decode_tensors(rows: JsonValue, placements: list[Placements | None]) -> tuple[TensorEntry, ...]:
    tensors, first = [], 0
    for row in rows.entries():
        shape, stages = row["shape"].wholes(), row.find("stages")
        if row["dtype"].text() not in ELEMENT_SIZE:
            row["dtype"].fail("a dtype of torch")
        if len(shape) > MAX_DIMENSIONS:
            row["shape"].fail(f"at most {MAX_DIMENSIONS} dimensions")
        placed = placements[row["placement"].whole(0, len(placements) - 1)]
        if any(shard.dim >= len(shape) for shard in (placed or {}).values()):
            row["placement"].fail(f"a placement that cuts one of the {len(shape)} dimensions")
        tensors.append(
            TensorEntry(
                fqn=row["fqn"].text(),
                dtype=row["dtype"].text(),
                global_shape=tuple(shape),
                placements=placed,
                stages=None if stages is None else tuple(stages.wholes()),
                first_chunk=first,
                num_chunks=row["chunks"].whole(),
            )
        )
        first += tensors[-1].num_chunks
    if any(a.fqn >= b.fqn for a, b in pairwise(tensors)):
        raise ValueError("tensors are not in order of name, or one is repeated")
    return tuple(tensors)


def _encode_column(values: Int64s) -> list[int] | dict[str, Any]:
    if len(values) <= MAX_PLAIN_VALUES:
        return [int(v) for v in values]
    differences = np.diff(values, prepend=np.int64(0)).astype("<i8")
    packed = zstandard.ZstdCompressor(level=3).compress(differences.tobytes())
    return {"count": len(values), "zstd": base64.b64encode(packed).decode("ascii")}


def _decode_shared(name: str, column: JsonValue, tensors: tuple[TensorEntry, ...]) -> Column:
    """A column; in a long table as a SharedColumn with one block per tensor."""
    values = _decode_column(column)
    widths = [t.num_chunks * (len(t.global_shape) if name.startswith("box_") else 1) for t in tensors]
    is_long = sum(t.num_chunks for t in tensors) >= MIN_SHARED_ROWS and sum(widths) == len(values)
    return shared_column(values, widths) if is_long and name != "offset" else values


def _decode_column(column: JsonValue) -> Int64s:
    if isinstance(column.value, list):
        return np.array(column.wholes(-MAX_INT64), dtype=np.int64)
    count = _count(column)
    packed = base64.b64decode(column["zstd"].text(MAX_TEXT), validate=True)
    if zstandard.get_frame_parameters(packed).content_size != count * 8:
        raise ValueError(f"a column of {count} values is compressed with another size")
    raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=count * 8)
    if len(raw) != count * 8:
        raise ValueError(f"a column has {len(raw)} bytes for {count} values")
    return np.cumsum(np.frombuffer(raw, dtype="<i8"), dtype=np.int64)


def _count(column: JsonValue) -> int:
    return len(column.value) if isinstance(column.value, list) else column["count"].whole()


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
        raise UnsafeContentError(f"{where}: {show(path)} is not a data file of this run")
    return path


def _safe_asset(name: str, where: str) -> str:
    try:
        return check_relative(name)
    except UsageError as error:
        raise UnsafeContentError(f"{where}: asset {show(name)} is not a path inside the checkpoint") from error


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def _unhex(value: JsonValue) -> bytes | None:
    if value.value is None:
        return None
    found = bytes.fromhex(value.text())
    if len(found) != DIGEST_BYTES:
        value.fail(f"a digest of {DIGEST_BYTES} bytes in hexadecimal")
    return found
