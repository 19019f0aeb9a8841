"""Read every byte of a checkpoint once, in bounded memory, and find the bytes that are not what was saved. No torch.

A few threads read windows of all files ahead; they are hashed in order, for the whole file and for each chunk and value in it.
Foreign checkpoints have no digests; there each record of a blob must match the CRC-32 that torch.save wrote.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import xxhash

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.foreign_files import Recorded
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.checkpoint.read import read_payload
from titan_ckpt.errors import CheckpointError, StoreError, TitanError
from titan_ckpt.format.codec import MAGIC
from titan_ckpt.format.digest import digest
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.foreign_blob import Damage, check_records
from titan_ckpt.format.manifest import DIGEST_BYTES, RAW, Chunk, FileEntry, Manifest
from titan_ckpt.store.base import Store

log = logging.getLogger(__name__)
WINDOW_BYTES = 8 << 20
AHEAD = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is not what was saved: the file and, if known, the tensor and the byte range in the file."""

    path: str
    message: str
    fqn: str | None = None
    start: int | None = None
    end: int | None = None

    def __str__(self) -> str:
        place = "" if self.start is None else f" bytes {self.start} to {self.end}"
        return f"{self.path}:{f' {self.fqn}:' if self.fqn else ''}{place} {self.message}"

    def to_dict(self) -> dict[str, Any]:
        """The problem as a JSON object."""
        return {"path": self.path, "fqn": self.fqn, "start": self.start, "end": self.end, "message": self.message}


def reason(store: Store, path: str, error: Exception) -> str:
    """The text of an error about a file without the place, which a Problem names."""
    return str(error).replace(f"{store.where(path)}: ", "", 1)


