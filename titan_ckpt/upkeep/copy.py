"""Copy a checkpoint between any two stores, verified, resumable, COMMIT last. No torch.

Every data file is hashed while it is copied; the copy fails if a digest differs from the manifest's, so damage is never copied.
An interrupted copy resumes: a file that the target already has with the right bytes is not sent again. A foreign checkpoint
(plain DCP, torchtitan) is copied file by file, its CRC-32s are checked, and `.metadata` is written last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

import xxhash

from titan_ckpt.arguments import check_callable, check_flag
from titan_ckpt.check.mend import derived
from titan_ckpt.check.scan import check_blobs
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.commit_proved import commit_checkpoint, commit_copy
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.checkpoint.open import as_checkpoint
from titan_ckpt.checkpoint.other_run import refuse_other_run
from titan_ckpt.errors import AlreadyExistsError, DamagedError, NotFoundError, UsageError
from titan_ckpt.format.commit import (
    Before,
    Commit,
    commit_path,
    find_commit,
    found_before,
    read_commit,
)
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.dcp_read import dcp_paths
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest import FileEntry, Manifest
from titan_ckpt.format.names import ASSETS, DIGESTS, MANIFEST, METADATA, data_file, foreign_folder
from titan_ckpt.location import StrPath, check_writable, is_inside, redact, run_location
from titan_ckpt.store.base import ObjectInfo, Store, check_free, read_if_any
from titan_ckpt.store.clients.options import Options, using
from titan_ckpt.store.open import open_store

FILES_AT_ONCE = 4
WINDOW_BYTES = 16 << 20
OnBytes: TypeAlias = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """Outcome of a copy; `kept_bytes` were already at the target."""

    step: int
    num_files: int
    copied_bytes: int
    kept_bytes: int
    was_committed: bool


def cp(
    source: Checkpoint | StrPath, destination: StrPath | Store, *, dry_run: bool = False, on_bytes: OnBytes | None = None,
    storage_options: Options = None,
) -> CopyReport:  # fmt: skip
    """Copy a checkpoint (open, or `URL[@STEP]`) to the run at `destination`, under the same step, and verify the copy.

    As the command `cp`: what an interrupted copy left is kept, the commit comes last. `on_bytes` receives the size of each part
    as it is copied. With `dry_run` nothing is written, and `copied_bytes` is what there is to copy. UsageError if the destination
    is the source's own run; AlreadyExistsError if it has another save of that step; DamagedError, and no commit, if the source's
    bytes differ from its manifest.
    """
    check_flag(dry_run, "dry_run")
    check_callable(on_bytes, "on_bytes", or_none=True)
    url = destination.url if isinstance(destination, Store) else run_location(destination).url
    with using(storage_options, source, destination):
        opened, target = as_checkpoint(source), destination if isinstance(destination, Store) else open_store(url)
    if url == opened.store.url:
        raise UsageError(f"{redact(url)} is the source's own run; give another URL")
    check_writable(target.url)
    if dry_run:
        sizes = [file.size_bytes for file in opened.manifest.files]
        return CopyReport(
            step=opened.step, num_files=len(sizes), copied_bytes=sum(sizes), kept_bytes=0, was_committed=False
        )
    return copy_checkpoint(opened, target, on_bytes=on_bytes)


def copy_checkpoint(source: Checkpoint, target: Store, *, on_bytes: OnBytes | None = None) -> CopyReport:
    """Copy `source` to the run at `target`, under the same step.

    The copy is self-contained: files of other steps that an incremental checkpoint refers to are copied into its own attempt, and
    its manifest and `.metadata` name them there. AlreadyExistsError if the target has another save of that step, or is the run of
    another training job. DamagedError, and no commit, if the source's bytes differ from its manifest. Foreign checkpoints go
    through `copy_foreign`.
    """
    check_writable(target.url)
    if is_inside(target.url, source.url):
        raise UsageError(f"the copy {target} would lie inside its source {source}; give a URL beside it")
    if source.manifest.kind == CheckpointKind.FOREIGN:
        return copy_foreign(source, target, on_bytes or (lambda _: None))
    source.prove_coverage()
    commit = read_commit(source.store, source.step)
    before, present = found_before(target, source.step), find_commit(target, source.step)
    own_paths = self_contained_paths(source.manifest)
    is_moved = any(path != own for path, own in own_paths.items())
    if present is not None and not (present.attempt == commit.attempt and (is_moved or _is_same(present, commit))):
        raise AlreadyExistsError(
            f"{target}@{source.step} is another save of that step (attempt {present.attempt}); it was left as it is"
        )
    if present is None:
        refuse_other_run(source, target)
    copier = Copier(source, target, on_bytes or (lambda _: None), own_paths)
    check_free(target, copier.missing_bytes)
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="cp") as pool:
        kept = list(pool.map(copier.copy_file, source.manifest.files))
    if not is_moved:
        copier.copy_small(commit, before)
    elif present is None:
        copier.commit_moved(commit)
    sizes = [file.size_bytes for file in source.manifest.files]
    kept_bytes = sum(size for size, is_kept in zip(sizes, kept, strict=True) if is_kept)
    return CopyReport(
        step=source.step, num_files=len(sizes), copied_bytes=sum(sizes) - kept_bytes, kept_bytes=kept_bytes,
        was_committed=present is not None,
    )  # fmt: skip


def self_contained_paths(manifest: Manifest) -> dict[str, str]:
    """Map each data file to its path inside the checkpoint's own attempt; files of other steps get free numbers.

    Numbers follow the order of the paths, so that a resumed copy uses the same ones.
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
    """Copies the files of one checkpoint and verifies each while it is copied."""

    def __init__(
        self,
        source: Checkpoint,
        target: Store,
        on_bytes: OnBytes,
        own_paths: Mapping[str, str] | None = None,
        *,
        before: OnBytes = lambda _: None,
    ) -> None:
        """`on_bytes` hears of each part that was read, and of files that were there; `before` may wait before one is written."""
        self._source, self._target, self._on_bytes, self._own_paths = source, target, on_bytes, own_paths or {}
        self._before = before

    def missing_bytes(self) -> int:
        """Bytes of the files that the target does not have; those that it has in their size may still differ."""
        files = self._source.manifest.files
        return sum(
            file.size_bytes for file in files if not self._is_there(self._target_path(file), file, trust_size=True)
        )

    def _target_path(self, file: FileEntry) -> str:
        return self._source.path(self._own_paths.get(file.path, file.path))

    def copy_file(self, file: FileEntry, *, trust_size: bool = False) -> bool:
        """Copy a data file; True if the target already had it. With `trust_size` an existing file is not re-read."""
        path = self._source.path(file.path)
        target_path = self._target_path(file)
        if self._is_there(target_path, file, trust_size=trust_size):
            self._on_bytes(file.size_bytes)
            return True
        self._target.write(target_path, self._paced(self._verified(self._source.store, path, file, self._on_bytes)))
        return False

    def _paced(self, views: Iterator[memoryview]) -> Iterator[memoryview]:
        for view in views:
            self._before(len(view))
            yield view

    def _is_there(self, path: str, file: FileEntry, *, trust_size: bool) -> bool:
        try:
            if self._target.stat(path).size_bytes != file.size_bytes or trust_size:
                return self._target.stat(path).size_bytes == file.size_bytes
            for _ in self._verified(self._target, path, file, lambda _: None):
                pass
        except (NotFoundError, DamagedError):
            return False
        return True

    def _verified(self, store: Store, path: str, file: FileEntry, on_bytes: OnBytes) -> Iterator[memoryview]:
        """The file's bytes in windows; DamagedError after the last, before the copy becomes visible, if the digest differs."""
        whole = xxhash.xxh3_128()
        for view in _windows(store, path, file.size_bytes, on_bytes):
            whole.update(view)
            yield view
        if file.digest is not None and whole.digest() != file.digest:
            raise DamagedError(
                f"{store.where(path)}: not what was saved (digest differs); `titan-ckpt verify --data` names the damage"
            )

    def copy_small(self, commit: Commit, before: Before) -> None:
        """Copy assets, manifest, digests, `.metadata`, and COMMIT last. `before` is what the target had when the copy began."""
        attempt = self._copy_assets()
        self._copy(f"{attempt}/{MANIFEST}", commit.manifest_digest)
        if self._source.manifest.chunks.digests is None and self._source.digests is not None:
            self._put(f"{attempt}/{DIGESTS}", self._source.digests)
        index = self._index(commit)
        data = self._source.store.read(commit_path(commit.step))
        if read_commit(self._source.store, commit.step).version != commit.version:
            raise DamagedError(f"{self._source}: was saved again while it was copied; copy it once more")
        commit_copy(self._target, self._source.manifest, index, commit=data, before=before)

    def commit_moved(self, commit: Commit) -> None:
        """Write assets, and a manifest, `.metadata` and COMMIT with the files' new paths."""
        self._copy_assets()
        manifest = self._source.manifest
        files = tuple(replace(file, path=self._own_paths[file.path]) for file in manifest.files)
        objects = tuple(replace(entry, file=self._own_paths[entry.file]) for entry in manifest.objects)
        chunks = replace(manifest.chunks, digests=self._source.digests)
        moved = replace(manifest, files=files, objects=objects, chunks=chunks)
        paths = dcp_paths(self._index(commit), where=METADATA)
        commit_checkpoint(self._target, moved, dcp_metadata(moved, paths=paths), replaces=None)

    def _copy_assets(self) -> str:
        """Copy the assets; returns the attempt's folder."""
        attempt = f"{self._source.folder}/{self._source.manifest.attempt}"
        for name in self._source.manifest.assets:
            self._put(f"{attempt}/{ASSETS}/{name}", self._source.asset(name))
        return attempt

    def _copy(self, path: str, expected: str) -> None:
        self._put(path, self._verified_small(path, expected))

    def _index(self, commit: Commit) -> bytes:
        """The `.metadata` that was committed. A save of the step that died before its COMMIT left its own in that place."""
        path = f"{self._source.folder}/{METADATA}"
        found = read_if_any(self._source.store, path) or b""
        if digest(found).hex() == commit.metadata_digest:
            return found
        return derived(self._source.manifest, found, commit, where=self._source.store.where(path))

    def _verified_small(self, path: str, expected: str) -> bytes:
        data = self._source.store.read(path)
        if digest(data).hex() != expected:
            raise DamagedError(f"{self._source.store.where(path)}: not what was committed (digest differs)")
        return data

    def _put(self, path: str, data: bytes) -> None:
        self._target.write(path, [data])


