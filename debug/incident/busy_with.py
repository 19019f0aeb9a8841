"""What a running rank outside of any collective is busy with, by its stack, phase and last log line. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from titan_ckpt.debug.incident.frames import is_library, is_native
from titan_ckpt.debug.incident.kinds import Subtype
from titan_ckpt.debug.incident.records import Evidence, Frame, RankRecord, StackSnapshot

# What a busy rank is busy with, by words in its frames (function, file), source lines and last log lines.
_BUSY: tuple[tuple[Subtype, re.Pattern[str]], ...] = tuple(
    (subtype, re.compile("|".join(words), re.IGNORECASE))
    for subtype, words in {
        Subtype.CHECKPOINT_IO: (
            "checkpoint", "ckpt", "torch[./]save", "serialization", "safetensors", "state_dict", "distcp", "fsync",
            r"\bs3\b", "upload", "filesystem",
        ),
        Subtype.DATALOADER: (
            "data_?loader", "dataset", "_fetch", "fetch_", "next_batch", "_next_data", "get_batch", "read_shard",
            "__next__", "data_pipe", "prefetch", "utils/data/",
        ),
        Subtype.PYTHON_LOCK: (
            r"\block\b", r"_lock\b", r"\.acquire\(", r"(?<![a-z])lock_", "mutex", "semaphore", "rlock", "deadlock",
            "wait_for_tstate_lock", r"\bcondition\b",
        ),
        Subtype.GC: (r"\bgc\.collect", "garbage"),
    }.items()
)  # fmt: skip
PHASES = {
    "data": Subtype.DATALOADER,
    "ckpt_stage": Subtype.CHECKPOINT_IO,
    "ckpt_upload": Subtype.CHECKPOINT_IO,
    "ckpt_commit": Subtype.CHECKPOINT_IO,
}


def in_gc(stack: StackSnapshot) -> bool:
    """Whether the main thread was collecting garbage."""
    return bool(stack.main and stack.main.state.startswith("Garbage"))


def busy_with(record: RankRecord, stack: StackSnapshot) -> tuple[Subtype, Evidence | None]:
    """Subtype of STUCK_ON_CPU and its evidence: garbage collection, the stack, the recorder's phase, the last log line."""
    assert stack.main is not None
    if in_gc(stack):
        return Subtype.GC, Evidence(
            text="the main thread is in garbage collection", rank=record.rank, source=stack.source
        )
    if any(_ACQUIRES.search(frame.function) for frame in stack.main.frames[:4]):
        return Subtype.PYTHON_LOCK, None
    near = [frame for frame in stack.main.frames if not is_native(frame)][:8] or stack.main.frames[:8]
    inner = next((i for i, frame in enumerate(near) if not is_library(frame)), 0)
    is_locked = any(f.function in _LOCKED and f.file.endswith("threading.py") for f in near[:inner])
    if is_locked and not any(f.file.endswith(_HANDED_OVER) for f in near[:inner]):
        return Subtype.PYTHON_LOCK, None
    called = [frame for frame in near[:inner] if not (is_locked and frame.file.endswith("threading.py"))]
    for subtype in _words([f"{frame.text} {_neutral(frame.file)} {frame.function}" for frame in called]):
        return subtype, None
    for subtype in _words([_spoken(near[inner])]):
        return subtype, None
    if record.heartbeat and record.heartbeat.phase in PHASES:
        text = f"the training loop was in phase {record.heartbeat.phase}"
        return PHASES[record.heartbeat.phase], Evidence(text=text, rank=record.rank, source=record.heartbeat.source)
    for subtype in _words(own_lines(record)[-1:]) + _words([_spoken(frame) for frame in near[inner + 1 : inner + 3]]):
        return subtype, None
    return Subtype.PYTHON_LOCK if is_locked else Subtype.USER_CODE, None


_ACQUIRES = re.compile(
    r"^(?:PyThread_acquire_lock|lock_PyThread_acquire|rlock_acquire|acquire_timed)"
)  # of a lock, in CPython's C
_LOCKED = ("acquire", "wait", "join", "_wait_for_tstate_lock")
_HANDED_OVER = ("/queue.py", "/futures/_base.py")  # it waits for another thread's work: what for is the question
_FILE_LOCK = re.compile(r"\bfcntl\.\w+|\bflock\b|\blockf\b|\bLOCK_[A-Z]+|file_?lock", re.IGNORECASE)


