"""Random access to logs: local files in place, compressed or remote ones through a temporary copy.

A job has thousands of logs, so at most `MAX_OPEN` files are open at once.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from titan_ckpt.errors import StoreError
from titan_ckpt.location import local_path, scheme
from titan_ckpt.parsing.unpacking import unpacked
from titan_ckpt.store.base import Store
from titan_ckpt.tui.data.content import LogFile

MAX_OPEN = 96
_COPY_BYTES = 8 << 20
MAX_UNPACKED = 8 << 30


class LogFiles:
    """The logs of one run. `close` removes the temporary files."""

    def __init__(self, store: Store, files: tuple[LogFile, ...]) -> None:
        self.files = files
        self._store = store
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._paths: dict[int, str] = {}
        self._open: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.RLock()
        self._is_closed = False
        self.told: dict[str, int] = {}  # ranks of files whose names tell none, by path

    def rank(self, index: int) -> int | None:
        """The rank whose log a file is: by its name, else as the evidence told."""
        file = self.files[index]
        return self.told.get(file.path) if file.rank is None else file.rank

    def read(self, index: int, start: int, length: int) -> bytes:
        """Up to `length` bytes of a file from `start`."""
        with self._lock:
            return os.pread(self._descriptor(index), length, start)

    def size(self, index: int) -> int:
        """Current size of a file, uncompressed."""
        with self._lock:
            return os.fstat(self._descriptor(index)).st_size

    def year(self, index: int) -> int:
        """Year of the file's last change; of a temporary copy, the current year."""
        with self._lock:
            return datetime.fromtimestamp(os.fstat(self._descriptor(index)).st_mtime, UTC).year

    def grow(self, files: tuple[LogFile, ...]) -> None:
        """Take `files` (the same ones, perhaps longer, and new ones after them) and append new bytes to temporary copies."""
        with self._lock:
            for index, path in self._paths.items():
                before, after = self.files[index].size_bytes, files[index].size_bytes
                if after > before and not self._is_in_place(files[index]):
                    with open(path, "ab") as out:
                        out.write(self._store.read(files[index].path, before, after - before))
            self.files = files

    def _is_in_place(self, file: LogFile) -> bool:
        return scheme(self._store.url) == "file" and not file.is_packed

    @property
    def is_closed(self) -> bool:
        """Whether newer LogFiles have replaced these."""
        return self._is_closed

    def close(self) -> None:
        """Close all files and remove the temporary ones; later reads raise StoreError."""
        with self._lock:
            self._is_closed = True
            while self._open:
                os.close(self._open.popitem()[1])
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None
                self._paths.clear()

    def _descriptor(self, index: int) -> int:
        if self._is_closed:
            raise StoreError(f"{self.files[index].path}: the logs have been reloaded; try again")
        found = self._open.pop(index, None)
        if found is None:
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.popitem(last=False)[1])
            found = os.open(self._path(index), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._open[index] = found
        return found

    def _path(self, index: int) -> str:
        if index not in self._paths:
            file = self.files[index]
            if self._is_in_place(file):
                self._paths[index] = os.path.join(local_path(self._store.url), file.path)
            else:
                self._paths[index] = self._copy(index, file)
        return self._paths[index]

    def _copy(self, index: int, file: LogFile) -> str:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="titan-ckpt-logs-")
        path = Path(self._folder.name) / f"{index}.log"
        with path.open("wb") as out:
            pieces = unpacked(
                file.path,
                self._parts(file),
                packed_bytes=file.size_bytes,
                most_bytes=max(MAX_UNPACKED, file.size_bytes),
            )
            for piece in pieces:
                out.write(piece)
        return str(path)

    def _parts(self, file: LogFile) -> Iterator[bytes]:
        for start in range(0, file.size_bytes, _COPY_BYTES):
            yield self._store.read(file.path, start, min(_COPY_BYTES, file.size_bytes - start))
