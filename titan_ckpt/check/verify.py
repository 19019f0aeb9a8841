"""Verify a checkpoint: its structure from a few small files, its data by reading every byte once. No torch.

Structure: COMMIT, manifest, digest table, `.metadata` and assets agree; every data file exists with its size; the chunks of every
tensor cover it exactly once. Data: the digests of every chunk, value and file; damage is reported by tensor and byte range.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from titan_ckpt.arguments import check_callable, check_flag
from titan_ckpt.check.scan import Problem, reason, scan_files, scan_recorded
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.foreign_files import Recorded
from titan_ckpt.checkpoint.kinds import CheckpointKind, CheckpointState
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint, stored_digests
from titan_ckpt.errors import CheckpointError, NotCommittedError, NotFoundError, StoreError
from titan_ckpt.format.commit import Commit, commit_path, read_commit
from titan_ckpt.format.dcp_read import FOREIGN_ATTEMPT
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.format.manifest_json import decode_manifest
from titan_ckpt.format.names import ASSETS, DIGESTS, MANIFEST, METADATA, step_folder
from titan_ckpt.format.own_step import read_index
from titan_ckpt.location import StrPath, parse_location
from titan_ckpt.store.base import Store
from titan_ckpt.store.clients.options import Options, using
from titan_ckpt.store.open import open_store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """A file, and by what its bytes were checked: `xxh3-128`, `crc-32`, ...; None: by nothing, or not all of them.

    `unchecked`: the tensors and values in it that no digest covers. `is_data`: it holds tensors.
    """

    path: str
    checked_by: str | None
    unchecked: tuple[str, ...] = ()
    is_data: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The record as a JSON object."""
        return {"path": self.path, "checked_by": self.checked_by, "unchecked": list(self.unchecked)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a verification. `files`: how the bytes of each file were checked; empty if only the structure was."""

    problems: list[Problem]
    files: tuple[CheckedFile, ...] = ()

    @property
    def is_ok(self) -> bool | None:
        """False if there is a problem; None if there is none, but not everything could be compared with a digest."""
        if self.problems:
            return False
        return None if any(file.checked_by is None for file in self.files) else True

    @property
    def is_data_unchecked(self) -> bool:
        """Whether a file with tensors could not be compared with a digest."""
        return any(file.checked_by is None and file.is_data for file in self.files)


def verify(
    checkpoint: Checkpoint | StrPath, *, read_data: bool = False, on_bytes: Callable[[int], None] | None = None,
    storage_options: Options = None,
) -> list[Problem]:  # fmt: skip
    """The problems of a checkpoint; an empty list if none were found.

    `URL[@STEP]` as everywhere, except that a damaged newest checkpoint is verified, not skipped. `read_data` reads every byte and
    calls `on_bytes` with the size of each read. Formats without digests can hide damage; a warning names what was not checked.
    NotCommittedError if there is no checkpoint at all.
    """
    with using(storage_options, checkpoint):
        report = examine(checkpoint, read_data=read_data, on_bytes=on_bytes)
    if read_data and report.is_data_unchecked:
        names = [file.path for file in report.files if file.checked_by is None and file.is_data]
        log.warning("%s: no digest covers all of %s: damage there cannot be seen", checkpoint, ", ".join(names[:3]))
    return report.problems


def examine(
    checkpoint: Checkpoint | StrPath, *, read_data: bool = False, on_bytes: Callable[[int], None] | None = None
) -> Report:
    """`verify`, and by what each file was checked."""
    check_flag(read_data, "read_data")
    check_callable(on_bytes, "on_bytes", or_none=True)
    on_bytes = on_bytes or (lambda _: None)
    if isinstance(checkpoint, Checkpoint):
        store, step, url = checkpoint.store, checkpoint.step, checkpoint.url
        if checkpoint.manifest.attempt == FOREIGN_ATTEMPT:
            return _examine_foreign(checkpoint, read_data, on_bytes)
    else:
        location = parse_location(checkpoint)
        store, url = open_store(location.url), location.url
        found = newest_committed(store) if location.step is None else location.step
        if found is None or not store.exists(commit_path(found)):
            return _examine_foreign(open_checkpoint(url, step=found, store=store), read_data, on_bytes)
        step = found
    return _Verification(store, url, step).run(read_data, on_bytes)


def newest_committed(store: Store) -> int | None:
    """The newest step that has a COMMIT, even an unreadable one."""
    return max((info.step for info in list_checkpoints(store) if info.state != CheckpointState.PARTIAL), default=None)


class _Verification:
    """The checks of one committed checkpoint, in order. Each adds to `problems`; an unreadable COMMIT or manifest ends them."""

    def __init__(self, store: Store, url: str, step: int) -> None:
        self._store, self._url, self._step, self._folder = store, url, step, step_folder(step)
        self.problems: list[Problem] = []

    def run(self, read_data: bool, on_bytes: Callable[[int], None]) -> Report:
        try:
            commit = read_commit(self._store, self._step)
        except NotCommittedError:
            raise
        except CheckpointError as error:
            path = commit_path(self._step)
            return Report(problems=[Problem(path=path, message=reason(self._store, path, error))])
        manifest = self._manifest(commit)
        self._check_metadata(commit)
        if manifest is None:
            return Report(problems=self.problems)
        checkpoint = Checkpoint(
            store=self._store, url=self._url, step=self._step, folder=self._folder, manifest=manifest
        )
        self._check_identity(commit, manifest)
        self._check_assets(checkpoint)
        self.problems += check_coverage(checkpoint)
        self._check_sizes(checkpoint)
        digests = self._digests(checkpoint)
        if not read_data:
            return Report(problems=self.problems)
        scan = scan_files(checkpoint, digests, on_bytes)
        return Report(problems=self.problems + scan.problems, files=_files(checkpoint, scan.unchecked, "xxh3-128"))

    def _add(self, path: str, message: str) -> None:
        self.problems.append(Problem(path=path, message=message))

    def _add_error(self, path: str, error: Exception) -> None:
        self._add(path, reason(self._store, path, error))

    def _manifest(self, commit: Commit) -> Manifest | None:
        path = f"{self._folder}/{commit.attempt}/{MANIFEST}"
        data = self._read(path, "named by COMMIT")
        if data is None:
            return None
        if len(data) != commit.manifest_size or digest(data).hex() != commit.manifest_digest:
            self._add(path, "is not the manifest that COMMIT names (its digest differs)")
            return None
        try:
            return decode_manifest(
                data, where=self._store.where(path), num_digests=lambda: stored_digests(self._store, path)
            )
        except CheckpointError as error:
            self._add_error(path, error)
            return None

    def _read(self, path: str, why: str) -> bytes | None:
        try:
            return read_index(self._store, path)
        except NotFoundError:
            self._add(path, f"is missing, {why}")
        except (StoreError, CheckpointError) as error:
            self._add(path, f"cannot be read: {reason(self._store, path, error)}")
        return None

    def _check_metadata(self, commit: Commit) -> None:
        path = f"{self._folder}/{METADATA}"
        data = self._read(path, "so plain DCP readers cannot open this checkpoint")
        if data is not None and digest(data).hex() != commit.metadata_digest:
            self._add(
                path,
                "is not the one that was committed (its digest differs): damaged, or another save of this step is under way",
            )

    def _check_identity(self, commit: Commit, manifest: Manifest) -> None:
        path = f"{self._folder}/{commit.attempt}/{MANIFEST}"
        facts = {name: getattr(manifest, name) for name in ("step", "attempt", "kind", "created", "size_bytes")}
        facts["mesh"] = "" if manifest.mesh is None else str(manifest.mesh)
        for name, found in facts.items():
            if getattr(commit, name) != found:
                self._add(path, f"{name} is {found!r}, COMMIT has {getattr(commit, name)!r}")

    def _check_assets(self, checkpoint: Checkpoint) -> None:
        for name in checkpoint.manifest.assets:
            try:
                checkpoint.asset(name)
            except (CheckpointError, StoreError) as error:
                self._add_error(f"{self._folder}/{checkpoint.manifest.attempt}/{ASSETS}/{name}", error)

    def _check_sizes(self, checkpoint: Checkpoint) -> None:
        paths = {checkpoint.path(file.path): file for file in checkpoint.manifest.files}
        folders = {path.rpartition("/")[0] for path in paths}
        sizes = {entry.path: entry.size_bytes for folder in folders for entry in self._store.list(folder)}
        for path, file in paths.items():
            if path not in sizes:
                self._add(path, f"is missing ({file.size_bytes} bytes)")
            elif sizes[path] != file.size_bytes:
                self._add(path, f"has {sizes[path]} bytes, expected {file.size_bytes}")

    def _digests(self, checkpoint: Checkpoint) -> bytes | None:
        try:
            return checkpoint.digests
        except (CheckpointError, StoreError) as error:
            self._add_error(f"{self._folder}/{checkpoint.manifest.attempt}/{DIGESTS}", error)
            return None


def check_coverage(checkpoint: Checkpoint) -> list[Problem]:
    """Find tensors that their chunks do not cover exactly once, and chunks whose payload has another size than their box."""
    manifest = checkpoint.manifest
    is_foreign = manifest.kind == CheckpointKind.FOREIGN
    path = checkpoint.path(METADATA if is_foreign else f"{manifest.attempt}/{MANIFEST}")
    return [Problem(path=path, fqn=fqn, message=message) for fqn, message in checkpoint.coverage_problems.items()]


def _examine_foreign(checkpoint: Checkpoint, read_data: bool, on_bytes: Callable[[int], None]) -> Report:
    """A foreign checkpoint has no digests, but torch.save writes a CRC-32 for each record, and others may lie beside it."""
    problems = check_coverage(checkpoint)
    if checkpoint.manifest.kind == CheckpointKind.FOREIGN:
        if not read_data:
            return Report(problems=problems, files=_files(checkpoint, None, "crc-32"))
        scan = scan_files(checkpoint, None, on_bytes)
        index = CheckedFile(path=checkpoint.path(METADATA), checked_by=None, is_data=False)
        return Report(problems=problems + scan.problems, files=(*_files(checkpoint, scan.unchecked, "crc-32"), index))
    try:
        recorded = checkpoint.recorded()
    except CheckpointError as error:
        recorded, problems = [], [*problems, Problem(path=checkpoint.folder or ".", message=str(error))]
    if read_data:
        problems += scan_recorded(checkpoint, recorded, on_bytes)
    return Report(problems=problems, files=_recorded_files(checkpoint, recorded if read_data else []))


def _files(checkpoint: Checkpoint, unchecked: list[tuple[str, str]] | None, algorithm: str) -> tuple[CheckedFile, ...]:
    """The data files; None: nothing in them was checked."""
    lost: dict[str, dict[str, None]] = {}
    for path, fqn in unchecked or ():
        lost.setdefault(path, {})[fqn] = None
    paths = [checkpoint.path(file.path) for file in checkpoint.manifest.files]
    return tuple(
        CheckedFile(
            path=path,
            checked_by=None if unchecked is None or path in lost else algorithm,
            unchecked=tuple(lost.get(path, ())),
        )
        for path in paths
    )


def _recorded_files(checkpoint: Checkpoint, recorded: Sequence[Recorded]) -> tuple[CheckedFile, ...]:
    """The files of a model, data and small ones, by the digests that cover them whole."""
    parts: dict[str, list[Recorded]] = {}
    for part in recorded:
        parts.setdefault(part.path, []).append(part)
    tensors: dict[str, dict[str, None]] = {file.path: {} for file in checkpoint.manifest.files}
    for entry in checkpoint.manifest.tensors:
        for chunk in checkpoint.manifest.chunks_of(entry):
            tensors[chunk.file][entry.fqn] = None
    found = []
    for path in dict.fromkeys([*checkpoint.files_read, *parts]):
        algorithms = sorted({part.algorithm for part in parts.get(path, ())})
        is_whole = _cover(parts.get(path, []))
        unchecked = () if is_whole else tuple(tensors.get(path, ()))
        found.append(
            CheckedFile(
                path=path, checked_by=", ".join(algorithms) if is_whole else None, unchecked=unchecked,
                is_data=path in tensors,
            )
        )  # fmt: skip
    return tuple(found)


def _cover(parts: Sequence[Recorded]) -> bool:
    """Whether the parts of one file reach from its first to its last byte without a gap."""
    at = 0
    for part in sorted(parts, key=lambda part: part.start):
        at = max(at, part.end) if part.start <= at else at
    return bool(parts) and at >= parts[0].size_bytes
