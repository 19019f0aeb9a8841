"""How the workers of a reshard, and a later run of it, coordinate through the target store: a job folder, a record per file.

A job is identified by a digest of its request. Each complete file has a record beside it with its digests; the commit removes
the records.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash

from titan_ckpt.arguments import check_number, check_whole
from titan_ckpt.errors import AlreadyExistsError, DamagedError, NotFoundError, StoreError, UsageError
from titan_ckpt.format.commit import find_commit, read_record
from titan_ckpt.format.names import data_file, is_attempt, new_attempt, step_folder
from titan_ckpt.rewrite.execute import FileResult
from titan_ckpt.store.base import Store

JOB = "reshard.json"
_VERIFY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """This process among `count` workers that share a job and communicate through the target store only."""

    count: int = 1
    index: int = 0
    poll_s: float = 0.5
    patience_s: float = 1800.0

    def __post_init__(self) -> None:
        check_whole(self.count, "count", at_least=1)
        check_whole(self.index, "index", at_least=0)
        if self.index >= self.count:
            raise UsageError(f"index is {self.index}; of {self.count} workers the last is {self.count - 1}")
        check_number(self.poll_s, "poll_s", at_least=0)
        check_number(self.patience_s, "patience_s", at_least=0)


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The folder of job `key` in a step, and its records."""

    store: Store
    step: int
    key: str

    def path(self, rank: int, attempt: str) -> str:
        """The data file of a target rank."""
        return f"{step_folder(self.step)}/{data_file(attempt, rank)}"

    def found(self) -> str | None:
        """The attempt of this job, if an earlier run or worker 0 of this run has begun it."""
        folder = step_folder(self.step)
        attempts = [name for name in self.store.folders(folder) if is_attempt(name)]
        return next((name for name in attempts if self._key_in(f"{folder}/{name}/{JOB}") == self.key), None)

    def _key_in(self, path: str) -> str | None:
        try:
            return read_record(self.store, path)["job"].text()
        except (NotFoundError, DamagedError):
            return None

    def begun(self, workers: Workers, facts: Mapping[str, str]) -> str:
        """Begin a new attempt: worker 0 creates it, the others wait for it. `facts` are stored for a person who inspects it."""
        if workers.index == 0:
            attempt = new_attempt()
            content = {"job": self.key, **facts}
            self.store.write(f"{step_folder(self.step)}/{attempt}/{JOB}", [json.dumps(content).encode()])
            return attempt
        give_up_at = time.monotonic() + workers.patience_s
        while (found := self.found()) is None:
            if time.monotonic() > give_up_at:
                raise StoreError(
                    f"{self.store}: worker 0 has not begun within {workers.patience_s:.0f} s; is it running?"
                )
            time.sleep(workers.poll_s)
        return found

    def finished(self, attempt: str, ranks: Iterable[int]) -> dict[int, FileResult]:
        """Complete files of an earlier run, by rank: each has a record, and its bytes match the recorded digest."""
        finished = {}
        present = {entry.path for entry in self.store.list(f"{step_folder(self.step)}/{attempt}")}
        for rank in ranks:
            path = self.path(rank, attempt)
            if path in present and _beside(path) in present:
                record = self._read(path)
                if record is not None and self._digest(path, record.size_bytes) == record.digest:
                    finished[rank] = record
        return finished

    def _digest(self, path: str, size_bytes: int) -> bytes | None:
        """Digest of a file's bytes, None if its size is not `size_bytes`."""
        if self.store.stat(path).size_bytes != size_bytes:
            return None
        hasher, buffer = xxhash.xxh3_128(), memoryview(bytearray(_VERIFY_BYTES))
        for start in range(0, size_bytes, _VERIFY_BYTES):
            view = buffer[: min(_VERIFY_BYTES, size_bytes - start)]
            self.store.read_into(path, start, view)
            hasher.update(view)
        return hasher.digest()

    def write(self, result: FileResult) -> None:
        """Write the record of a complete file."""
        digests = {key: value.hex() for key, value in result.digests.items()}
        content = {"size": result.size_bytes, "xxh3_128": result.digest.hex(), "digests": digests}
        self.store.write(_beside(result.path), [json.dumps(content).encode()])

    def _read(self, path: str) -> FileResult | None:
        try:
            content = read_record(self.store, _beside(path))
            digests = {key: bytes.fromhex(value.text()) for key, value in content["digests"].items()}
            whole = bytes.fromhex(content["xxh3_128"].text())
            return FileResult(path=path, size_bytes=content["size"].whole(), digest=whole, digests=digests)
        except (NotFoundError, DamagedError, ValueError):
            return None

    def wait_for(self, ranks: Iterable[int], attempt: str, workers: Workers) -> dict[int, FileResult]:
        """Wait for all workers; return every rank's record. AlreadyExistsError if another run of the job commits meanwhile."""
        paths = {rank: self.path(rank, attempt) for rank in ranks}
        missing, seen_at = set(paths.values()), time.monotonic()
        while missing:
            present = {entry.path for entry in self.store.list(f"{step_folder(self.step)}/{attempt}")}
            still = {path for path in missing if _beside(path) not in present}
            seen_at = time.monotonic() if len(still) < len(missing) else seen_at
            missing = still
            if missing and time.monotonic() - seen_at > workers.patience_s:
                raise StoreError(
                    f"{self.store}: {len(missing)} of {len(paths)} files are still missing and none came for "
                    f"{workers.patience_s:.0f} s; a worker is gone. Nothing was committed; run the same command again, finished "
                    f"files are kept"
                )
            if missing:
                self._check_not_committed()
                time.sleep(workers.poll_s)
        records = {rank: self._read(path) for rank, path in paths.items()}
        damaged = [rank for rank, record in records.items() if record is None]
        if damaged:
            raise DamagedError(
                f"{self.store}: the record of rank {damaged[0]}'s file cannot be read; run the same command again"
            )
        return {rank: record for rank, record in records.items() if record is not None}

    def _check_not_committed(self) -> None:
        """A commit removes the records, so a second run of the same job would wait for them in vain."""
        if find_commit(self.store, self.step) is not None:
            raise AlreadyExistsError(
                f"{self.store}@{self.step} was just committed by another run of the same command; nothing is left to do"
            )

    def clear(self, attempt: str, results: Iterable[FileResult]) -> None:
        """Delete the job's marker and records."""
        folder = f"{step_folder(self.step)}/{attempt}"
        self.store.delete([f"{folder}/{JOB}", *(_beside(result.path) for result in results)])


def _beside(path: str) -> str:
    return f"{path}.json"
