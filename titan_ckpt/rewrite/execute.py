"""Read, verify, cut, transform, digest and write groups of target files concurrently, in bounded memory.

One thread walks the schedule: it starts reads ahead (a pool of readers fills buffers), verifies source digests and hands each
target file its next bytes. One thread per open target file digests and streams them out. All bytes are in buffers of two pools,
so the memory budget holds whatever the model's size.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from titan_ckpt.errors import DamagedError
from titan_ckpt.format.digest import Hasher, hasher
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.rewrite.memory import Aborted, Budget, BufferPool, PooledBuffer
from titan_ckpt.rewrite.plan import FileGroup, Region, RewriteSource, TargetFile
from titan_ckpt.rewrite.schedule import Limits, schedule
from titan_ckpt.rewrite.work_unit import (
    Action,
    BoxCopy,
    ChunkKey,
    DigestCheck,
    EndRegion,
    Unit,
    WriteLiteral,
    WriteRegion,
)
from titan_ckpt.sharding.placement import Box, span, strides
from titan_ckpt.store.base import LARGEST_CHANGING_PART, Store

_ELEMENT: Mapping[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """A written target file. `digests`: xxh3-128 of every region that has a key; `digest`: of the whole file, empty unless
    `Execution.is_file_digested`."""

    path: str
    size_bytes: int
    digest: bytes
    digests: Mapping[str, bytes]


@dataclass(slots=True, kw_only=True)
class IoCounts:
    """Bytes and requests of an execution."""

    read_bytes: int = 0
    read_requests: int = 0
    written_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Execution:
    """One execution: source, target and memory budget."""

    source: RewriteSource
    source_store: Store
    target_store: Store
    budget: Budget
    is_checked: bool = True
    is_file_digested: bool = True
    num_readers: int = 4
    on_progress: Callable[[int], None] | None = None
    traffic: IoCounts = field(default_factory=IoCounts)

    def run(self, groups: Iterable[FileGroup]) -> Iterator[list[FileResult]]:
        """Write every group's files; yield each group's results, in order, once its files are complete.

        DamagedError if a source digest does not match. After any failure, no incomplete file exists.
        """
        run = _Run(self)
        try:
            yield from run.groups(groups)
        except BaseException as error:  # noqa: BLE001  (the first error is raised instead)
            run.abort(error)
            raise run.first_error(error) from None
        finally:
            run.close()


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes for a file: literal (no buffer), or in a buffer that is released once they are written."""

    data: memoryview | bytes
    buffer: PooledBuffer | None
    is_region: bool


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


class _Sink:
    """A target file and the thread that writes it."""

    def __init__(self, run: _Run, file: TargetFile) -> None:
        self._run, self._file = run, file
        self._queue: queue.SimpleQueue[_Part | Region | _Failure | None] = queue.SimpleQueue()
        self._digests: dict[str, bytes] = {}
        self._whole = xxhash.xxh3_128()
        self._region = xxhash.xxh3_128()
        self.result: Future[FileResult] = Future()
        self._thread = threading.Thread(target=self._write, name=f"write {file.path}", daemon=True)
        self._thread.start()

    def put(self, item: _Part | Region | _Failure | None) -> None:
        """Queue the next bytes; a Region marks its own end, None the end of the file."""
        self._queue.put(item)

    def join(self) -> None:
        self._thread.join()

    def _write(self) -> None:
        try:
            entry = self._run.execution.target_store.write(self._file.path, self._parts())
        except BaseException as error:  # noqa: BLE001  (the walking thread raises it)
            self._run.abort(error)
            self.result.set_exception(error)
        else:
            self.result.set_result(
                FileResult(
                    path=self._file.path,
                    size_bytes=entry.size_bytes,
                    digest=self._whole.digest() if self._run.execution.is_file_digested else b"",
                    digests=self._digests,
                )
            )

    def _parts(self) -> Iterator[memoryview | bytes]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Failure):
                raise Aborted
            if isinstance(item, Region):
                if item.key is not None:
                    self._digests[item.key] = self._region.digest()
                self._region.reset()
                continue
            if self._run.execution.is_file_digested:
                self._whole.update(item.data)
            if item.is_region:
                self._region.update(item.data)
            for at in range(0, len(item.data), LARGEST_CHANGING_PART):
                yield item.data[at : at + LARGEST_CHANGING_PART]
            self._run.wrote(len(item.data))
            if item.buffer is not None:
                item.buffer.release()


