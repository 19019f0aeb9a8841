"""Copy a checkpoint that others wrote (plain DCP, torchtitan): every file as it is, its CRC-32s checked, `.metadata` last.

A copy that was interrupted goes on: a file that is there with the source's very bytes is not sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeAlias

import xxhash

from titan_ckpt.check.scan import check_blobs
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.errors import AlreadyExistsError, DamagedError, NotFoundError
from titan_ckpt.format.names import METADATA, foreign_folder
from titan_ckpt.store.base import ObjectInfo, Store

FILES_AT_ONCE = 4
WINDOW_BYTES = 16 << 20
Tell: TypeAlias = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What a copy did; `kept_bytes` were there already and right."""

    step: int
    num_files: int
    copied_bytes: int
    kept_bytes: int
    was_committed: bool


def copy_foreign(source: Checkpoint, target: Store, on_bytes: Tell) -> CopyReport:
    """Make the checkpoint exist as `step-N` of the run at `target`, the name that torchtitan looks for.

    The copy is read back before `.metadata` makes it a checkpoint: AlreadyExistsError where that step holds another one,
    DamagedError where a record has not the CRC-32 that torch.save gave it, or a file changed meanwhile.
    """
    copy = replace(
        source, store=target, url=f"{target.url}/{foreign_folder(source.step)}", folder=foreign_folder(source.step)
    )
    index = source.store.read(source.path(METADATA))
    was_there = target.exists(copy.path(METADATA))
    if was_there and target.read(copy.path(METADATA)) != index:
        raise AlreadyExistsError(f"{copy.store.where(copy.folder)} is another checkpoint; it was left as it is")
    files = [entry for entry in source.store.list(source.folder) if _name(source, entry) != METADATA]
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="cp") as pool:
        kept = list(pool.map(lambda entry: _copy_file(source, copy, entry, on_bytes), files))
    _check(source, copy, files)
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


def _name(checkpoint: Checkpoint, entry: ObjectInfo) -> str:
    """An object's path below the checkpoint's folder."""
    return entry.path.removeprefix(f"{checkpoint.folder}/") if checkpoint.folder else entry.path


def _copy_file(source: Checkpoint, copy: Checkpoint, entry: ObjectInfo, on_bytes: Tell) -> bool:
    """Copy a file unless its bytes are there; whether they were."""
    path = copy.path(_name(source, entry))
    if _is_there(source.store, entry, copy.store, path):
        on_bytes(entry.size_bytes)
        return True
    copy.store.write(path, _windows(source.store, entry.path, entry.size_bytes, on_bytes))
    return False


def _is_there(source: Store, entry: ObjectInfo, target: Store, path: str) -> bool:
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


def _windows(store: Store, path: str, size_bytes: int, tell: Tell) -> Iterator[memoryview]:
    for start in range(0, size_bytes, WINDOW_BYTES):
        view = memoryview(bytearray(min(WINDOW_BYTES, size_bytes - start)))
        store.read_into(path, start, view)
        tell(len(view))
        yield view


def _check(source: Checkpoint, copy: Checkpoint, files: list[ObjectInfo]) -> None:
    """Read the copy back, and look whether the source is still what it was."""
    now = {entry.path: entry.version for entry in source.store.list(source.folder)}
    for entry in files:
        if now.get(entry.path) != entry.version:
            raise DamagedError(
                f"{source.store.where(entry.path)}: changed while it was copied; copy a checkpoint that nobody writes"
            )
    if problems := check_blobs(copy, lambda _: None):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise DamagedError(
            f"{copy.store.where(copy.folder)}: {problems[0]}{more}; it has no {METADATA} and is no checkpoint. "
            f"`titan-ckpt verify --data {source}` says whether the source is damaged too"
        )