def _missing_bytes(source: Checkpoint, copy: Checkpoint, files: Sequence[ObjectInfo]) -> int:
    """Bytes of the files that the copy does not have in their size."""
    there = {entry.path: entry.size_bytes for entry in copy.store.list(copy.folder)}
    wanted = {copy.path(_path_in(source, entry)): entry.size_bytes for entry in files}
    return sum(size for path, size in wanted.items() if there.get(path) != size)


def copy_foreign(source: Checkpoint, target: Store, on_bytes: OnBytes) -> CopyReport:
    """Copy a foreign checkpoint to `step-N` of the run at `target`, the name that torchtitan looks for.

    The copy is read back before `.metadata` makes it a checkpoint. AlreadyExistsError if the target has another checkpoint of
    that step, or is the run of another training job; DamagedError if a record's CRC-32 differs or if a source file changed
    during the copy.
    """
    copy = replace(
        source, store=target, url=f"{target.url}/{foreign_folder(source.step)}", folder=foreign_folder(source.step)
    )
    index = source.store.read(source.path(METADATA))
    was_there = target.exists(copy.path(METADATA))
    if was_there and target.read(copy.path(METADATA)) != index:
        raise AlreadyExistsError(f"{copy.store.where(copy.folder)} is another checkpoint; it was left as it is")
    if not was_there:
        refuse_other_run(source, target)
    files = [entry for entry in source.store.list(source.folder) if _path_in(source, entry) != METADATA]
    check_free(target, lambda: _missing_bytes(source, copy, files))
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="cp") as pool:
        kept = list(pool.map(lambda entry: _copy_foreign_file(source, copy, entry, on_bytes), files))
    _check_foreign_copy(source, copy, files)
    if not was_there:
        target.write(copy.path(METADATA), [index])
    kept_bytes = sum(entry.size_bytes for entry, is_kept in zip(files, kept, strict=True) if is_kept)
    copied_bytes = sum(entry.size_bytes for entry in files) - kept_bytes
    return CopyReport(
        step=source.step,
        num_files=len(files),
        copied_bytes=copied_bytes,
        kept_bytes=kept_bytes,
        was_committed=was_there,
    )


