"""Digests of an exported model, in a small file beside it that other readers ignore: safetensors files have none.

`titan_ckpt_digests.json` covers every byte that a reader of the model uses: of each weight file the header and every tensor, and
the small files but README.md, which people edit. transformers and vLLM open files by their names or as `*.safetensors`, so they
never see it. The hub cache names its blobs by hashes, SHA-256 of large files and Git's SHA-1 of small ones: these do as well.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_ckpt.checkpoint.foreign_files import Recorded, hub_blob, local_root
from titan_ckpt.converters.hf.assets import README
from titan_ckpt.errors import DamagedError
from titan_ckpt.format.digest import digest
from titan_ckpt.parsing.json_values import JsonValue, parse_json
from titan_ckpt.store.base import Store

DIGESTS = "titan_ckpt_digests.json"
ALGORITHM = "xxh3-128"
VERSION = 1
REMEDY = f"{DIGESTS} holds the digests of the exported files: if they were changed on purpose, remove it"
log = logging.getLogger(__name__)
_HEX = re.compile(r"[0-9a-f]{32}")
_HUB_ALGORITHMS = {40: "git-sha-1", 64: "sha-256"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """A weight file: its size, its header (length and JSON), and the digest of each tensor's bytes."""

    size_bytes: int
    header_bytes: int
    header: bytes
    tensors: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFile:
    """A small file: its size and digest."""

    size_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDigests:
    """What `titan_ckpt_digests.json` records, by file name."""

    weights: Mapping[str, WeightFile]
    files: Mapping[str, SmallFile]

    def tensor(self, file: str, name: str) -> bytes | None:
        """The digest of a tensor, None if it is not recorded."""
        return self.weights[file].tensors.get(name) if file in self.weights else None


def small_files(files: Mapping[str, bytes]) -> dict[str, SmallFile]:
    """The records of small files, without README.md."""
    return {
        name: SmallFile(size_bytes=len(data), digest=digest(data)) for name, data in files.items() if name != README
    }


def encode_digests(digests: ModelDigests) -> bytes:
    """Encode the file; its last key is the digest of the others."""
    content: dict[str, Any] = {
        "format": "titan-ckpt digests",
        "version": VERSION,
        "algorithm": ALGORITHM,
        "weights": {
            name: {
                "size_bytes": file.size_bytes,
                "header_bytes": file.header_bytes,
                "header": file.header.hex(),
                "tensors": {tensor: value.hex() for tensor, value in sorted(file.tensors.items())},
            }
            for name, file in sorted(digests.weights.items())
        },
        "files": {
            name: {"size_bytes": file.size_bytes, "digest": file.digest.hex()}
            for name, file in sorted(digests.files.items())
        },
    }
    return (json.dumps(content | {"digest": _own_digest(content)}, indent=1) + "\n").encode()


def _own_digest(content: Mapping[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hex()


def read_digests(store: Store) -> ModelDigests | None:
    """Read the file of a model; None if it has none, or one of a later version. DamagedError if it is not what was written."""
    if not store.exists(DIGESTS):
        return None
    where = store.where(DIGESTS)
    content = JsonValue(parse_json(store.read(DIGESTS), where), where)
    if content["version"].whole() > VERSION:
        return None
    own = content["digest"].text()
    rest = {key: value for key, value in content.free().items() if key != "digest"}
    if own != _own_digest(rest) or content["algorithm"].text() != ALGORITHM:
        raise DamagedError(f"{where}: is not what was written (its own digest differs)")
    return ModelDigests(
        weights={name: _weight_file(entry) for name, entry in content["weights"].items()},
        files={
            name: SmallFile(size_bytes=entry["size_bytes"].whole(), digest=_digest(entry["digest"]))
            for name, entry in content["files"].items()
        },
    )


def _weight_file(entry: JsonValue) -> WeightFile:
    return WeightFile(
        size_bytes=entry["size_bytes"].whole(),
        header_bytes=entry["header_bytes"].whole(),
        header=_digest(entry["header"]),
        tensors={name: _digest(value) for name, value in entry["tensors"].items()},
    )


def _digest(value: JsonValue) -> bytes:
    if not _HEX.fullmatch(value.text()):
        value.fail("a digest of 32 hexadecimal digits")
    return bytes.fromhex(value.text())


def of_weight_files(digests: ModelDigests, places: Mapping[str, Mapping[str, tuple[int, int]]]) -> Iterator[Recorded]:
    """The recorded parts of weight files; `places`: file -> tensor -> (start, end) as the headers say now."""
    for path, file in digests.weights.items():
        whole = {"path": path, "size_bytes": file.size_bytes, "algorithm": ALGORITHM}
        yield Recorded(start=0, end=file.header_bytes, digest=file.header, **whole)  # type: ignore[arg-type]
        for name, value in file.tensors.items():
            if name not in places.get(path, {}):
                raise DamagedError(f"{path}: {name}: {DIGESTS} records it, but the file does not hold it")
            start, end = places[path][name]
            yield Recorded(start=start, end=end, digest=value, fqn=name, **whole)  # type: ignore[arg-type]


def check_headers(store: Store) -> None:
    """Compare headers and small files with the record, if there is one: DamagedError for a header, a warning for a small file."""
    digests = read_digests(store)
    if digests is None:
        return
    for path, file in digests.weights.items():
        length = min(file.header_bytes, store.stat(path).size_bytes) if store.exists(path) else 0
        if length != file.header_bytes or digest(store.read(path, 0, length)) != file.header:
            raise DamagedError(f"{store.where(path)}: its header is not the one that was exported; {REMEDY}")
    for path, small in digests.files.items():
        if not store.exists(path) or digest(store.read(path)) != small.digest:
            log.warning("%s: is not the file that was exported", store.where(path))


def of_small_files(digests: ModelDigests) -> Iterator[Recorded]:
    """The recorded small files."""
    for path, file in digests.files.items():
        size = file.size_bytes
        yield Recorded(path=path, size_bytes=size, start=0, end=size, digest=file.digest, algorithm=ALGORITHM)


def of_hub_blobs(store: Store, paths: Sequence[str]) -> Iterator[Recorded]:
    """Files of a hub cache, by the hash that names each blob."""
    root = local_root(store)
    for path in paths if root is not None else ():
        blob = hub_blob(os.path.join(root or "", path))
        algorithm = _HUB_ALGORITHMS.get(len(blob or ""))
        if blob is not None and algorithm is not None and re.fullmatch(r"[0-9a-f]+", blob):
            size = store.stat(path).size_bytes
            yield Recorded(
                path=path, size_bytes=size, start=0, end=size, digest=bytes.fromhex(blob), algorithm=algorithm
            )
