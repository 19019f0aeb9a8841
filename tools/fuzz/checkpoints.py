"""Families of what a checkpoint consists of: manifest, COMMIT, `.metadata`, a tensor's blob; and of texts that users give."""

from __future__ import annotations

import base64
import io
import json
import random
import warnings
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import zstandard

from titan_ckpt.errors import TitanError
from titan_ckpt.format.commit import COMMIT_FORMAT, commit_path, read_commit
from titan_ckpt.format.coverage import coverage_problems
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.dcp_read import data_paths, dcp_paths, read_dcp_metadata
from titan_ckpt.format.digest import digest
from titan_ckpt.format.foreign_blob import check_records, locate_payload
from titan_ckpt.format.manifest import Chunk, Manifest
from titan_ckpt.format.manifest_json import decode_manifest, digests_beside, encode_manifest
from titan_ckpt.format.torch_blob import envelope
from titan_ckpt.location import parse_location
from titan_ckpt.resharding.placement_rules import read_rules
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Box
from titan_ckpt.tui.data.metrics import parse_metric_lines
from tools.fuzz.family import Family
from tools.fuzz.memory_store import MemoryStore
from tools.fuzz.mutate import mutate_bytes, mutate_json, mutate_pickle, mutate_text
from tools.paths import DATA

WHERE = "memory://fuzz/file"
SMALL_COPY = 1 << 16
MOST_SIGNED = 500


def _manifests() -> list[bytes]:
    return [path.read_bytes() for path in sorted(DATA.glob("golden/v1/*/*/manifest.json"))]


def _packed_column(values: Sequence[int], count: int) -> dict[str, object]:
    """A column as a large manifest has it: differences, compressed; `count` may be a lie."""
    differences = np.diff(np.array(values, np.int64), prepend=np.int64(0)).astype("<i8")
    return {"count": count, "zstd": base64.b64encode(zstandard.compress(differences.tobytes())).decode()}


def mutate_manifest(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change a manifest as JSON; or compress its columns, with their true length or with one that its tensors claim."""
    if rng.random() < 0.7:
        return mutate_json(rng, data, others)
    try:
        content = json.loads(data)
        if rng.random() < 0.4:
            rng.choice(content["tensors"])["chunks"] = rng.choice((0, 3, 1 << 20, 1 << 28, 1 << 31, 1 << 40, 1 << 60))
        rows = sum(tensor["chunks"] for tensor in content["tensors"])
        widths = {True: sum(t["chunks"] * len(t["shape"]) for t in content["tensors"]), False: rows}
        for name, column in content["chunks"].items():
            content["chunks"][name] = _packed_column(column, widths[name.startswith("box_")])
        return json.dumps(content).encode()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, IndexError):
        return mutate_json(rng, data, others)


def _read_manifest(data: bytes) -> None:
    manifest = decode_manifest(data, where=WHERE)
    digests_beside(data, WHERE)
    coverage_problems(manifest)
    if len(manifest.chunks) <= SMALL_COPY:
        _use(manifest)


def _use(manifest: Manifest) -> None:
    """What commands do with a manifest that was accepted."""
    for tensor in manifest.tensors:
        for chunk in manifest.chunks_of(tensor):
            manifest.chunks_touching(tensor, chunk.box)
    encode_manifest(manifest)
    dcp_metadata(manifest)


def _commits() -> list[bytes]:
    return [path.read_bytes() for path in sorted(DATA.glob("golden/v1/*/COMMIT.json"))]


def _read_commit(data: bytes) -> None:
    for content in (data, _signed(data)):
        with suppress(TitanError):
            read_commit(MemoryStore({commit_path(1): content}), 1)


def _signed(data: bytes) -> bytes:
    """The same COMMIT with the digest that it should have: who can write a store can forge it."""
    if data.count(b"[") + data.count(b"{") > MOST_SIGNED:  # json.dumps takes quadratic time for deep values
        return data
    try:
        content = json.loads(data)
        content = {key: value for key, value in content.items() if key != "xxh3_128"} | {"format": COMMIT_FORMAT}
        body = json.dumps(content, indent=1).encode()
        return json.dumps({**content, "xxh3_128": digest(body).hex()}, indent=1).encode()
    except (ValueError, AttributeError, RecursionError):
        return data


def _indexes() -> list[bytes]:
    found = [path.read_bytes() for path in sorted(DATA.rglob(".metadata"))]
    return [data for data in found if len(data) < 1 << 15]


_SIZES = {
    **{f"__{rank}_{number}.distcp": 1 << 20 for rank in range(4) for number in range(3)},
    **{f"{path.parent.name}/{path.name}": path.stat().st_size for path in sorted(DATA.glob("golden/v1/*/*/*.distcp"))},
}


def _read_index(data: bytes) -> None:
    with suppress(TitanError):
        manifest = read_dcp_metadata(data, sizes=_SIZES, step=1, where=WHERE)
        coverage_problems(manifest)
        _use(replace(manifest, tensors=manifest.tensors[:100]))
    with suppress(TitanError):
        dcp_paths(data, where=WHERE)
    data_paths(data, where=WHERE)


def _blobs() -> list[bytes]:
    around = envelope("float32", (3, 4))
    blobs = [around.prefix + bytes(48) + around.suffix]
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blobs[0])) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, _record(old, info))
    return [*blobs, out.getvalue()]


def _record(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """A record's bytes, without a look at its CRC."""
    info.CRC = None  # type: ignore[assignment]  # as zipfile itself says "do not check"
    return archive.read(info)


def mutate_archive(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change a ZIP archive: its pickle, its records, its directory."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data, others)
    out = io.BytesIO()
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            zipfile.ZipFile(io.BytesIO(data)) as old,
            zipfile.ZipFile(out, "w", rng.choice((0, 0, 0, 8))) as new,
        ):
            for info in old.infolist():
                content = _record(old, info)
                if info.filename.endswith(".pkl") and rng.random() < 0.8:
                    content = mutate_pickle(rng, content, ())
                elif rng.random() < 0.1:
                    content = mutate_bytes(rng, content, ())
                for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 0, 2))):
                    new.writestr(_renamed(rng, info.filename), content)
    except Exception:  # noqa: BLE001  (an archive that was mutated before)
        return mutate_bytes(rng, data, others)
    return out.getvalue()


