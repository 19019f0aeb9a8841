"""A model of power cuts: record what a job does to the file system, then build the folders that a cut may leave behind.

POSIX promises only what was synced: of a file, its bytes at its last `fsync`; of a folder, its names at its last `fsync`.
Anything later may be there or not, each change for itself, and later bytes may be there in part, as zeros or as nothing. One
`rename` happens as a whole or not at all. Real file systems promise more; what survives this survives them.
"""

from __future__ import annotations

import builtins
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

Names = dict[str, int]


@dataclass(frozen=True, slots=True)
class Event:
    """One change. `link` and `unlink` concern a name in a folder; `bytes` a file's whole content; `sync` a file or folder."""

    kind: str
    file: int
    names: tuple[tuple[str, int | None], ...] = ()
    content: bytes = b""
    note: str = ""


@dataclass(slots=True)
class Recording:
    """The events of a job in order, and which of its files are folders. Inodes are used again, so files have ids of their own."""

    root: Path
    events: list[Event] = field(default_factory=list)
    folders: set[int] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _ids: dict[int, int] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def id_of(self, path: str, *, is_new: bool = False) -> int | None:
        """The id of what is at `path`, None if nothing is."""
        try:
            inode = os.lstat(path).st_ino
        except OSError:
            return None
        if is_new or inode not in self._ids:
            self._ids[inode] = next(self._numbers)
        return self._ids[inode]

    def mark(self, note: str) -> None:
        """Note that the job has promised something."""
        with self.lock:
            self.events.append(Event("mark", 0, note=note))

    def add(self, kind: str, file: int, *names: tuple[str, int | None], content: bytes = b"") -> None:
        """Append an event."""
        self.events.append(Event(kind, file, names, content))

    def is_inside(self, path: str) -> bool:
        """Whether a path is in the recorded folder."""
        return path == str(self.root) or path.startswith(f"{self.root}/")


@contextmanager
def recorded(root: Path) -> Iterator[Recording]:
    """Record what this process does below `root`, which is empty and synced at the start."""
    recording = Recording(root)
    recording.folders.add(recording.id_of(str(root)) or 0)
    hooks = _Hooks(recording)
    with ExitStack() as stack:
        for name in hooks.names:
            stack.enter_context(patch.object(os, name, hooks.wrapped(name, getattr(os, name))))
        stack.enter_context(patch.object(builtins, "open", hooks.opened(builtins.open)))
        yield recording


class _Hooks:
    """Functions of `os` that record what they did."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._records = {
            "mkdir": self._mkdir, "rmdir": self._rmdir, "unlink": self._rmdir, "remove": self._rmdir, "link": self._link,
            "rename": self._relink, "replace": self._relink, "fsync": self._fsync, "writev": self._write, "write": self._write,
        }  # fmt: skip

    @property
    def names(self) -> list[str]:
        """The functions that are recorded."""
        return list(self._records)

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """`real`, recorded after it succeeded."""
        record = self._records[name]

        def call(*arguments: Any, **options: Any) -> Any:
            with self._recording.lock:
                before = self._paths(name, arguments, options)
                found = [self._recording.id_of(path) for path in before]
                result = real(*arguments, **options)
                if all(self._recording.is_inside(path) for path in before):
                    record(before, found)
                return result

        return call

    def _paths(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[str]:
        if name in ("fsync", "writev", "write"):
            return [os.readlink(f"/proc/self/fd/{arguments[0]}")]
        folder = options.get("dir_fd")
        base = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else ""
        count = 2 if name in ("link", "rename", "replace") else 1
        return [os.path.join(base, os.fspath(argument)) for argument in arguments[:count]]

    def opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """`open` that records a new or emptied file."""

        def call(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, str | os.PathLike) or not set(mode) & set("wax"):
                return real(path, mode, *arguments, **options)
            with self._recording.lock:
                full, is_new = os.fspath(path), not os.path.lexists(path)
                file = real(path, mode, *arguments, **options)
                if self._recording.is_inside(str(full)):
                    found = self._recording.id_of(str(full), is_new=is_new) or 0
                    if is_new:
                        self._name(str(full), found)
                    if is_new or "w" in mode:
                        self._recording.add("bytes", found)
                return file

        return call

    def _name(self, path: str, inode: int | None) -> None:
        folder, name = os.path.split(path)
        self._recording.add("names", self._recording.id_of(folder) or 0, (name, inode))

    def _mkdir(self, paths: list[str], _found: list[int | None]) -> None:
        found = self._recording.id_of(paths[0], is_new=True) or 0
        self._recording.folders.add(found)
        self._name(paths[0], found)

    def _rmdir(self, paths: list[str], _found: list[int | None]) -> None:
        self._name(paths[0], None)

    def _link(self, paths: list[str], found: list[int | None]) -> None:
        self._name(paths[1], found[0])

    def _relink(self, paths: list[str], found: list[int | None]) -> None:
        source, target = paths
        assert os.path.dirname(source) == os.path.dirname(target), "the store renames inside a folder"
        names = ((os.path.basename(source), None), (os.path.basename(target), found[0]))
        self._recording.add("names", self._recording.id_of(os.path.dirname(target)) or 0, *names)

    def _fsync(self, _paths: list[str], found: list[int | None]) -> None:
        self._recording.add("sync", found[0] or 0)

    def _write(self, paths: list[str], found: list[int | None]) -> None:
        self._recording.add("bytes", found[0] or 0, content=Path(paths[0]).read_bytes())


@dataclass(slots=True)
class _Disk:
    """What is on the disk for certain, and what came after that."""

    names: dict[int, Names] = field(default_factory=dict)
    pending: dict[int, list[Event]] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    unsynced: dict[int, list[bytes]] = field(default_factory=dict)

    def play(self, event: Event) -> None:
        if event.kind == "names":
            self.pending.setdefault(event.file, []).append(event)
        elif event.kind == "bytes":
            self.unsynced.setdefault(event.file, []).append(event.content)
        elif event.kind == "sync":
            for change in self.pending.pop(event.file, []):
                self.apply(change)
            if late := self.unsynced.pop(event.file, []):
                self.contents[event.file] = late[-1]

    def apply(self, event: Event) -> None:
        names = self.names.setdefault(event.file, {})
        for name, inode in event.names:
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode


def build_cut(recording: Recording, number: int, target: Path, rng: random.Random) -> list[str]:
    """Make in `target` what a cut after `number` events may leave; returns the notes marked before it."""
    disk = _Disk()
    for event in recording.events[:number]:
        disk.play(event)
    survival = rng.choice([0.0, 0.3, 0.7, 1.0])
    for changes in disk.pending.values():
        for change in changes:
            if rng.random() < survival:
                disk.apply(change)
    for inode, late in disk.unsynced.items():
        disk.contents[inode] = _torn(disk.contents.get(inode, b""), rng.choice(late), rng)
    _write_tree(disk, recording, recording.id_of(str(recording.root)) or 0, target)
    return [event.note for event in recording.events[:number] if event.kind == "mark"]


def _torn(synced: bytes, late: bytes, rng: random.Random) -> bytes:
    """What may be left of bytes that were not synced."""
    keep = rng.randint(0, len(late))
    return rng.choice([synced, late, late[:keep], late[:keep] + bytes(len(late) - keep), b""])


def _write_tree(disk: _Disk, recording: Recording, inode: int, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for name, child in disk.names.get(inode, {}).items():
        if child in recording.folders:
            _write_tree(disk, recording, child, target / name)
        else:
            (target / name).write_bytes(disk.contents.get(child, b""))
