"""Copy evidence to a folder or object store: regular files only, without secrets, replacing nothing that is there.

In a folder only the owner can read the copies, as it is with the recorder's own files.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.errors import AlreadyExistsError, StoreError
from titan_ckpt.location import redact_text
from titan_ckpt.private_files import TEMPORARY, open_regular
from titan_ckpt.store.base import Store

TAIL_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 28  # readers take no larger one
_BINARY = (".box", ".pickle", ".pkl", ".pt", ".gz", ".zst")
_RANK_FOLDER = re.compile(r"attempt_\d+|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A local file and its name where it goes; of a log only the end."""

    path: Path
    name: str
    is_log: bool = False


def publish(folder: Path, logs: str | None, store: Store, *, is_forced: bool) -> list[str]:
    """Copy the files of `folder`, and logs that match the glob `logs`; returns what was left out and why.

    AlreadyExistsError, before anything is written, if `store` has one of the names and `is_forced` is not set.
    """
    left_out: list[str] = []
    sources = [*_evidence(folder), *_logs(logs, left_out)] if logs else list(_evidence(folder))
    _refuse_taken([source.name for source in sources], store, is_forced=is_forced)
    for source in sources:
        try:
            content = _read(source)
        except (OSError, StoreError) as error:
            left_out.append(str(error))
        else:
            _write(store, source.name, content)
    return left_out


def publish_files(files: Mapping[str, bytes], store: Store, *, is_forced: bool) -> None:
    """Write these files, under the same condition."""
    _refuse_taken(list(files), store, is_forced=is_forced)
    for name, content in files.items():
        _write(store, name, content)


def _write(store: Store, name: str, content: bytes) -> None:
    before = os.umask(0o077)
    try:
        store.write(name, [content])
    finally:
        os.umask(before)


def _refuse_taken(names: Sequence[str], store: Store, *, is_forced: bool) -> None:
    taken = [] if is_forced else [name for name in names if store.exists(name)]
    if taken:
        raise AlreadyExistsError(
            f"{store}: {taken[0]}{f' and {len(taken) - 1} more' if len(taken) > 1 else ''} there already; "
            "give another --out, or --force to replace"
        )


def _evidence(folder: Path) -> Iterator[Source]:
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(TEMPORARY) and not path.is_socket() and (path.is_symlink() or not path.is_dir()):
            yield Source(path=path, name=path.name)


def _logs(pattern: str, left_out: list[str]) -> Iterator[Source]:
    """Log files under their paths below the deepest folder common to all, but never without torchrun's `attempt_0/3`."""
    root = os.path.realpath(_fixed_part(pattern))
    found = []
    for name in sorted(glob.glob(pattern, recursive=True)):
        path = os.path.realpath(name)
        if not f"{path}/".startswith(f"{root.rstrip('/')}/"):
            left_out.append(f"{name} is a link to outside of {root}")
        elif os.path.isfile(path):
            found.append(path)
    if found:
        common = os.path.dirname(found[0]) if len(found) == 1 else os.path.commonpath(map(os.path.dirname, found))
        while _RANK_FOLDER.fullmatch(os.path.basename(common)):
            common = os.path.dirname(common)
        for path in dict.fromkeys(found):
            yield Source(path=Path(path), name=f"logs/{os.path.relpath(path, common)}", is_log=True)


def _fixed_part(pattern: str) -> str:
    """The folder of a glob before its first special character."""
    head = pattern
    while glob.has_magic(head):
        head = os.path.dirname(head)
    return (head if head != pattern else os.path.dirname(head)) or "."


def _read(source: Source) -> bytes:
    with open(open_regular(source.path), "rb") as file:
        _check_place(source, file.fileno())
        size = os.fstat(file.fileno()).st_size
        if source.is_log:
            file.seek(max(0, size - TAIL_BYTES))
        elif size > MAX_FILE_BYTES:
            raise StoreError(f"{source.path}: {size} bytes, more than any evidence")
        content = file.read(TAIL_BYTES if source.is_log else MAX_FILE_BYTES)
    return content if source.path.suffix in _BINARY else _without_secrets(content)


def _check_place(source: Source, descriptor: int) -> None:
    """StoreError if a folder on the way to a log has become a link since its path was resolved."""
    opened = f"/proc/self/fd/{descriptor}"
    if source.is_log and os.path.exists(opened) and os.readlink(opened) != str(source.path):
        raise StoreError(f"{source.path} is behind a link that was not there before, which is not followed")


def _without_secrets(content: bytes) -> bytes:
    return redact_text(content.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
