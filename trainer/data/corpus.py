"""Files of a corpus, from any store: plain, gzip or zstd, and `python-stdlib`."""

from __future__ import annotations

import gzip
import io
import logging
import os
import re
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Literal

import zstandard

from titan_ckpt.errors import DataError, NotFoundError
from titan_ckpt.location import normalise, redact
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.data.hub import PREFIX, HubSplit, data_files, open_split

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = logging.getLogger(__name__)
STDLIB = "python-stdlib"
STDLIB_SKIPPED = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3")
SNIFF_BYTES = 8192
DAMAGED = (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError)
Format = Literal["auto", "text", "jsonl", "parquet", "tar"]
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a corpus. `version` changes when its bytes do; `format` is what its dataset says that it is."""

    store: Store
    path: str
    size_bytes: int
    version: str
    format: Format = "auto"

    @property
    def where(self) -> str:
        """Its full location, for messages."""
        return self.store.where(self.path)


@dataclass(slots=True, kw_only=True)
class DocumentReader:
    """How documents are read from files; counts the skipped lines by file."""

    format: Format = "auto"
    text_field: str = "text"
    bad_line: Literal["stop", "skip"] = "stop"
    skipped_lines: dict[str, int] = field(default_factory=dict)


def list_files(url: str) -> Sequence[File | HubSplit]:
    """The files of `url` (a file, folder, glob, datasets:NAME or python-stdlib), sorted by path; DataError if there are none."""
    if url.startswith(PREFIX):
        return [open_split(url)]
    if url == STDLIB:
        return _stdlib_files()
    root, pattern = split_glob(url)
    store = open_store(root)
    if pattern:
        matches = glob_pattern(pattern).fullmatch
        entries = [entry for entry in store.list() if matches(entry.path)]
    else:
        entries = list(store.list())
        if not entries:  # not a folder; perhaps a file
            folder, _, name = normalise(url).rpartition("/")
            store = open_store(folder or "/")
            try:
                entries = [store.stat(name)]
            except NotFoundError:
                entries = []
    if not entries:
        raise DataError(
            f"data: nothing at {redact(url)}; give a file, a folder, a glob such as corpus/*.jsonl.zst, or {STDLIB}"
        )
    return [File(store=store, path=e.path, size_bytes=e.size_bytes, version=e.version) for e in entries]


def list_shards(url: str) -> Sequence[File | HubSplit]:
    """As `list_files`, but a split of `datasets:NAME` as its data files, sorted by path, which are not loaded."""
    if not url.startswith(PREFIX):
        return list_files(url)
    kind, urls = data_files(url)
    files = []
    for folder in sorted({file.rpartition("/")[0] for file in urls}):
        store = open_store(folder)
        wanted = {file.rpartition("/")[2] for file in urls if file.rpartition("/")[0] == folder}
        entries = [entry for entry in store.list() if entry.path in wanted]
        if missing := wanted - {entry.path for entry in entries}:
            raise DataError(f"{url}: {store.where(min(missing))} is not there; the dataset lists it")
        files += [
            File(store=store, path=e.path, size_bytes=e.size_bytes, version=e.version, format=kind) for e in entries
        ]
    return files


def split_glob(url: str) -> tuple[str, str]:
    """Split at the last slash before the first wildcard: folder, and pattern (empty without a wildcard).

    >>> split_glob("s3://bucket/corpus/2024-*/part.jsonl"), split_glob("corpus")
    (('s3://bucket/corpus', '2024-*/part.jsonl'), ('corpus', ''))
    """
    first = _GLOB.search(url)
    if first is None:
        return url, ""
    cut = url.rfind("/", 0, first.start())
    return (url[:cut] or "/", url[cut + 1 :]) if cut >= 0 else (".", url)


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """A glob over slash-separated paths: `*` and `?` stay within a name, `**` crosses folders.

    >>> bool(glob_pattern("a/*.txt").fullmatch("a/b.txt")), bool(glob_pattern("*.txt").fullmatch("a/b.txt"))
    (True, False)
    >>> bool(glob_pattern("**/*.txt").fullmatch("a/b/c.txt")), bool(glob_pattern("**/*.txt").fullmatch("c.txt"))
    (True, True)
    """
    tokens = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = [special.get(t) or (t.replace("[!", "[^") if t.startswith("[") else re.escape(t)) for t in tokens]
    return re.compile("".join(parts))


def _stdlib_files() -> list[File]:
    root = sysconfig.get_path("stdlib")
    store = open_store(root)
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - set(STDLIB_SKIPPED))
        for name in sorted(names):
            if name.endswith(".py"):
                entry = store.stat(os.path.relpath(os.path.join(folder, name), root))
                if entry.size_bytes:
                    # The size alone is the version, so that one release installed twice is one corpus.
                    version = str(entry.size_bytes)
                    files.append(File(store=store, path=entry.path, size_bytes=entry.size_bytes, version=version))
    return files


def kind_of(file: File, reader: DocumentReader) -> Literal["text", "jsonl", "parquet", "tar"]:
    """What a file is read as: as the config says, as its dataset says, or by its name."""
    asked = reader.format if reader.format != "auto" else file.format
    return asked if asked != "auto" else format_of(file.path)


def format_of(path: str) -> Literal["text", "jsonl", "parquet", "tar"]:
    """By file name, compressed or not: JSONL, Parquet, tar shards; everything else is text.

    >>> format_of("part.jsonl.zst"), format_of("a/00.tgz"), format_of("README.md")
    ('jsonl', 'tar', 'text')
    """
    name = path.lower().removesuffix(".gz").removesuffix(".zst")
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    if name.endswith((".tar", ".tgz")):
        return "tar"
    return "parquet" if name.endswith((".parquet", ".pq")) else "text"


def open_unpacked(file: File) -> IO[bytes]:
    """A buffered stream of the content, decompressed according to the suffix."""
    raw = io.BufferedReader(StoreStream(file), buffer_size=1 << 22)
    if file.path.lower().endswith((".gz", ".tgz")):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    if file.path.lower().endswith(".zst"):
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(reader)
    return raw


class StoreStream(io.RawIOBase):
    """A stored file as a raw stream of ranged reads."""

    def __init__(self, file: File) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), self._file.size_bytes - self._position)
        if count > 0:
            self._file.store.read_into(self._file.path, self._position, view[:count])
            self._position += count
        return max(count, 0)

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position