def _renamed(rng: random.Random, name: str) -> str:
    return name if rng.random() < 0.97 else rng.choice(("archive/data/0", "x/data.pkl", "../x", name + "x", ""))


def _read_blob(data: bytes) -> None:
    store = MemoryStore({"f": data})
    chunk = Chunk(
        fqn="w", box=Box((0, 0), (3, 4)), file="f", offset=0, length=len(data), payload_offset=-1, payload_length=-1,
        codec="raw", digest=None,
    )  # fmt: skip
    check_records(store, "f", 0, len(data))
    locate_payload(store, "f", chunk, "float32")


def _settings() -> list[bytes]:
    return [
        b"mesh pp=2,dp_shard=8,tp=4", b"mesh dp_shard=100000000", b"mesh tp=\xc2\xb2", b"place s3://bucket/run@1200",
        b"place memory://run/step-00000020/",
        b'rules [placements]\n"*.o_proj.weight*" = ["tp:1", "dp_shard+cp:0"]\n"*.step" = []',
        b'lines {"event": "step", "time_s": 1.5, "step": 3, "loss": 2.5}\n{"step": 4, "loss": NaN, "lr": 1e-3}\n',
    ]  # fmt: skip


def _read_settings(data: bytes) -> None:
    kind, _, rest = data.partition(b" ")
    text = rest.decode("utf-8", "replace")
    if kind == b"mesh":
        mesh = MeshSpec.parse(text)
        str(mesh), mesh.coordinate(mesh.world_size - 1)
    elif kind == b"place":
        str(parse_location(text))
    elif kind == b"rules":
        read_rules(text, where=WHERE)
    else:
        parse_metric_lines(rest, WHERE).panels()


def _of_manifest(size: int) -> int:
    """Columns of up to MAX_VALUES numbers are accepted without stored digests."""
    return (256 << 20) + 64 * size


FAMILIES: dict[str, Family] = {
    found.name: found
    for found in (
        Family(name="manifest", seeds=_manifests, mutate=mutate_manifest, read=_read_manifest, bound=_of_manifest),
        Family(name="commit", seeds=_commits, mutate=mutate_json, read=_read_commit),
        Family(name="metadata", seeds=_indexes, mutate=mutate_pickle, read=_read_index),
        Family(name="blob", seeds=_blobs, mutate=mutate_archive, read=_read_blob),
        Family(name="settings", seeds=_settings, mutate=mutate_text, read=_read_settings),
    )
}  # fmt: skip
