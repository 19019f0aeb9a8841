"""Logs of many hosts, read by several processes where the machine has cores for it, and fetched ahead where they are remote.

Each process reads its share of the files into an evidence of its own. The parts are joined in the order of the files, so the
result is the one that one process gives. Processes are forked, on Linux, from a program with no other Python thread and only for
files on local disk: clients of object stores do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from titan_ckpt.debug.incident.records import Flag
from titan_ckpt.debug.read.assemble import RankEvidence, RunEvidence
from titan_ckpt.debug.read.discovery import EvidenceFile, read_evidence_file
from titan_ckpt.debug.read.reports.inspector import Progress
from titan_ckpt.debug.read.reports.process_stacks import ProcessStacks
from titan_ckpt.debug.read.text.job_text import JobText
from titan_ckpt.store.base import Store
from titan_ckpt.store.local import FileStore

Read = Callable[[RunEvidence, EvidenceFile], None]
Fetch = Callable[[], bytes]
LEAST_BYTES = 16 << 20  # of logs, for which starting processes pays
LEAST_FILES = 512
MOST_PROCESSES = 16
AHEAD_FILES, AHEAD_BYTES = 32, 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one process read."""

    texts: list[JobText]
    ranks: dict[int, RankEvidence]
    flags: list[Flag]
    progress: list[Progress]
    processes: list[ProcessStacks]
    pid_of_file: dict[int, int]
    num_evidence: int
    size_bytes: int  # of the files of which all was read
    again: list[EvidenceFile]  # which turned out to hold more than text: for the one process that knows all dumps


def read_texts(evidence: RunEvidence, files: Sequence[EvidenceFile], read: Read) -> None:
    """Read text files in their order, with as many processes as pay."""
    count = _num_processes(evidence, files)
    if count < 2:
        for file in files:
            read(evidence, file)
        return
    shares = _shares(files, count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # native threads of numpy, which the children do not use
        with multiprocessing.get_context("fork").Pool(count, _prepare, (evidence, read)) as pool:
            for part in pool.imap(_read_share, shares):
                _join(evidence, part)
                evidence.on_bytes(part.size_bytes)
                for file in part.again:
                    read(evidence, file)


def is_local(store: Store) -> bool:
    """Whether files are on local disk: then they are not fetched ahead, and may be read by several processes."""
    return isinstance(store, FileStore)


def _num_processes(evidence: RunEvidence, files: Sequence[EvidenceFile]) -> int:
    is_large = sum(file.size_bytes for file in files) >= LEAST_BYTES or len(files) >= LEAST_FILES
    can_fork = (
        sys.platform == "linux" and threading.active_count() == 1 and not multiprocessing.current_process().daemon
    )
    if not is_large or not can_fork or not is_local(evidence.store):
        return 1
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def _shares(files: Sequence[EvidenceFile], count: int) -> list[Sequence[EvidenceFile]]:
    """Consecutive files, in several shares a process, as files differ in size."""
    step = max(1, len(files) // (4 * count))
    return [files[start : start + step] for start in range(0, len(files), step)]


_work: tuple[RunEvidence, Read] | None = None  # of a forked process


def _prepare(evidence: RunEvidence, read: Read) -> None:
    global _work
    _work = evidence, read


def _read_share(files: Sequence[EvidenceFile]) -> _Part:
    assert _work is not None
    whole, read = _work
    own = _alike(whole)
    again = []
    for file in files:
        found = _alike(whole)
        read(found, file)
        if _is_text(found):
            _join(own, _part(found))
        else:
            again.append(file)
    return _part(own, again, size_bytes=sum(file.size_bytes for file in files if file not in again))


def _alike(whole: RunEvidence) -> RunEvidence:
    """With nothing read yet, of the same run."""
    return RunEvidence(
        store=whole.store, recorded_ranks=whole.recorded_ranks, started_s=whole.started_s, until_s=whole.until_s
    )


def _is_text(found: RunEvidence) -> bool:
    """Whether nothing but texts and stacks was found."""
    has_others = (
        found.exits or found.launcher or found.world_size or found.host_of_file or found.recorded_ranks > _recorded()
    )
    return not has_others and not any(
        rank.dumps or rank.box or rank.sidecar or rank.logs for rank in found.ranks.values()
    )


def _recorded() -> int:
    assert _work is not None
    return _work[0].recorded_ranks


def _part(found: RunEvidence, again: Sequence[EvidenceFile] = (), *, size_bytes: int = 0) -> _Part:
    return _Part(
        texts=found.texts, ranks=dict(found.ranks), flags=found.flags, progress=found.progress, processes=found.processes,
        pid_of_file=found.pid_of_file, num_evidence=found.num_evidence, size_bytes=size_bytes,
        again=list(again),
    )  # fmt: skip


def _join(evidence: RunEvidence, part: _Part) -> None:
    evidence.texts += part.texts
    evidence.flags += part.flags
    evidence.progress += part.progress
    evidence.processes += part.processes
    evidence.num_evidence += part.num_evidence
    for rank, pid in part.pid_of_file.items():
        evidence.pid_of_file.setdefault(rank, pid)
    for rank, found in part.ranks.items():
        evidence.ranks[rank].stacks += found.stacks


def fetched(
    store: Store, files: Sequence[EvidenceFile], is_streamed: Callable[[EvidenceFile], bool]
) -> Iterator[tuple[EvidenceFile, Fetch | None]]:
    """Files of a remote store in their order, each with a function that gives its content or raises (None: too large to be
    fetched as a whole). Several are fetched at once, AHEAD_FILES and AHEAD_BYTES at most."""
    waiting: deque[tuple[EvidenceFile, Future[bytes] | None]] = deque()
    ahead = 0
    with ThreadPoolExecutor(AHEAD_FILES, thread_name_prefix="titan-ckpt-fetch") as pool:
        for file in files:
            while waiting and (len(waiting) >= AHEAD_FILES or ahead + file.size_bytes > AHEAD_BYTES):
                first, future = waiting.popleft()
                ahead -= first.size_bytes
                yield first, future.result if future else None
            waiting.append((file, None if is_streamed(file) else pool.submit(read_evidence_file, store, file)))
            ahead += file.size_bytes
        for first, future in waiting:
            yield first, future.result if future else None
