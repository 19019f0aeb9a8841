"""COMMIT.json, the small file whose presence makes a checkpoint exist, and the order in which files are written.

Data first, then `manifest.json` (and `digests.bin`), then `.metadata` for plain DCP readers, then `COMMIT.json`. Each write is
complete and durable when it returns, so after a crash at any moment, all files of a COMMIT exist.

Two jobs that save one step: both files are written only if they are as they were when the save began, so of jobs that overlap
only one writes `.metadata`. Two objects cannot change at once, so a job may still write it between the two writes of another.
Then its own COMMIT fails and it puts the winner's `.metadata` back, as it does whenever its COMMIT fails; and the winner looks
once more after its COMMIT. Only if the loser dies in between, plain DCP readers see the loser's (complete) checkpoint; `verify`
reports it, `verify --fix` mends it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from titan_ckpt.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConditionFailedError,
    DamagedError,
    NewerFormatError,
    NotCommittedError,
    NotFoundError,
    StoreError,
    UnsafeContentError,
)
from titan_ckpt.format.coverage import coverage_problems, describe
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.format.manifest_json import EncodedManifest, check_version, decode_manifest, encode_manifest
from titan_ckpt.format.names import COMMIT, DIGESTS, MANIFEST, METADATA, check_step, is_attempt, step_folder
from titan_ckpt.format.own_step import check_index, check_place, holds_only_ours
from titan_ckpt.parsing.json_values import JsonValue, parse_json, show
from titan_ckpt.store.base import Store, check_absent

log = logging.getLogger(__name__)
COMMIT_FORMAT = "titan-ckpt-commit"
COMMIT_VERSION = 1
DIGEST = "xxh3_128"
MAX_COMMIT_BYTES = 1 << 20
# In place of a COMMIT for the moment in which it is taken back: says that it is ours, and is not valid.
WITHDRAWN = json.dumps({"format": COMMIT_FORMAT, "version": COMMIT_VERSION, "withdrawn": True}).encode()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The versions of a step's COMMIT and `.metadata` when a save of it began; None where there was none."""

    commit: str | None
    metadata: str | None


def found_before(store: Store, step: int) -> Before:
    """What a save of `step` replaces; every writer asks before it writes, and writes nothing if this raises.

    AlreadyExistsError if what is there is not proved to be ours, NewerFormatError if a later release committed the step.
    """
    check_place(store, step)
    before = Before(commit=commit_version(store, step), metadata=_version(store, metadata_path(step)))
    check_index(store, step, _replaced_digest(store, step))  # of what has these versions, or of something newer
    return before


def _replaced_digest(store: Store, step: int) -> str | None:
    """The digest of the `.metadata` that goes with the COMMIT that is there; None if there is none, or a damaged one of ours."""
    try:
        commit = find_commit(store, step)
    except NewerFormatError:
        raise
    except CheckpointError as error:
        if not _is_ours_damaged(store, step):
            raise AlreadyExistsError(
                f"{error}; it is not proved to be ours, so nothing was written. Move it away, or give another URL or step"
            ) from error
        return None
    return None if commit is None else commit.metadata_digest


def _is_ours_damaged(store: Store, step: int) -> bool:
    """Whether a COMMIT that is not valid was ours: it says so, or it is no JSON at all and only our files are beside it."""
    path = commit_path(step)
    try:
        content = parse_json(store.read(path, 0, min(store.stat(path).size_bytes, MAX_COMMIT_BYTES)), store.where(path))
    except CheckpointError:
        return holds_only_ours(store, step_folder(step))
    if not isinstance(content, dict) or content.get("format") != COMMIT_FORMAT:
        return False
    check_version(content.get("version"), COMMIT_VERSION, store.where(path))  # a later format may have another digest
    return True


def metadata_path(step: int) -> str:
    """Path of a step's `.metadata`, relative to the run."""
    return f"{step_folder(step)}/{METADATA}"


def write_commit(
    store: Store,
    manifest: Manifest,
    metadata: bytes,
    *,
    replaces: Before | None,
    prove: Callable[[], None] | None = None,
) -> Commit:
    """Commit a checkpoint whose data files are all written. Callers go through `checkpoint.commit_proved`.

    `replaces` is what was there when the save began; None if the step must have no commit. ConditionFailedError if another job
    committed this step meanwhile; on a store without conditional writes (`Store.honours_conditions`) the last writer wins.
    `prove` is called once the manifest is in the store; if it raises, nothing is committed.
    """
    check_step(manifest.step)
    before = replaces or replace(found_before(store, manifest.step), commit=None)
    folder = step_folder(manifest.step)
    if problems := coverage_problems(manifest):
        raise CheckpointError(
            f"{store.where(folder)}: not committed, since no reader could use it: its chunks do not cover their tensors exactly "
            f"once: {describe(problems)}"
        )
    encoded = _encoded(manifest, store.where(folder))
    store.write(f"{folder}/{manifest.attempt}/{MANIFEST}", [encoded.manifest])
    if encoded.digests is not None:
        store.write(f"{folder}/{manifest.attempt}/{DIGESTS}", [encoded.digests])
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
    version = publish(store, manifest.step, manifest.attempt, metadata, _encode(content), before, prove=prove)
    return _decode(content, version=version, where=store.where(commit_path(manifest.step)))


