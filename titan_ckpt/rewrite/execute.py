"""Run waves of target files: read, check, cut, transform, digest and write at the same time, in bounded memory.

One thread walks the schedule: it starts reads ahead (a pool of readers fills slabs), verifies source digests, and hands each
target file its next bytes. One thread per open target file digests and writes them, streamed. All buffers are slabs of two
pools, so that the budget holds whatever the model's size.
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
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.rewrite.memory import Aborted, Budget, Slab, SlabPool
from titan_ckpt.rewrite.plan import Region, Source, TargetFile, Wave
from titan_ckpt.rewrite.schedule import Limits, schedule
from titan_ckpt.rewrite.work_unit import Action, Check, End, Fill, Move, PieceKey, Put, Unit
from titan_ckpt.sharding.placement import Box, span, strides
from titan_ckpt.store.base import LARGEST_CHANGING_PART, Store

_ELEMENT: Mapping[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """A target file that is written. `digests`: xxh3-128 of the bytes of every region that has a key; `digest`: of the whole
    file, empty where the execution was told not to take it."""

    path: str
    size_bytes: int
    digest: bytes
    digests: Mapping[str, bytes]


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What an execution moved, in bytes and requests."""

    read_bytes: int = 0
    read_requests: int = 0
    written_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Execution:
    """One run of `execute`: where from, where to, and how much memory."""

    source: Source
    source_store: Store
    target_store: Store
    budget: Budget
    is_checked: bool = True
    is_file_digested: bool = True
    num_readers: int = 4
    on_progress: Callable[[int], None] | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def run(self, waves: Iterable[Wave]) -> Iterator[list[FileResult]]:
        """Write every wave's files; yields each wave's results once its files are whole, in order.

        DamagedError where a source digest does not match; whatever fails, files not yet whole are not there.
        """
        run = _Run(self)
        try:
            yield from run.waves(waves)
        except BaseException as error:  # noqa: BLE001  (raised again, as the error that began it)
            run.abort(error)
            raise run.first_error(error) from None
        finally:
            run.close()


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes for a file: literal (no slab) or in a slab that is released once they are written."""

    data: memoryview | bytes
    slab: Slab | None
    is_region: bool


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


class _Sink:
    """One target file being written by a thread of its own."""

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
        """The next bytes; a Region says that it is complete, None that the file is."""
        self._queue.put(item)

    def join(self) -> None:
        self._thread.join()

    def _write(self) -> None:
        try:
            entry = self._run.execution.target_store.write(self._file.path, self._parts())
        except BaseException as error:  # noqa: BLE001  (handed to the walking thread, which raises it)
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
            if item.slab is not None:
                item.slab.release()


@dataclass(frozen=True, slots=True)
class _OpenWave:
    sinks: list[_Sink]

    def results(self) -> list[FileResult]:
        """Wait until the wave's files are whole."""
        return [sink.result.result() for sink in self.sinks]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A unit whose reads are under way."""

    unit: Unit
    slab: Slab | None
    reads: list[Future[None]]


class _Run:
    """The walking thread's state."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        budget = execution.budget
        self._read_slabs = SlabPool(budget.slabs_per_pool, budget.slab_bytes)
        self._cut_slabs = SlabPool(budget.slabs_per_pool, budget.slab_bytes)
        self._scratch = np.empty(0, dtype=np.uint8)
        self._readers = ThreadPoolExecutor(execution.num_readers, thread_name_prefix="read")
        self._checked: set[PieceKey] | None = set() if execution.is_checked else None
        self._hashers: dict[PieceKey, xxhash.xxh3_128] = {}
        self._open: deque[_OpenWave] = deque()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._cut: tuple[Slab, int] | None = None

    def waves(self, waves: Iterable[Wave]) -> Iterator[list[FileResult]]:
        """Run all; a wave's files may still be flushing while the next wave is read."""
        for wave in waves:
            while self._open and self._num_open + len(wave.files) > self.execution.budget.max_open_files:
                yield self._open.popleft().results()
            sinks = [_Sink(self, file) for file in wave.files]
            self._open.append(_OpenWave(sinks))
            self._walk(wave, sinks)
            for sink in sinks:
                sink.put(None)
        while self._open:
            yield self._open.popleft().results()

    @property
    def _num_open(self) -> int:
        return sum(len(wave.sinks) for wave in self._open)

    def _walk(self, wave: Wave, sinks: list[_Sink]) -> None:
        limits = Limits(slab_bytes=self.execution.budget.slab_bytes)
        units = schedule(self.execution.source, wave, limits, checked=self._checked)
        pending: deque[_Pending] = deque()
        upcoming = next(units, None)
        while upcoming is not None or pending:
            while upcoming is not None and (started := self._start(upcoming, wait=not pending)):
                pending.append(started)
                upcoming = next(units, None)
            self._finish(pending.popleft(), sinks)
        self._release_cut()

    def _start(self, unit: Unit, *, wait: bool) -> _Pending | None:
        """Start a unit's reads; None if there is no slab for it now."""
        if not unit.reads:
            return _Pending(unit, None, [])
        slab = self._read_slabs.acquire(unit.slab_bytes, wait=wait)
        if slab is None:
            return None
        view = slab.data.data
        store, objects = self.execution.source_store, self.execution.source.objects
        self.execution.traffic.read_requests += len(unit.reads)
        self.execution.traffic.read_bytes += sum(read.length for read in unit.reads)
        futures = [
            self._readers.submit(store.read_into, objects[r.object], r.start, view[r.at : r.at + r.length])
            for r in unit.reads
        ]
        return _Pending(unit, slab, futures)

    def _finish(self, pending: _Pending, sinks: list[_Sink]) -> None:
        for future in pending.reads:
            future.result()
        for check in pending.unit.checks:
            assert pending.slab is not None
            self._check(check, pending.slab)
        for action in pending.unit.actions:
            self._act(action, pending.slab, sinks)
        if pending.slab is not None:
            pending.slab.release()

    def _check(self, check: Check, slab: Slab) -> None:
        hasher = self._hashers.setdefault(check.key, xxhash.xxh3_128())
        hasher.update(slab.data.data[check.at : check.at + check.length])
        if not check.is_last:
            return
        found = self._hashers.pop(check.key).digest()
        if found != check.piece.digest:
            where = self.execution.source_store.where(self.execution.source.objects[check.piece.object])
            expected = check.piece.digest.hex() if check.piece.digest else "none"
            raise DamagedError(
                f"{where}: {check.key[0]}: the {check.piece.length} bytes at {check.piece.start} have digest {found.hex()}, "
                f"expected {expected}: the source is damaged. Use another step; `verify --data` lists every damaged chunk."
            )

    def _act(self, action: Action, slab: Slab | None, sinks: list[_Sink]) -> None:
        if isinstance(action, Put):
            sinks[action.file].put(_Part(action.data, None, is_region=False))
        elif isinstance(action, End):
            sinks[action.file].put(action.region)
        else:
            assert slab is not None
            sinks[action.file].put(self._fill(action, slab))

    def _fill(self, fill: Fill, slab: Slab) -> _Part:
        size = fill.strip.num_elements * ELEMENT_SIZE[fill.dtype]
        if fill.region.transform is None:
            move = fill.moves[0]
            if len(fill.moves) == 1 and move.strides == _byte_strides(fill.strip, fill.dtype):
                return _Part(slab.data.data[move.at : move.at + size], slab.retain(), is_region=True)
            target, view = self._cut_space(size)
            _gather(fill, slab.data, view)
            return _Part(view.data, target, is_region=True)
        if len(self._scratch) < size:
            self._scratch = np.empty(size, dtype=np.uint8)
        raw = self._scratch[:size]
        _gather(fill, slab.data, raw)
        return self._transformed(fill, raw)

    def _transformed(self, fill: Fill, raw: npt.NDArray[np.uint8]) -> _Part:
        transform = fill.region.transform
        assert transform is not None
        result = memoryview(transform.apply(raw.data, fill.strip)).cast("B")
        first, count = span(fill.strip, fill.part) if fill.part.num_elements else (0, 0)
        item = ELEMENT_SIZE[transform.dtype]
        target, view = self._cut_space(count * item)
        view[:] = np.frombuffer(result, dtype=np.uint8)[first * item : (first + count) * item]
        return _Part(view.data, target, is_region=True)

    def _cut_space(self, size: int) -> tuple[Slab, npt.NDArray[np.uint8]]:
        """`size` bytes of the slab for cut bytes that is being filled; a new one where it is full."""
        if self._cut is not None and self._cut[1] + size > len(self._cut[0].data):
            self._release_cut()
        if self._cut is None:
            slab = self._cut_slabs.acquire(size)
            assert slab is not None
            self._cut = (slab, 0)
        slab, used = self._cut
        self._cut = (slab, used + -(-size // 64) * 64)
        return slab.retain(), slab.data[used : used + size]

    def _release_cut(self) -> None:
        if self._cut is not None:
            self._cut[0].release()
            self._cut = None

    def wrote(self, size_bytes: int) -> None:
        """Count what a sink wrote."""
        with self._lock:
            self.execution.traffic.written_bytes += size_bytes
            if self.execution.on_progress is not None:
                self.execution.on_progress(size_bytes)

    def abort(self, error: BaseException) -> None:
        """Remember the first error and stop everybody."""
        with self._lock:
            if self._error is None and not isinstance(error, Aborted):
                self._error = error
        self._read_slabs.abort()
        self._cut_slabs.abort()

    def first_error(self, error: BaseException) -> BaseException:
        """The error that began it, which may not be the one that the walking thread met."""
        return self._error or error

    def close(self) -> None:
        """Wait for every thread; open files of a run that failed are given up."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        for wave in self._open:
            for sink in wave.sinks:
                sink.put(_Failure(Aborted()))
        for wave in self._open:
            for sink in wave.sinks:
                sink.join()


def _byte_strides(box: Box, dtype: str) -> tuple[int, ...]:
    return tuple(step * ELEMENT_SIZE[dtype] for step in strides(box.sizes))


def _gather(fill: Fill, slab: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    """Copy every move's box from the slab to its place in the strip."""
    element = np.dtype(_ELEMENT[ELEMENT_SIZE[fill.dtype]])
    target = out.view(element).reshape(fill.strip.sizes) if out.size else out
    for move in fill.moves:
        place = tuple(slice(o, o + s) for o, s in zip(move.box.offsets, move.box.sizes, strict=True))
        target[place] = _view(move, slab, element)


def _view(move: Move, slab: npt.NDArray[np.uint8], element: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.ndarray(move.box.sizes, dtype=element, buffer=slab.data, offset=move.at, strides=move.strides)