def _path_in(checkpoint: Checkpoint, entry: ObjectInfo) -> str:
    """An object's path below the checkpoint's folder."""
    return entry.path.removeprefix(f"{checkpoint.folder}/") if checkpoint.folder else entry.path


def _copy_foreign_file(source: Checkpoint, copy: Checkpoint, entry: ObjectInfo, on_bytes: OnBytes) -> bool:
    """Copy a file; True if the target already had its bytes."""
    path = copy.path(_path_in(source, entry))
    if _is_same_file(source.store, entry, copy.store, path):
        on_bytes(entry.size_bytes)
        return True
    if copy.store.is_taken(path):
        raise AlreadyExistsError(
            f"{copy.store.where(path)}: is there with other bytes, so it is not this checkpoint's; it was kept"
        )
    copy.store.write(path, _windows(source.store, entry.path, entry.size_bytes, on_bytes))
    return False


def _is_same_file(source: Store, entry: ObjectInfo, target: Store, path: str) -> bool:
    try:
        if target.stat(path).size_bytes != entry.size_bytes:
            return False
    except NotFoundError:
        return False
    return _digest(source, entry.path, entry.size_bytes) == _digest(target, path, entry.size_bytes)


def _digest(store: Store, path: str, size_bytes: int) -> bytes:
    whole = xxhash.xxh3_128()
    for view in _windows(store, path, size_bytes, lambda _: None):
        whole.update(view)
    return whole.digest()


def _windows(store: Store, path: str, size_bytes: int, on_bytes: OnBytes) -> Iterator[memoryview]:
    for start in range(0, size_bytes, WINDOW_BYTES):
        view = memoryview(bytearray(min(WINDOW_BYTES, size_bytes - start)))
        store.read_into(path, start, view)
        on_bytes(len(view))
        yield view


def _check_foreign_copy(source: Checkpoint, copy: Checkpoint, files: list[ObjectInfo]) -> None:
    """Check that the source did not change, then read the copy back."""
    now = {entry.path: entry.version for entry in source.store.list(source.folder)}
    for entry in files:
        if now.get(entry.path) != entry.version:
            raise DamagedError(
                f"{source.store.where(entry.path)}: changed while it was copied; copy a checkpoint that nobody writes"
            )
    if problems := check_blobs(copy, lambda _: None).problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise DamagedError(
            f"{copy.store.where(copy.folder)}: {problems[0]}{more}; it has no {METADATA} and is no checkpoint. "
            f"`titan-ckpt verify --data {source}` shows whether the source is damaged too"
        )