def _neutral(path: str) -> str:
    """A library's path without this package's own name, which has "ckpt" in it."""
    return path.replace("titan_ckpt", "").replace("titan-ckpt", "")


def busy_by_log(record: RankRecord) -> Subtype:
    """What a rank was busy with by the last line of its log; NONE if nothing."""
    return next(iter(_words(own_lines(record)[-1:])), Subtype.NONE)


def _spoken(frame: Frame) -> str:
    return f"{frame.text} {frame.function} {frame.file.rpartition('/')[2]}"


def _words(texts: Sequence[str]) -> list[Subtype]:
    joined = "\n".join(texts)
    found = [subtype for subtype, words in _BUSY if words.search(joined)]
    if Subtype.PYTHON_LOCK in found and _FILE_LOCK.search(joined):  # which another process holds, no thread
        found.remove(Subtype.PYTHON_LOCK)
    return found


_RECORDER_TALK = re.compile(r"flight recorder|SIGTERM|monitor:|dump|WorkerServer", re.IGNORECASE)


_SERVER = re.compile(
    r"Server (?:listening|shutting down|exited)"
)  # torch's worker server at the process's start and end


def has_recorder_talk(record: RankRecord) -> bool:
    """Whether a monitor or signal handler of the process wrote to its log: it ran on."""
    lines = record.log.tail if record.log else ()
    return any(_RECORDER_TALK.search(line) and not _SERVER.search(line) for line in lines)


def own_lines(record: RankRecord) -> list[str]:
    """The last log lines that are the program's, not a monitor's."""
    return [line for line in (record.log.tail if record.log else ()) if not _RECORDER_TALK.search(line)]


# What a program's own watchdog or handler says as it ends a rank that waited for others, or lost one.
_OF_OTHERS = re.compile(
    r"tim(?:ed?[ _-]?out|eout)|watchdog|no progress|\bhang|\bhung\b|stall|stuck|heartbeat|\bpeers?\b|\bnccl\b|unreachable"
    r"|\b(?:others?|some|any|another|remote) (?:rank|worker|process|host|node)|(?:lost|closed|reset|broken) connection"
    r"|connection\b.{0,40}(?:lost|closed|reset|broken|refused)",
    re.IGNORECASE,
)
_RANK = re.compile(r"\brank[ _=:#]{0,2}(\d{1,6})\b", re.IGNORECASE)
LAST_LINES = 3


def tells_of_others(line: str) -> bool:
    """Whether a line tells of a hang, of a lost connection or of other ranks."""
    return _OF_OTHERS.search(line) is not None


def speaks_of_others(record: RankRecord) -> bool:
    """Whether a rank's last lines tell of a hang, a lost connection or another rank: it may have ended for that."""
    log = record.log
    lines = (*log.tail[-LAST_LINES:], log.error_end or "") if log is not None else ()
    named = {int(rank) for line in lines for rank in _RANK.findall(line)}
    return bool(named - {record.rank}) or any(map(tells_of_others, lines))


def last_words(record: RankRecord) -> tuple[Evidence, ...]:
    """The last line that the program itself logged."""
    lines = own_lines(record)
    if not lines or record.log is None:
        return ()
    return (
        Evidence(
            text=f"the program's last log line: {lines[-1].strip()[:160]}", rank=record.rank, source=record.log.source
        ),
    )


_SHARE = re.compile(r"\b0{0,8}(\d{1,9}) ?(?:/|-?of-?) ?0{0,8}(\d{1,9})\b")
LEAST_COUNTED = 3  # lines


def counts_up(lines: Sequence[str]) -> bool:
    """Whether the last lines count up to a number that they have not come to: who wrote them was at work, not stuck.

    >>> counts_up(["eval batch 0/18", "eval batch 4/18", "eval batch 8/18"]), counts_up(["try 1/3", "try 2/3", "try 3/3"])
    (True, False)
    """
    found = [match for line in lines[-LEAST_COUNTED:] for match in [*_SHARE.finditer(line)][:1]]
    counts, ends = [int(match[1]) for match in found], {match[2] for match in found}
    is_up = all(before < after for before, after in pairwise(counts))
    return len(found) == LEAST_COUNTED and is_up and len(ends) == 1 and counts[-1] < int(ends.pop())