@dataclass(slots=True)
class _Span:
    """Byte range `[start, end)` of a file with a digest of its own."""

    start: int
    end: int
    fqn: str | None
    expected: bytes
    hash: Any = field(default_factory=xxhash.xxh3_128)
    done: int = 0

    def feed(self, view: memoryview, at: int) -> None:
        """Hash the overlap with a window that starts at byte `at` of the file."""
        part = view[max(self.start - at, 0) : max(self.end - at, 0)]
        self.hash.update(part)
        self.done += len(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The damage found in data files, and what carries no digest: (path, FQN of a tensor or value)."""

    problems: list[Problem]
    unchecked: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Window:
    path: str
    start: int
    length: int


def scan_files(checkpoint: Checkpoint, digests: bytes | None, on_bytes: Callable[[int], None]) -> Scan:
    """Scan all data files. `digests` is the chunks' digest table, None if there is none."""
    if checkpoint.manifest.kind == CheckpointKind.FOREIGN:
        return check_blobs(checkpoint, on_bytes)
    files = [replace(file, path=checkpoint.path(file.path)) for file in checkpoint.manifest.files]
    spans = _spans(checkpoint.manifest, digests)
    problems: list[Problem] = []
    for number, found in enumerate(
        _scan(checkpoint.store, files, [spans.get(n, []) for n in range(len(files))], on_bytes)
    ):
        if digests is not None and (found or files[number].digest is None):
            named = _check_encoded(checkpoint, number, digests)
            found = named + [problem for problem in found if problem.fqn is not None or not named]
        problems += found
    return Scan(problems=problems, unchecked=_without_digest(checkpoint, has_digests=digests is not None))


def scan_recorded(
    checkpoint: Checkpoint, recorded: Sequence[Recorded], on_bytes: Callable[[int], None]
) -> list[Problem]:
    """Scan files of a format without digests, by the digests that were recorded beside them."""
    spans: dict[str, list[_Span]] = {}
    files, problems = [], []
    for part in recorded:
        if part.path not in spans:
            if problem := _size_problem(checkpoint.store, part):
                problems.append(problem)
            else:
                files.append(FileEntry(path=part.path, size_bytes=part.size_bytes, digest=None))
        spans.setdefault(part.path, []).append(_Span(part.start, part.end, part.fqn, part.digest, _hasher(part)))
    found = _scan(checkpoint.store, files, [spans[file.path] for file in files], on_bytes)
    return problems + [problem for of_file in found for problem in of_file]


def _size_problem(store: Store, part: Recorded) -> Problem | None:
    try:
        size_bytes = store.stat(part.path).size_bytes
    except StoreError as error:
        return Problem(path=part.path, message=f"cannot be read: {reason(store, part.path, error)}")
    if size_bytes != part.size_bytes:
        return Problem(path=part.path, message=f"has {size_bytes} bytes, expected {part.size_bytes}")
    return None


def _hasher(part: Recorded) -> Any:
    if part.algorithm == "git-sha-1":
        return hashlib.sha1(b"blob %d\0" % part.size_bytes, usedforsecurity=False)
    return hashlib.sha256() if part.algorithm == "sha-256" else xxhash.xxh3_128()


def _scan(
    store: Store, files: Sequence[FileEntry], spans: Sequence[list[_Span]], on_bytes: Callable[[int], None]
) -> Iterator[list[Problem]]:
    """The problems of each file, in order; paths are relative to the store."""
    fetched = fetch_ahead(store, _windows(files))
    for file, of_file in zip(files, spans, strict=True):
        scan = _FileScan(file.path, file, of_file)
        while scan.at < file.size_bytes:
            end = min(scan.at + WINDOW_BYTES, file.size_bytes)
            found, error = next(fetched)
            scan.feed(found)
            on_bytes(len(found))
            if error is not None:
                scan.skip(end - scan.at, error)
        yield scan.finish()


def _beginning(store: Store, window: _Window, buffer: memoryview) -> memoryview:
    """What a file that ends within the window has of it, read into `buffer`."""
    try:
        length = store.stat(window.path).size_bytes - window.start
        if not 0 < length < window.length:
            return buffer[:0]
        store.read_into(window.path, window.start, buffer[:length])
    except StoreError:
        return buffer[:0]
    return buffer[:length]


def _without_digest(checkpoint: Checkpoint, *, has_digests: bool) -> list[tuple[str, str]]:
    """Tensors and values that neither a digest of their own nor one of their file covers."""
    manifest = checkpoint.manifest
    covered = {file.path for file in manifest.files if file.digest is not None}
    lost = [(entry.file, entry.fqn) for entry in manifest.objects if entry.digest is None]
    if not has_digests:
        lost += [(chunk.file, entry.fqn) for entry in manifest.tensors for chunk in manifest.chunks_of(entry)]
    return [(checkpoint.path(file), fqn) for file, fqn in lost if file not in covered]


def _windows(files: Iterable[FileEntry]) -> Iterator[_Window]:
    for file in files:
        for start in range(0, file.size_bytes, WINDOW_BYTES):
            yield _Window(file.path, start, min(WINDOW_BYTES, file.size_bytes - start))


_Fetched = tuple[memoryview, TitanError | None]


def fetch_ahead(store: Store, windows: Iterable[_Window]) -> Iterator[_Fetched]:
    """The bytes of each window in order, with up to `AHEAD` reads in flight; of one that cannot be read what its file still
    has of it, and the error."""

    def fetch(window: _Window) -> _Fetched:
        buffer = memoryview(bytearray(window.length))
        try:
            store.read_into(window.path, window.start, buffer)
        except StoreError as error:
            return _beginning(store, window, buffer), error
        return buffer, None

    waiting: deque[Future[_Fetched]] = deque()
    with ThreadPoolExecutor(AHEAD, thread_name_prefix="scan") as pool:
        try:
            for window in windows:
                waiting.append(pool.submit(fetch, window))
                if len(waiting) >= AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _FileScan:
    """Checks one file, window by window."""

    def __init__(self, path: str, file: FileEntry, spans: list[_Span]) -> None:
        self.at = 0
        self._path, self._file = path, file
        self._spans = sorted(spans, key=lambda span: span.start)
        self._next, self._active = 0, list[_Span]()
        self._hash = xxhash.xxh3_128()
        self._problems: list[Problem] = []
        self._error: TitanError | None = None

    def feed(self, view: memoryview) -> None:
        """Hash the next window."""
        if self._error is None:
            self._hash.update(view)
        self._open_spans(self.at + len(view))
        for span in self._active:
            span.feed(view, self.at)
        self.at += len(view)
        self._close_spans()

    def skip(self, length: int, error: TitanError) -> None:
        """Skip a window that could not be read."""
        self._error = self._error or error
        self._open_spans(self.at + length)
        self.at += length
        self._close_spans()

    def _open_spans(self, end: int) -> None:
        while self._next < len(self._spans) and self._spans[self._next].start < end:
            self._active.append(self._spans[self._next])
            self._next += 1

    def _close_spans(self) -> None:
        for span in self._active:
            if span.end <= self.at:
                self._judge(span)
        self._active = [span for span in self._active if span.end > self.at]

    def _judge(self, span: _Span) -> None:
        if span.done != span.end - span.start:
            message = f"cannot be read: {self._error}"
        elif span.hash.digest() != span.expected:
            message = "are not what was saved (digest differs)"
        else:
            return
        self._problems.append(Problem(path=self._path, fqn=span.fqn, start=span.start, end=span.end, message=message))

    def finish(self) -> list[Problem]:
        """The problems found, after the last window."""
        is_other = self._error is None and self._file.digest is not None and self._hash.digest() != self._file.digest
        if self._error is not None and not self._problems:
            self._problems.append(Problem(path=self._path, message=f"cannot be read: {self._error}"))
        elif is_other and not self._problems:
            text = "bytes that hold no tensor of this checkpoint are not what was saved: titan-ckpt reads it right, DCP may not"
            self._problems.append(Problem(path=self._path, message=text))
        return self._problems


def _spans(manifest: Manifest, digests: bytes | None) -> dict[int, list[_Span]]:
    """Spans by file number: raw chunks' payloads, values' blobs, and the first bytes of encoded chunks, which
    the file's digest covers."""
    found: dict[int, list[_Span]] = {}
    number = {file.path: n for n, file in enumerate(manifest.files)}
    table = manifest.chunks
    raw = _raw(manifest)
    for tensor in manifest.tensors:
        for row in range(tensor.first_chunk, tensor.first_chunk + tensor.num_chunks):
            length = int(table.payload_length[row])
            if length and int(table.codec[row]) != raw:
                start = int(table.offset[row])
                found.setdefault(int(table.file[row]), []).append(
                    _Span(start, start + len(MAGIC), tensor.fqn, digest(MAGIC))
                )
            elif digests is not None and length:
                start = int(table.offset[row] + table.payload_offset[row])
                expected = digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
                found.setdefault(int(table.file[row]), []).append(_Span(start, start + length, tensor.fqn, expected))
    for entry in manifest.objects:
        if entry.digest is not None:
            span = _Span(entry.offset, entry.offset + entry.length, entry.fqn, entry.digest)
            found.setdefault(number[entry.file], []).append(span)
    return found


def _check_encoded(checkpoint: Checkpoint, number: int, digests: bytes) -> list[Problem]:
    """Decode the encoded chunks of a file and check their digests."""
    manifest, problems = checkpoint.manifest, []
    file, codec = np.asarray(manifest.chunks.file), np.asarray(manifest.chunks.codec)
    rows = np.flatnonzero((file == number) & (codec != _raw(manifest))).tolist()
    firsts = [tensor.first_chunk for tensor in manifest.tensors]
    for row in rows:
        tensor = manifest.tensors[bisect_right(firsts, row) - 1]
        chunk = manifest.chunk(tensor, row - tensor.first_chunk)
        try:
            is_right = (
                decoded_digest(checkpoint, chunk, ELEMENT_SIZE[tensor.dtype])
                == digests[row * DIGEST_BYTES :][:DIGEST_BYTES]
            )
            message = "are not what was saved (digest differs)"
        except (CheckpointError, StoreError) as error:
            is_right, message = False, str(error)
        if not is_right:
            start = chunk.offset + chunk.payload_offset
            path, end = checkpoint.path(chunk.file), start + chunk.payload_length
            problems.append(Problem(path=path, fqn=tensor.fqn, start=start, end=end, message=message))
    return problems


def decoded_digest(checkpoint: Checkpoint, chunk: Chunk, itemsize: int) -> bytes:
    """xxh3-128 of an encoded chunk's raw bytes, decoded window by window."""
    whole = xxhash.xxh3_128()
    raw_length = chunk.box.num_elements * itemsize
    for first in range(0, raw_length, WINDOW_BYTES):
        out = memoryview(bytearray(min(WINDOW_BYTES, raw_length - first)))
        read_payload(checkpoint, chunk, itemsize, first, out)
        whole.update(out)
    return whole.digest()


def _raw(manifest: Manifest) -> int:
    return manifest.codecs.index(RAW) if RAW in manifest.codecs else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blob:
    fqn: str
    path: str
    start: int
    length: int
    chunk: Chunk | None


def check_blobs(checkpoint: Checkpoint, on_bytes: Callable[[int], None]) -> Scan:
    """Read a foreign checkpoint: each record must match its CRC-32, each chunk must be a tensor of the right size."""
    problems, unchecked, num_records = list[Problem](), list[tuple[str, str]](), 0
    blobs = list(_blobs(checkpoint))
    with ThreadPoolExecutor(AHEAD, thread_name_prefix="scan") as pool:
        for blob, (found, missing) in zip(blobs, pool.map(partial(_check_blob, checkpoint), blobs), strict=True):
            problems += found
            unchecked += [(blob.path, blob.fqn)] if missing else []
            num_records += missing
            on_bytes(blob.length)
    if unchecked:
        log.warning(
            "%s: %d records carry no CRC-32: where they lie was checked, their bytes could not be",
            checkpoint,
            num_records,
        )
    return Scan(problems=problems, unchecked=unchecked)


def _blobs(checkpoint: Checkpoint) -> Iterator[_Blob]:
    for tensor in checkpoint.manifest.tensors:
        for chunk in checkpoint.manifest.chunks_of(tensor):
            path = checkpoint.path(chunk.file)
            yield _Blob(fqn=chunk.fqn, path=path, start=chunk.offset, length=chunk.length, chunk=chunk)
    for entry in checkpoint.manifest.objects:
        path = checkpoint.path(entry.file)
        yield _Blob(fqn=entry.fqn, path=path, start=entry.offset, length=entry.length, chunk=None)


def _check_blob(checkpoint: Checkpoint, blob: _Blob) -> tuple[list[Problem], int]:
    try:
        damages, unchecked = check_records(checkpoint.store, blob.path, blob.start, blob.length)
        if not damages and blob.chunk is not None:
            checkpoint.locate(blob.chunk, row_major=False)
    except (CheckpointError, StoreError) as error:
        damages, unchecked = [Damage(blob.start, blob.start + blob.length, str(error))], 0
    return [
        Problem(path=blob.path, fqn=blob.fqn, start=d.start, end=d.end, message=d.message) for d in damages
    ], unchecked
