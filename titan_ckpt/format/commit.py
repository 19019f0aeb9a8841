"""COMMIT.json, the small file whose presence makes a checkpoint exist, and the order in which files are written.

Data first, then `manifest.json` (and `digests.bin`), then `.metadata` for plain DCP readers, then `COMMIT.json`. Each write is
complete and durable when it returns, so after a crash at any moment, all files of a COMMIT exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt.errors import (
    CheckpointError,
    ConditionFailedError,
    DamagedError,
    NotCommittedError,
    NotFoundError,
    StoreError,
    UnsafeContentError,
)
from titan_ckpt.format.coverage import coverage_problems, describe
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.format.manifest_json import check_version, encode_manifest
from titan_ckpt.format.names import COMMIT, DIGESTS, MANIFEST, METADATA, is_attempt, step_folder
from titan_ckpt.parsing.json_values import JsonValue, parse_json, show
from titan_ckpt.store.base import Store

COMMIT_FORMAT = "titan-ckpt-commit"
COMMIT_VERSION = 1
DIGEST = "xxh3_128"
MAX_COMMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The fields of COMMIT.json. `version` is the store's version of that object, for a later conditional write."""

    step: int
    attempt: str
    kind: str
    created: str
    size_bytes: int
    mesh: str
    manifest_size: int
    manifest_digest: str
    metadata_digest: str
    version: str


def commit_path(step: int) -> str:
    """Path of a step's COMMIT.json, relative to the run."""
    return f"{step_folder(step)}/{COMMIT}"


def write_commit(store: Store, manifest: Manifest, metadata: bytes, *, replaces: str | None) -> Commit:
    """Commit a checkpoint whose data files are all written.

    `replaces` is the `commit_version` when the save began (None: there was no commit). ConditionFailedError if another job
    committed this step meanwhile; on a store without conditional writes (`Store.honours_conditions`) the last writer wins.
    """
    folder = step_folder(manifest.step)
    if problems := coverage_problems(manifest):
        raise CheckpointError(
            f"{store.where(folder)}: not committed, since no reader could use it: its chunks do not cover their tensors exactly "
            f"once: {describe(problems)}"
        )
    encoded = encode_manifest(manifest)
    store.write(f"{folder}/{manifest.attempt}/{MANIFEST}", [encoded.manifest])
    if encoded.digests is not None:
        store.write(f"{folder}/{manifest.attempt}/{DIGESTS}", [encoded.digests])
    store.write(f"{folder}/{METADATA}", [metadata])
    content = {
        "format": COMMIT_FORMAT,
        "version": COMMIT_VERSION,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "kind": manifest.kind,
        "created": manifest.created,
        "size_bytes": manifest.size_bytes,
        "mesh": "" if manifest.mesh is None else str(manifest.mesh),
        "manifest": {"size": len(encoded.manifest), "xxh3_128": digest(encoded.manifest).hex()},
        "metadata": {"size": len(metadata), "xxh3_128": digest(metadata).hex()},
    }
    path = commit_path(manifest.step)
    try:
        entry = store.write_if(path, _encode(content), version=replaces)
    except StoreError as error:
        # If only the response was lost, the commit is ours, whatever error the retry got.
        current = _readable_commit(store, manifest.step)
        if current is not None and current.attempt == manifest.attempt:
            return current
        if not isinstance(error, ConditionFailedError):
            raise
        raise ConditionFailedError(
            f"{store.where(path)}: another job committed step {manifest.step} while this one was saving it; this save "
            f"(attempt {manifest.attempt}) was not committed. Stop one of the two jobs, or give them different URLs."
        ) from error
    return _decode(content, version=entry.version, where=store.where(path))


def read_commit(store: Store, step: int) -> Commit:
    """The commit of `step`.

    NotCommittedError if there is none, DamagedError if it is invalid, NewerFormatError if a later release wrote it.
    """
    path = commit_path(step)
    try:
        entry = store.stat(path)
        if entry.size_bytes > MAX_COMMIT_BYTES:
            raise DamagedError(f"{store.where(path)}: {entry.size_bytes} bytes are too many for a commit")
        data = store.read(path, 0, entry.size_bytes)
    except NotFoundError as error:
        raise NotCommittedError(f"{store.where(step_folder(step))} is not committed: it has no {COMMIT}") from error
    content = parse_json(data, store.where(path))
    if not isinstance(content, dict) or content.get("format") != COMMIT_FORMAT:
        raise DamagedError(f"{store.where(path)}: not a commit of titan-ckpt")
    if _encode({key: value for key, value in content.items() if key != DIGEST}) != data:
        raise DamagedError(f"{store.where(path)}: its content does not match its digest")
    check_version(content.get("version"), COMMIT_VERSION, store.where(path))
    commit = _decode(content, version=entry.version, where=store.where(path))
    if commit.step != step:
        raise DamagedError(f"{store.where(path)}: is the commit of step {commit.step}, moved or copied here")
    return commit


def commit_version(store: Store, step: int) -> str | None:
    """The store's version of a step's COMMIT, even if its content is invalid; None if there is none."""
    try:
        return store.stat(commit_path(step)).version
    except NotFoundError:
        return None


def find_commit(store: Store, step: int) -> Commit | None:
    """The commit of `step`, None if there is none."""
    try:
        return read_commit(store, step)
    except NotCommittedError:
        return None


def _readable_commit(store: Store, step: int) -> Commit | None:
    try:
        return find_commit(store, step)
    except CheckpointError:
        return None


def _encode(content: Mapping[str, Any]) -> bytes:
    """JSON whose last entry is the digest of the JSON without that entry, so that any changed byte is detected."""
    body = json.dumps(content, indent=1).encode()
    return json.dumps({**content, DIGEST: digest(body).hex()}, indent=1).encode()


def _decode(content: Mapping[str, Any], *, version: str, where: str) -> Commit:
    document = JsonValue(content, where)
    manifest, metadata = document["manifest"], document["metadata"]
    commit = Commit(
        step=document["step"].whole(),
        attempt=document["attempt"].text(),
        kind=document["kind"].text(),
        created=document["created"].text(),
        size_bytes=document["size_bytes"].whole(),
        mesh=document["mesh"].text(),
        manifest_size=manifest["size"].whole(),
        manifest_digest=manifest["xxh3_128"].text(),
        metadata_digest=metadata["xxh3_128"].text(),
        version=version,
    )
    if not is_attempt(commit.attempt):
        raise UnsafeContentError(f"{where}: {show(commit.attempt)} is not a valid attempt name")
    return commit
