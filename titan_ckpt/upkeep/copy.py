"""Copy a checkpoint between any two stores, verified, resumable, COMMIT last. No torch.

Every data file is hashed as it passes and refused when it is not what the manifest promises, so damage is never copied. A copy
that was interrupted goes on: a file that is there whole (its bytes re-read, its digest right) is not sent again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import xxhash

from titan_ckpt.checkpoint.checkpoint import FOREIGN, Checkpoint
from titan_ckpt.errors import AlreadyExistsError, ConditionFailedError, DamagedError, NotFoundError, UsageError
from titan_ckpt.format.commit import Commit, commit_path, find_commit, read_commit, write_commit
from titan_ckpt.format.dcp_metadata import dcp_metadata, dcp_paths
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest import FileEntry, Manifest
from titan_ckpt.format.names import ASSETS, DIGESTS, MANIFEST, METADATA, data_file
from titan_ckpt.location import is_inside
from titan_ckpt.store.base import Store
from titan_ckpt.upkeep.copy_foreign import CopyReport, Tell, copy_foreign

FILES_AT_ONCE = 4
WINDOW_BYTES = 16 << 20


def copy_checkpoint(source: Checkpoint, target: Store, *, on_bytes: Tell | None = None) -> CopyReport:
    """Make the same checkpoint exist in the run at `target`, under the same step.

    The copy stands on its own: files of other steps that an incremental checkpoint refers to come into its own attempt, and its
    manifest and `.metadata` name them there. AlreadyExistsError where that step holds another save; DamagedError, and no commit,
    where the source is not what was saved. One that others wrote is copied as `copy_foreign` says.
    """
    if is_inside(target.url, source.url):
        raise UsageError(f"the copy {target} would lie inside its source {source}; give a URL beside it")
    if source.manifest.kind == FOREIGN:
        return copy_foreign(source, target, on_bytes or (lambda _: None))
    commit = read_commit(source.store, source.step)
    present = find_commit(target, source.step)
    own_paths = self_contained_paths(source.manifest)
    is_moved = any(path != own for path, own in own_paths.items())
    if present is not None and not (present.attempt == commit.attempt and (is_moved or _is_same(present, commit))):
        raise AlreadyExistsError(
            f"{target}@{source.step} is another save of that step (attempt {present.attempt}); it was left as it is"
        )
    copier = Copier(source, target, on_bytes or (lambda _: None), own_paths)
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="cp") as pool:
        kept = list(pool.map(copier.copy_file, source.manifest.files))
    if not is_moved:
        copier.copy_small(commit, is_committed=present is not None)
    elif present is None:
        copier.commit_moved(commit)
    sizes = [file.size_bytes for file in source.manifest.files]
    kept_bytes = sum(size for size, is_kept in zip(sizes, kept, strict=True) if is_kept)
    return CopyReport(
        step=source.step, num_files=len(sizes), copied_bytes=sum(sizes) - kept_bytes, kept_bytes=kept_bytes,
        was_committed=present is not None,
    )  # fmt: skip


def self_contained_paths(manifest: Manifest) -> dict[str, str]:
    """For each data file its path when all of them are in the checkpoint's own attempt; files of other steps get free numbers.

    Numbers follow the order of the paths, so that a copy that is taken up again uses the same ones.
    """
    taken = {file.path for file in manifest.files if not file.path.startswith("../")}
    paths = {path: path for path in taken}
    free = (data_file(manifest.attempt, 0, number) for number in count())
    for file in sorted(manifest.files, key=lambda file: file.path):
        if file.path.startswith("../"):
            paths[file.path] = next(path for path in free if path not in taken)
    return paths


def _is_same(a: Commit, b: Commit) -> bool:
    return (a.attempt, a.manifest_digest) == (b.attempt, b.manifest_digest)


class Copier:
    """Copies the files of one checkpoint, each verified as it passes."""

    def __init__(
        self, source: Checkpoint, target: Store, on_bytes: Tell, own_paths: Mapping[str, str] | None = None
    ) -> None:
        self._source, self._target, self._on_bytes, self._own_paths = source, target, on_bytes, own_paths or {}

    def copy_file(self, file: FileEntry, *, trust_size: bool = False) -> bool:
        """Copy a data file unless it is there and right; whether it was. `trust_size` does not re-read what is there."""
        path = self._source.path(file.path)
        target_path = self._source.path(self._own_paths.get(file.path, file.path))
        if self._is_there(target_path, file, trust_size=trust_size):
            self._on_bytes(file.size_bytes)
            return True
        self._target.write(target_path, self._verified(self._source.store, path, file, self._on_bytes))
        return False

    def _is_there(self, path: str, file: FileEntry, *, trust_size: bool) -> bool:
        try:
            if self._target.stat(path).size_bytes != file.size_bytes or trust_size:
                return self._target.stat(path).size_bytes == file.size_bytes
            for _ in self._verified(self._target, path, file, lambda _: None):
                pass
        except (NotFoundError, DamagedError):
            return False
        return True

    def _verified(self, store: Store, path: str, file: FileEntry, tell: Tell) -> Iterator[memoryview]:
        """The file's bytes in windows; DamagedError at the end, before a copy becomes visible, if they are not what was saved."""
        whole = xxhash.xxh3_128()
        for start in range(0, file.size_bytes, WINDOW_BYTES):
            view = memoryview(bytearray(min(WINDOW_BYTES, file.size_bytes - start)))
            store.read_into(path, start, view)
            whole.update(view)
            tell(len(view))
            yield view
        if file.digest is not None and whole.digest() != file.digest:
            raise DamagedError(
                f"{store.where(path)}: not what was saved (digest differs); `titan-ckpt verify --data` names the damage"
            )

    def copy_small(self, commit: Commit, *, is_committed: bool) -> None:
        """Assets, manifest, digests, `.metadata`, and COMMIT last."""
        attempt = self._copy_assets()
        self._copy(f"{attempt}/{MANIFEST}", commit.manifest_digest)
        if self._source.manifest.chunks.digests is None and self._source.digests is not None:
            self._put(f"{attempt}/{DIGESTS}", self._source.digests)
        self._copy(f"{self._source.folder}/{METADATA}", commit.metadata_digest)
        if not is_committed:
            self._commit(commit)

    def commit_moved(self, commit: Commit) -> None:
        """Assets, and a manifest, `.metadata` and COMMIT that name the files where they are now."""
        self._copy_assets()
        manifest = self._source.manifest
        files = tuple(replace(file, path=self._own_paths[file.path]) for file in manifest.files)
        objects = tuple(replace(entry, file=self._own_paths[entry.file]) for entry in manifest.objects)
        chunks = replace(manifest.chunks, digests=self._source.digests)
        moved = replace(manifest, files=files, objects=objects, chunks=chunks)
        paths = dcp_paths(
            self._verified_small(f"{self._source.folder}/{METADATA}", commit.metadata_digest), where=METADATA
        )
        write_commit(self._target, moved, dcp_metadata(moved, paths=paths), replaces=None)

    def _copy_assets(self) -> str:
        """The attempt's folder."""
        attempt = f"{self._source.folder}/{self._source.manifest.attempt}"
        for name in self._source.manifest.assets:
            self._put(f"{attempt}/{ASSETS}/{name}", self._source.asset(name))
        return attempt

    def _commit(self, commit: Commit) -> None:
        path = commit_path(commit.step)
        try:
            self._target.write_if(path, self._source.store.read(path), version=None)
        except ConditionFailedError as error:
            raise ConditionFailedError(
                f"{self._target.where(path)}: somebody else committed this step meanwhile"
            ) from error

    def _copy(self, path: str, expected: str) -> None:
        self._put(path, self._verified_small(path, expected))

    def _verified_small(self, path: str, expected: str) -> bytes:
        data = self._source.store.read(path)
        if digest(data).hex() != expected:
            raise DamagedError(f"{self._source.store.where(path)}: not what was committed (digest differs)")
        return data

    def _put(self, path: str, data: bytes) -> None:
        self._target.write(path, [data])
