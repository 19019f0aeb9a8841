"""Open a checkpoint and list a run's: what is committed, what is whole. No torch.

A run's newest checkpoint is the newest one that is committed, resumable and whole (COMMIT agrees with the manifest, every file
is there in its size). One that is damaged is named, and skipped or refused as asked.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from titan_ckpt.checkpoint import foreign_formats
from titan_ckpt.checkpoint.read import read_whole
from titan_ckpt.errors import CheckpointError, DamagedError, NewerFormatError, NotCommittedError, NotFoundError
from titan_ckpt.format.commit import Commit, read_commit
from titan_ckpt.format.dcp_metadata import read_dcp_metadata
from titan_ckpt.format.digest import digest
from titan_ckpt.format.foreign_blob import locate_payload
from titan_ckpt.format.manifest import DIGEST_BYTES, Chunk, Manifest, TensorEntry
from titan_ckpt.format.manifest_json import decode_manifest, digests_beside
from titan_ckpt.format.names import (
    ASSETS,
    DIGESTS,
    MANIFEST,
    METADATA,
    foreign_folder,
    is_attempt,
    parse_foreign_step,
    parse_step,
    step_folder,
)
from titan_ckpt.location import join, parse_location, redact
from titan_ckpt.sharding.placement import Box
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
OnDamage = Literal["error", "fall_back"]
FULL, MODEL, FOREIGN = "full", "model", "foreign"
HUGGING_FACE = "config.json"
MAX_INDEX_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One committed checkpoint of a run. `folder` is its place in `store`; paths in the manifest are relative to it."""

    store: Store
    url: str = field(repr=False)
    step: int
    folder: str
    manifest: Manifest

    def __str__(self) -> str:
        return f"{redact(self.url)}@{self.step}"

    def path(self, file: str) -> str:
        """A manifest's file as a path of the store; `../step-N/...` reaches another step of the run."""
        return os.path.normpath(f"{self.folder}/{file}") if self.folder else file

    def locate(self, chunk: Chunk, *, row_major: bool = True) -> Chunk:
        """`chunk` with its payload's place known; one that others wrote is looked into for it.

        DamagedError for one that is not row-major, unless the caller says that it can read strides.
        """
        if chunk.payload_offset >= 0:
            return chunk
        located = self._located(chunk)
        if row_major and located.strides is not None:
            raise DamagedError(
                f"{self}: {chunk.fqn}: stored with strides {located.strides}, which only `load` can read; "
                f"load it and save it again with titan-ckpt first"
            )
        return located

    def _located(self, chunk: Chunk) -> Chunk:
        """`chunk` as its blob tells."""
        return locate_payload(self.store, self.path(chunk.file), chunk)

    def asset(self, name: str) -> bytes:
        """A small file that was saved along (`tokenizer.json`, ...). NotFoundError if there is none of that name."""
        if name not in self.manifest.assets:
            raise NotFoundError(f"{self}: no asset {name!r}; it has {sorted(self.manifest.assets) or 'none'}")
        data = self.store.read(self.path(f"{self.manifest.attempt}/{ASSETS}/{name}"))
        if digest(data).hex() != self.manifest.assets[name]:
            raise DamagedError(f"{self}: asset {name!r} is not what was saved (digest differs)")
        return data

    @cached_property
    def digests(self) -> bytes | None:
        """xxh3-128 of every chunk's raw payload, 16 bytes each in chunk order; None where the writer gave none."""
        if self.manifest.chunks.digests is not None or self.manifest.kind == FOREIGN:
            return self.manifest.chunks.digests
        attempt = f"{self.folder}/{self.manifest.attempt}"
        expected = digests_beside(self.store.read(f"{attempt}/{MANIFEST}"))
        data = self.store.read(f"{attempt}/{DIGESTS}")
        if digest(data).hex() != expected or len(data) != DIGEST_BYTES * len(self.manifest.chunks):
            raise DamagedError(f"{self}: {DIGESTS} is not what was saved (digest differs)")
        return data

    def digest_of(self, entry: TensorEntry, chunk: Chunk) -> bytes | None:
        """xxh3-128 of the raw payload of one of an entry's chunks; None where the writer gave none."""
        if chunk.digest is not None or self.digests is None:
            return chunk.digest
        offsets = self.manifest.boxes(entry)[0].tolist()
        start = (entry.first_chunk + offsets.index(list(chunk.box.offsets))) * DIGEST_BYTES
        return self.digests[start : start + DIGEST_BYTES]

    def read(self, fqn: str, box: Box | None = None) -> torch.Tensor:
        """A tensor in its stored dtype, in CPU memory, or the part of it in `box` (in elements of the global shape).

        Every chunk it touches is read whole and verified: DamagedError names one that is not what was saved. NotFoundError for
        an unknown name. Needs torch.
        """
        import torch  # only a caller who wants a tensor needs it

        dtype, stored = read_whole(self, fqn, box)
        flat = torch.from_numpy(stored.reshape(-1).view(np.uint8))
        return flat.view(getattr(torch, dtype)).reshape(stored.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A step of a run as `ls` shows it. `state` is committed, partial (no COMMIT) or damaged; `problem` says why."""

    step: int
    state: Literal["committed", "partial", "damaged"]
    problem: str = ""
    commit: Commit | None = None

    @property
    def is_resumable(self) -> bool:
        """Whether training can go on from it: committed, and not a model-only export."""
        return self.state == "committed" and self.commit is not None and self.commit.kind == FULL


def list_checkpoints(url: str | Store) -> list[CheckpointInfo]:
    """Every step of a run, oldest first, none for a run that does not exist; cheap: COMMIT files only, no manifest is read."""
    store = url if isinstance(url, Store) else open_store(url)
    return [_info(store, step) for step in _steps(store)]


def open_checkpoint(
    url: str, *, step: int | None = None, store: Store | None = None, on_damage: OnDamage = "fall_back"
) -> Checkpoint:
    """The checkpoint `url[@STEP]`; without a step the newest that is committed, resumable and whole.

    A foreign DCP checkpoint (a folder with `.metadata` and no commit of ours, or a run of such folders, `step-N`) opens too, with
    kind `foreign`, and a Hugging Face model (a folder with config.json) as a model-only checkpoint of step 0.
    Raises NotCommittedError when there is nothing to open, DamagedError for a damaged one that was named, and for the newest
    one being damaged when `on_damage` is "error"; "fall_back" logs it and takes the one before. One that a later release wrote
    is never skipped: NewerFormatError.
    """
    location = parse_location(url)
    store = store or open_store(location.url)
    wanted = location.step if step is None else step
    if wanted is not None:
        return _open_step(store, location.url, wanted)
    problems = []
    for candidate in reversed(_steps(store)):
        try:
            commit = read_commit(store, candidate)
            if commit.kind == FULL:
                return _open_commit(store, location.url, commit)
        except NotCommittedError:
            continue
        except CheckpointError as error:
            if on_damage == "error" or isinstance(error, NewerFormatError):
                raise
            log.error("%s@%d is damaged and was skipped: %s", store, candidate, error)
            problems.append(f"step {candidate}: {error}")
    return _last_resort(store, location.url, problems)


def _last_resort(store: Store, url: str, problems: list[str]) -> Checkpoint:
    """No resumable checkpoint: a foreign one, the newest model-only one, or an error that says what was seen."""
    if store.exists(METADATA):
        return _open_foreign(store, url, folder="", step=_foreign_step(url))
    for info in reversed(list_checkpoints(store)):
        if info.state == "committed" and info.commit is not None:
            return _open_commit(store, url, info.commit)
    if others := foreign_steps(store):
        return _open_foreign(store, url, folder=others[-1][1], step=others[-1][0])
    if store.exists(HUGGING_FACE) or store.folders("snapshots"):
        return _open_hugging_face(store, url)
    seen = "; ".join(problems) or _what_is_there(store)
    raise NotCommittedError(f"{store}: no committed checkpoint here ({seen})")


def _what_is_there(store: Store) -> str:
    steps = _steps(store)
    if steps:
        return f"steps {', '.join(map(str, steps[-3:]))} were begun but not committed"
    has_something = bool(store.folders()) or next(store.list(), None) is not None
    return "it has no step folder" if has_something else "the folder is empty or does not exist"


def _steps(store: Store) -> list[int]:
    return sorted(step for name in store.folders() if (step := parse_step(name)) is not None)


def _info(store: Store, step: int) -> CheckpointInfo:
    try:
        return CheckpointInfo(step=step, state="committed", commit=read_commit(store, step))
    except NotCommittedError as error:
        return CheckpointInfo(step=step, state="partial", problem=str(error))
    except CheckpointError as error:
        return CheckpointInfo(step=step, state="damaged", problem=str(error))


def _open_step(store: Store, url: str, step: int) -> Checkpoint:
    try:
        return _open_commit(store, url, read_commit(store, step))
    except NotCommittedError:
        if store.exists(f"{step_folder(step)}/{METADATA}") and not _has_attempts(store, step_folder(step)):
            return _open_foreign(store, url, folder=step_folder(step), step=step)
        if store.exists(f"{foreign_folder(step)}/{METADATA}"):
            return _open_foreign(store, url, folder=foreign_folder(step), step=step)
        if _foreign_step(url) == step and store.exists(METADATA):
            return _open_foreign(store, url, folder="", step=step)
        if step == 0 and store.exists(HUGGING_FACE):
            return _open_hugging_face(store, url)
        good = [info.step for info in list_checkpoints(store) if info.state == "committed"]
        hint = f"committed steps: {', '.join(map(str, good[-5:]))}" if good else "no step of this run is committed"
        raise NotCommittedError(f"{store}@{step} is not committed; {hint}") from None


def foreign_steps(store: Store) -> list[tuple[int, str]]:
    """Steps that others saved below this URL as torchtitan does, with their folders, oldest first; none is opened."""
    named = sorted((step, name) for name in store.folders() if (step := parse_foreign_step(name)) is not None)
    return [(n, name) for n, name in named if store.exists(f"{name}/{METADATA}") and not _has_attempts(store, name)]


def _has_attempts(store: Store, folder: str) -> bool:
    return any(is_attempt(name) for name in store.folders(folder))


def _open_commit(store: Store, url: str, commit: Commit) -> Checkpoint:
    folder = step_folder(commit.step)
    path = f"{folder}/{commit.attempt}/{MANIFEST}"
    try:
        data = read_index(store, path)
    except NotFoundError as error:
        raise DamagedError(f"{store.where(path)}: named by COMMIT but missing") from error
    if len(data) != commit.manifest_size or digest(data).hex() != commit.manifest_digest:
        raise DamagedError(f"{store.where(path)}: not the manifest that COMMIT names (digest differs)")
    manifest = decode_manifest(data, where=store.where(path), num_digests=lambda: stored_digests(store, path))
    checkpoint = Checkpoint(store=store, url=url, step=commit.step, folder=folder, manifest=manifest)
    check_files(checkpoint)
    return checkpoint


def read_index(store: Store, path: str) -> bytes:
    """A manifest or `.metadata`; DamagedError for one that is larger than any could be, before there is room made for it."""
    size = store.stat(path).size_bytes
    if size > MAX_INDEX_BYTES:
        raise DamagedError(f"{store.where(path)}: {size} bytes; no index is larger than {MAX_INDEX_BYTES}")
    return store.read(path, 0, size)


def stored_digests(store: Store, manifest_path: str) -> int:
    """How many digests stand beside a manifest."""
    path = f"{os.path.dirname(manifest_path)}/{DIGESTS}"
    return store.stat(path).size_bytes // DIGEST_BYTES if store.exists(path) else 0


def check_files(checkpoint: Checkpoint) -> None:
    """Every data file is there in its size, by one listing per folder that the manifest names; DamagedError if not."""
    folders = {os.path.dirname(checkpoint.path(file.path)) for file in checkpoint.manifest.files}
    sizes = {entry.path: entry.size_bytes for folder in folders for entry in checkpoint.store.list(folder)}
    for file in checkpoint.manifest.files:
        found = sizes.get(checkpoint.path(file.path))
        if found != file.size_bytes:
            where = checkpoint.store.where(checkpoint.path(file.path))
            state = "missing" if found is None else f"{found} bytes"
            raise DamagedError(f"{where}: expected {file.size_bytes} bytes, found it {state}")


def _open_foreign(store: Store, url: str, *, folder: str, step: int) -> Checkpoint:
    prefix = f"{folder}/" if folder else ""
    sizes = {entry.path.removeprefix(prefix): entry.size_bytes for entry in store.list(folder)}
    where = store.where(f"{prefix}{METADATA}")
    manifest = read_dcp_metadata(read_index(store, f"{prefix}{METADATA}"), sizes=sizes, step=step, where=where)
    return Checkpoint(store=store, url=join(url, folder), step=step, folder=folder, manifest=manifest)


def _open_hugging_face(store: Store, url: str) -> Checkpoint:
    """A Hugging Face model (a folder, a prefix, a hub cache's `models--...`) as a model-only checkpoint of step 0."""
    checkpoint = foreign_formats.registered().open_hugging_face(url)
    log.debug("%s is a Hugging Face model, read where it lies", store)
    return checkpoint


def _foreign_step(url: str) -> int:
    """The step that a folder name ends with (`step-1000`), 0 if it has none."""
    match = re.search(r"(\d+)$", url)
    return int(match.group(1)) if match else 0