@dataclass(frozen=True, slots=True)
class _OpenGroup:
    sinks: list[_Sink]

    def results(self) -> list[FileResult]:
        """Wait until the group's files are complete."""
        return [sink.result.result() for sink in self.sinks]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A unit whose reads are in flight."""

    unit: Unit
    buffer: PooledBuffer | None
    reads: list[Future[None]]


class _Run:
    """State of the walking thread."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        budget = execution.budget
        self._read_buffers = BufferPool(budget.buffers_per_pool, budget.buffer_bytes)
        self._cut_buffers = BufferPool(budget.buffers_per_pool, budget.buffer_bytes)
        self._scratch = np.empty(0, dtype=np.uint8)
        self._readers = ThreadPoolExecutor(execution.num_readers, thread_name_prefix="read")
        self._checked: set[ChunkKey] | None = set() if execution.is_checked else None
        self._hashers: dict[ChunkKey, Hasher] = {}
        self._open: deque[_OpenGroup] = deque()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._cut: tuple[PooledBuffer, int] | None = None

    def groups(self, groups: Iterable[FileGroup]) -> Iterator[list[FileResult]]:
        """Run all groups; one group's files may still be flushing while the next group is read."""
        for group in groups:
            while self._open and self._num_open + len(group.files) > self.execution.budget.max_open_files:
                yield self._open.popleft().results()
            sinks = [_Sink(self, file) for file in group.files]
            self._open.append(_OpenGroup(sinks))
            self._walk(group, sinks)
            for sink in sinks:
                sink.put(None)
        while self._open:
            yield self._open.popleft().results()

    @property
    def _num_open(self) -> int:
        return sum(len(group.sinks) for group in self._open)

    def _walk(self, group: FileGroup, sinks: list[_Sink]) -> None:
        limits = Limits(buffer_bytes=self.execution.budget.buffer_bytes)
        units = schedule(self.execution.source, group, limits, checked=self._checked)
        pending: deque[_Pending] = deque()
        upcoming = next(units, None)
        while upcoming is not None or pending:
            while upcoming is not None and (started := self._start(upcoming, wait=not pending)):
                pending.append(started)
                upcoming = next(units, None)
            self._finish(pending.popleft(), sinks)
        self._release_cut()

    def _start(self, unit: Unit, *, wait: bool) -> _Pending | None:
        """Start a unit's reads; None if no buffer is free and `wait` is false."""
        if not unit.reads:
            return _Pending(unit, None, [])
        buffer = self._read_buffers.acquire(unit.buffer_bytes, wait=wait)
        if buffer is None:
            return None
        view = buffer.data.data
        store, objects = self.execution.source_store, self.execution.source.objects
        self.execution.traffic.read_requests += len(unit.reads)
        self.execution.traffic.read_bytes += sum(read.length for read in unit.reads)
        futures = [
            self._readers.submit(store.read_into, objects[r.object], r.start, view[r.at : r.at + r.length])
            for r in unit.reads
        ]
        return _Pending(unit, buffer, futures)

    def _finish(self, pending: _Pending, sinks: list[_Sink]) -> None:
        for future in pending.reads:
            future.result()
        for check in pending.unit.checks:
            assert pending.buffer is not None
            self._check(check, pending.buffer)
        for action in pending.unit.actions:
            self._act(action, pending.buffer, sinks)
        if pending.buffer is not None:
            pending.buffer.release()

    def _check(self, check: DigestCheck, buffer: PooledBuffer) -> None:
        assert check.chunk.digest is not None
        digester = self._hashers.setdefault(check.key, hasher(check.chunk.digest))
        digester.update(buffer.data.data[check.at : check.at + check.length])
        if not check.is_last:
            return
        found = self._hashers.pop(check.key).digest()
        if found != check.chunk.digest:
            where = self.execution.source_store.where(self.execution.source.objects[check.chunk.object])
            raise DamagedError(
                f"{where}: {check.key[0]}: the {check.chunk.length} bytes at {check.chunk.start} have digest {found.hex()}, "
                f"expected {check.chunk.digest.hex()}: the source is damaged. Use another step; `verify --data` lists every "
                f"damaged chunk."
            )

    def _act(self, action: Action, buffer: PooledBuffer | None, sinks: list[_Sink]) -> None:
        if isinstance(action, WriteLiteral):
            sinks[action.file].put(_Part(action.data, None, is_region=False))
        elif isinstance(action, EndRegion):
            sinks[action.file].put(action.region)
        else:
            assert buffer is not None
            sinks[action.file].put(self._assemble(action, buffer))

    def _assemble(self, write: WriteRegion, buffer: PooledBuffer) -> _Part:
        size = write.strip.num_elements * ELEMENT_SIZE[write.dtype]
        if write.region.transform is None:
            copy = write.copies[0]
            if len(write.copies) == 1 and copy.strides == _byte_strides(write.strip, write.dtype):
                return _Part(buffer.data.data[copy.at : copy.at + size], buffer.retain(), is_region=True)
            target, view = self._cut_space(size)
            _gather(write, buffer.data, view)
            return _Part(view.data, target, is_region=True)
        if len(self._scratch) < size:
            self._scratch = np.empty(size, dtype=np.uint8)
        raw = self._scratch[:size]
        _gather(write, buffer.data, raw)
        return self._transformed(write, raw)

    def _transformed(self, write: WriteRegion, raw: npt.NDArray[np.uint8]) -> _Part:
        transform = write.region.transform
        assert transform is not None
        result = memoryview(transform.apply(raw.data, write.strip)).cast("B")
        first, count = span(write.strip, write.part) if write.part.num_elements else (0, 0)
        item = ELEMENT_SIZE[transform.dtype]
        target, view = self._cut_space(count * item)
        view[:] = np.frombuffer(result, dtype=np.uint8)[first * item : (first + count) * item]
        return _Part(view.data, target, is_region=True)

    def _cut_space(self, size: int) -> tuple[PooledBuffer, npt.NDArray[np.uint8]]:
        """Take `size` bytes of the current buffer for cut bytes, or of a new one if they do not fit."""
        if self._cut is not None and self._cut[1] + size > len(self._cut[0].data):
            self._release_cut()
        if self._cut is None:
            buffer = self._cut_buffers.acquire(size)
            assert buffer is not None
            self._cut = (buffer, 0)
        buffer, used = self._cut
        self._cut = (buffer, used + -(-size // 64) * 64)
        return buffer.retain(), buffer.data[used : used + size]

    def _release_cut(self) -> None:
        if self._cut is not None:
            self._cut[0].release()
            self._cut = None

    def wrote(self, size_bytes: int) -> None:
        """Count bytes that a sink has written."""
        with self._lock:
            self.execution.traffic.written_bytes += size_bytes
            if self.execution.on_progress is not None:
                self.execution.on_progress(size_bytes)

    def abort(self, error: BaseException) -> None:
        """Remember the first error and stop all threads."""
        with self._lock:
            if self._error is None and not isinstance(error, Aborted):
                self._error = error
        self._read_buffers.abort()
        self._cut_buffers.abort()

    def first_error(self, error: BaseException) -> BaseException:
        """The first error, which may differ from the one that the walking thread caught."""
        return self._error or error

    def close(self) -> None:
        """Wait for all threads; abandon the open files of a failed run."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        for group in self._open:
            for sink in group.sinks:
                sink.put(_Failure(Aborted()))
        for group in self._open:
            for sink in group.sinks:
                sink.join()


def _byte_strides(box: Box, dtype: str) -> tuple[int, ...]:
    return tuple(step * ELEMENT_SIZE[dtype] for step in strides(box.sizes))


def _gather(write: WriteRegion, buffer: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    """Copy every box from the buffer to its place in the strip."""
    element = np.dtype(_ELEMENT[ELEMENT_SIZE[write.dtype]])
    target = out.view(element).reshape(write.strip.sizes) if out.size else out
    for copy in write.copies:
        place = tuple(slice(o, o + s) for o, s in zip(copy.box.offsets, copy.box.sizes, strict=True))
        target[place] = _view(copy, buffer, element)


def _view(copy: BoxCopy, buffer: npt.NDArray[np.uint8], element: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.ndarray(copy.box.sizes, dtype=element, buffer=buffer.data, offset=copy.at, strides=copy.strides)