def _encoded(manifest: Manifest, where: str) -> EncodedManifest:
    """The files of a manifest. CheckpointError unless they can be read back: what nobody can open is not committed."""
    encoded = encode_manifest(manifest)
    try:
        decode_manifest(encoded.manifest, where="its manifest", num_digests=lambda: len(manifest.chunks))
    except CheckpointError as error:
        raise CheckpointError(f"{where}: not committed, since no reader could open it: {error}") from error
    return encoded


def publish(
    store: Store, step: int, attempt: str, metadata: bytes, commit: bytes, before: Before, *,
    prove: Callable[[], None] | None = None,
) -> str:  # fmt: skip
    """Write a step's `.metadata` and then its COMMIT, which names `attempt`; returns the version of the COMMIT.

    The manifest is in the store, for all to see. `prove` is called first; if it raises, nothing is committed.
    """
    if prove is not None:
        prove()
    path, previous = metadata_path(step), _previous(store, step, before)
    if commit_version(store, step) != before.commit:
        raise _lost(store, step, attempt)
    written = _write_metadata(store, path, metadata, before.metadata)
    if written is None:
        raise _lost(store, step, attempt)
    try:
        version = store.write_if(commit_path(step), commit, version=before.commit).version
    except StoreError as error:
        # If only the response was lost, the commit is ours, whatever error the retry got.
        current = _readable_commit(store, step)
        if current is None or current.attempt != attempt:
            _put_back(store, path, previous, current, written)
            if isinstance(error, ConditionFailedError):
                raise _lost(store, step, attempt) from error
            raise
        version = current.version
    _keep_metadata(store, step, metadata, written)
    return version


def _write_metadata(store: Store, path: str, data: bytes, version: str | None) -> str | None:
    """Write `.metadata` if it still has `version`; its new version, None if another job was first."""
    try:
        return store.write_if(path, data, version=version).version
    except ConditionFailedError:
        found = _version(store, path)
        return found if found is not None and store.read(path) == data else None  # only the response was lost


def _previous(store: Store, step: int, before: Before) -> bytes | None:
    """The `.metadata` that a save replaces, to put it back should the save lose; None if there is none."""
    try:
        return None if before.metadata is None else store.read(metadata_path(step))
    except NotFoundError:
        return None


def _put_back(store: Store, path: str, previous: bytes | None, winner: Commit | None, written: str) -> None:
    """After a commit that failed, restore the `.metadata` of the COMMIT that is there, if it is what this job replaced."""
    if previous is None or winner is None or digest(previous).hex() != winner.metadata_digest:
        return
    try:
        store.write_if(path, previous, version=written)
    except ConditionFailedError:
        return  # the winner was faster
    except StoreError as error:
        log.warning(
            "%s: the index that goes with its commit was not put back (run `verify --fix`): %s",
            store.where(path),
            error,
        )


def _keep_metadata(store: Store, step: int, data: bytes, written: str) -> None:
    """After the commit, replace what another job of ours may have written over this save's `.metadata`."""
    path = metadata_path(step)
    try:
        found = _version(store, path)
        if found != written:
            check_index(store, step, None)
            store.write_if(path, data, version=found)
    except (StoreError, CheckpointError) as error:  # committed and whole; only plain DCP readers may be misled
        log.warning("%s: may not be the one that was committed (run `verify --fix`): %s", store.where(path), error)


def _lost(store: Store, step: int, attempt: str) -> ConditionFailedError:
    return ConditionFailedError(
        f"{store.where(commit_path(step))}: another job committed step {step} while this one was saving it, or is about to; this "
        f"save (attempt {attempt}) was not committed. Stop one of the two jobs, or give them different URLs."
    )


def read_record(store: Store, path: str) -> JsonValue:
    """A small JSON record that a job left in a run; DamagedError for anything else."""
    return JsonValue(parse_json(store.read(path), store.where(path)), store.where(path))


def read_commit(store: Store, step: int) -> Commit:
    """The commit of `step`.

    NotCommittedError if there is none, DamagedError if it is invalid, NewerFormatError if a later release wrote it.
    """
    path = commit_path(step)
    try:
        entry, data = store.read_whole(path, at_most=MAX_COMMIT_BYTES)
    except NotFoundError as error:
        check_absent(store, path)
        raise NotCommittedError(f"{store.where(step_folder(step))} is not committed: it has no {COMMIT}") from error
    if data is None:
        raise DamagedError(f"{store.where(path)}: {entry.size_bytes} bytes are too many for a commit")
    content = parse_json(data, store.where(path))
    if not isinstance(content, dict) or content.get("format") != COMMIT_FORMAT:
        raise DamagedError(f"{store.where(path)}: not a commit of titan-ckpt")
    JsonValue(content, store.where(path)).free()  # what is deep takes quadratic time to encode
    if _encode({key: value for key, value in content.items() if key != DIGEST}) != data:
        raise DamagedError(f"{store.where(path)}: its content does not match its digest")
    check_version(content.get("version"), COMMIT_VERSION, store.where(path))
    commit = _decode(content, version=entry.version, where=store.where(path))
    if commit.step != step:
        raise DamagedError(f"{store.where(path)}: is the commit of step {commit.step}, moved or copied here")
    return commit


def commit_version(store: Store, step: int) -> str | None:
    """The store's version of a step's COMMIT, even if its content is invalid; None if there is none."""
    return _version(store, commit_path(step))


def _version(store: Store, path: str) -> str | None:
    try:
        return store.stat(path).version
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
