"""Parse logs: fatal errors, errors that are only symptoms, watchdog lines, exit codes, the last lines.

A rank that logs "connection closed by peer" or "timed out" is a witness, not a suspect.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import Exit, Frame, Launcher, LogEvent, RankLog

TAIL_LINES = 40
MAX_EVENTS = 400
MAX_LINE = 2_000

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)")
_PREFIX = re.compile(r"^\s*\[(?:rank|default)(\d{1,6})\]:\s?")
_SLURM = re.compile(r"^\s*(\d{1,6}): ")
_STEP = re.compile(r"\bstep[ =:#-]{0,3}(\d{1,9})\b", re.IGNORECASE)
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d{1,9}), in (.+)$')
_RAISED = re.compile(
    r"^((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Failure|EnforceNotMet))(?::\s*(.*))?$"
)
_LOGGED = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b.*?\b([A-Z]\w*(?:Error|Exception)): ?(.*)$")
_FATAL = re.compile(r"Fatal Python error: (.+)$")
_OOM = re.compile(r"OutOfMemoryError|out of memory|oom-kill|Out Of Memory|MemoryError\b|std::bad_alloc", re.IGNORECASE)
_CLOSED = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited|ncclRemoteError"
    r"|remote worker crash|Connection refused|recvValue failed|Failed to recv"
)
_TIMEOUT = re.compile(
    r"Timed out waiting|wait timeout after|Watchdog caught|timed out after \d+ ?ms|Socket Timeout|timeout.*collective"
)
_MISMATCH = re.compile(
    r"op\.preamble\.length <= op\.nbytes|data size doesn't match expected size|message truncated", re.IGNORECASE
)
_ARGUMENT = re.compile(r"enforce fail at \S*gloo/gloo/\w+\.cc")  # gloo's check of the caller's own arguments
_COMM = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError|gloo/|NCCL (?:error|communicator|operation)|ProcessGroup(?:Gloo|NCCL)"
    r"|c10d|NCCLUtils"
)
_STORE_KEY = re.compile(r"wait timeout after \d+ms, keys: (\S+)")
_KEY_RANK = re.compile(r"(?:^|/)(\d{1,6})$")
_WATCHDOG = re.compile(
    r"(?:\[PG (?:ID \S+ )?(?:PG )?(?:GUID )?(?P<group>[^\]]*?) Rank (?P<rank>\d+)\])?"
    r".*Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+), NumelIn=(?P<numel_in>\d+), NumelOut=(?P<numel_out>\d+)"
    r"(?:, Timeout\(ms\)=(?P<timeout>\d+))?"
)
_LAST_WORK = re.compile(
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
_SIGTERM = re.compile(r"SIGTERM|signal 15\b", re.IGNORECASE)


@dataclass(slots=True)
class _Stream:
    """One rank's lines of one file, while they are read."""

    rank: int
    source: str
    events: list[LogEvent] = field(default_factory=list)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    number: int = 0
    time_s: float | None = None
    last_step: int | None = None
    last_step_line: int = 0
    step_times: dict[int, float] = field(default_factory=dict)
    frames: list[Frame] | None = None
    thread: str = ""


def parse_rank_log(text: str, source: str, rank: int, *, since_s: float | None = None) -> RankLog:
    """The log of one rank, from `since_s` on (by the log's own clock) if its lines have times."""
    stream = _Stream(rank=rank, source=source)
    lines = text.splitlines()
    first = _first_line_since(lines, since_s) if since_s is not None else 0
    for number, line in enumerate(lines[first:], first + 1):
        line = line[:MAX_LINE]
        match = _PREFIX.match(line)
        _take(stream, number, line[match.end() :] if match else line)
    return _finish(stream)


def _first_line_since(lines: Sequence[str], since_s: float) -> int:
    """Where a log that was appended to, restart after restart, reaches the run in question."""
    has_times = False
    for number, line in enumerate(lines):
        match = _TIME.search(line[:MAX_LINE])
        time_s = _seconds(*match.groups()) if match else None
        has_times |= time_s is not None
        if time_s is not None and time_s >= since_s:
            return number
    return len(lines) if has_times else 0


def parse_mixed_log(text: str, source: str) -> dict[int, RankLog]:
    """The logs of all ranks in one file whose lines start with `[rank3]:`, `[default3]:` or srun's `3: `."""
    streams: dict[int, _Stream] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line[:MAX_LINE]
        match = _PREFIX.match(line) or _SLURM.match(line)
        if match:
            rank = int(match.group(1))
            stream = streams.setdefault(rank, _Stream(rank=rank, source=source))
            _take(stream, number, line[match.end() :])
    return {rank: _finish(stream) for rank, stream in streams.items()}


def merge_logs(logs: Iterable[RankLog]) -> RankLog | None:
    """One log of several files of the same rank (stdout and stderr, or restarts); the newest one gives its end."""
    known = sorted(logs, key=lambda log: (log.last_time_s or 0.0, bool(log.events), len(log.tail)))
    if not known:
        return None
    last = known[-1]
    steps = [log.last_step for log in known if log.last_step is not None]
    times: dict[int, float] = {}
    for log in known:
        times.update(log.step_times)
    events = sorted((event for log in known for event in log.events), key=lambda event: event.time_s or 0.0)
    return RankLog(
        source=last.source,
        events=tuple(events[:MAX_EVENTS]),
        tail=last.tail,
        tail_line=last.tail_line,
        last_step=max(steps, default=None),
        last_step_line=max((log.last_step_line for log in known if log.source == last.source), default=0),
        last_time_s=last.last_time_s,
        step_times=times,
    )


def _finish(stream: _Stream) -> RankLog:
    return RankLog(
        source=stream.source,
        events=tuple(stream.events[:MAX_EVENTS]),
        tail=tuple(stream.tail),
        tail_line=stream.number,
        last_step=stream.last_step,
        last_step_line=stream.last_step_line,
        last_time_s=stream.time_s,
        step_times=stream.step_times,
    )


def _take(stream: _Stream, number: int, line: str) -> None:
    """Account for one line, its rank prefix removed."""
    if not line.strip():
        return
    stream.number = number
    stream.tail.append(line)
    if match := _TIME.search(line):
        stream.time_s = _seconds(*match.groups()) or stream.time_s
        if step := _STEP.search(line):
            stream.last_step, stream.last_step_line = int(step.group(1)), number
            if stream.time_s is not None and len(stream.step_times) < 100_000:
                stream.step_times.setdefault(stream.last_step, stream.time_s)
    if line.startswith("Exception in thread "):
        stream.thread = line.removeprefix("Exception in thread ").rstrip(":\n ")[:100]
    elif line.startswith("Traceback (most recent call last)"):
        stream.frames = []
    elif stream.frames is not None and (frame := _FRAME.match(line)):
        if len(stream.frames) < 200:
            stream.frames.append(Frame(file=frame.group(1), line=int(frame.group(2)), function=frame.group(3)))
    elif len(stream.events) < MAX_EVENTS:
        _events_of(stream, number, line)


def _events_of(stream: _Stream, number: int, line: str) -> None:
    raised = _RAISED.match(line) if stream.frames is not None else None
    logged = None if raised else _LOGGED.search(line)
    values: dict[str, str] = {}
    kind: EventKind | None = None
    if (match := _WATCHDOG.search(line)) or (match := _LAST_WORK.search(line)):
        kind, values = EventKind.WATCHDOG, {key: value for key, value in match.groupdict().items() if value}
    elif match := _STORE_KEY.search(line):
        kind, values = EventKind.STORE_WAIT, {"key": match.group(1), **_awaited(match.group(1))}
    elif match := _FATAL.search(line):
        kind, values = EventKind.FATAL_SIGNAL, {"error": match.group(1)}
    elif _MISMATCH.search(line):
        kind = EventKind.COMM_MISMATCH
    elif raised or logged:
        found = raised or logged
        assert found is not None
        kind, values = (
            kind_of_error(line),
            {"type": found.group(1), "message": found.group(2) or ""},
        )
    elif _OOM.search(line):
        kind = EventKind.OOM
    elif _SIGTERM.search(line):
        kind = EventKind.SIGTERM
    if kind and raised and (call := _torch_call(stream.frames or [])):
        values["call"] = call
    elif kind and raised and (below := _below_torch(stream.frames or [])):
        values["below"] = below
    if kind and raised and stream.thread:
        values["thread"], stream.thread = stream.thread, ""
    if kind:
        frame = user_frame(reversed(stream.frames)) if raised and stream.frames else None
        stream.events.append(
            LogEvent(
                kind=kind,
                rank=stream.rank,
                text=line.strip()[:400],
                source=stream.source,
                line=number,
                time_s=stream.time_s,
                frame=frame,
                values=values,
            )
        )
    if raised or (stream.frames and not line.startswith(" ")):
        stream.frames = None


def _torch_call(frames: Sequence[Frame]) -> str:
    """The torch.distributed function that a traceback (innermost call last) went through."""
    calls = (f.function for f in reversed(frames) if f.file.endswith("distributed_c10d.py") and f.function != "wrapper")
    return next(calls, "")


def _below_torch(frames: Sequence[Frame]) -> str:
    """The pass of the training step whose C++ raised: "backward" or "forward"; "" if it was another part of the program."""
    inner = frames[-1].file if frames else ""
    names = [f.function for f in reversed(frames)]
    if "/torch/" not in inner:
        return ""
    return next((name for name in names if name in ("backward", "forward")), "")


def kind_of_error(line: str) -> EventKind:
    """Classify an error: the program's own, or the symptom of a peer's trouble."""
    if _MISMATCH.search(line):
        return EventKind.COMM_MISMATCH
    if _ARGUMENT.search(line):
        return EventKind.EXCEPTION
    if _OOM.search(line):
        return EventKind.OOM
    if _CLOSED.search(line):
        return EventKind.COMM_CLOSED
    if _TIMEOUT.search(line):
        return EventKind.COMM_TIMEOUT
    return EventKind.COMM_ERROR if _COMM.search(line) else EventKind.EXCEPTION


def _awaited(key: str) -> dict[str, str]:
    match = _KEY_RANK.search(key)
    return {"rank": match.group(1)} if match else {}


def _seconds(date: str, clock: str) -> float | None:
    try:
        moment = datetime.fromisoformat(f"{date}T{clock.replace(',', '.')}")
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC).timestamp()


# ---------------------------------------------------------------------------------------------------- launchers

_BLOCK_RANK = re.compile(r"^\s*rank\s+: (\d+) \(local_rank: (\d+)\)")
_BLOCK_EXIT = re.compile(r"^\s*exitcode\s+: (-?\d+) \(pid: (\d+)\)")
_BLOCK_TIME = re.compile(r"^\s*time\s+: (\d{4}-\d\d-\d\d)_(\d\d:\d\d:\d\d)")
_TOLD = re.compile(r"Sending process (\d+) closing signal SIG(?:TERM|INT)")
_RC = re.compile(r"^\s*(?:rc|exit(?:[ _-]?code| status)?)\s*[=:]\s*(-?\d+)\s*$", re.IGNORECASE)
_ELASTIC = re.compile(r"torch/distributed/elastic|ChildFailedError|first observed failure")


def looks_like_launcher(text: str) -> bool:
    """Whether torchrun (its elastic agent) wrote this."""
    return bool(_ELASTIC.search(text[:200_000]))


def parse_launcher(text: str, source: str) -> tuple[Launcher, list[Exit]]:
    """Exit codes by rank. A rank that the agent stopped (SIGTERM) did not end by itself."""
    told = {int(pid) for pid in _TOLD.findall(text)}
    codes = [int(match.group(1)) for line in text.splitlines()[-5:] if (match := _RC.match(line[:200]))]
    exits = list(_exits(text, source, told))
    first = next((exit_.rank for exit_ in exits if exit_.is_first), None)
    return Launcher(source=source, code=codes[-1] if codes else (1 if exits else None), first_rank=first), exits


def _exits(text: str, source: str, told: set[int]) -> Iterator[Exit]:
    rank: int | None = None
    time_s: float | None = None
    is_first = False
    for number, line in enumerate(text.splitlines(), 1):
        line = line[:500]
        if "first observed failure" in line:
            is_first = True
        elif match := _BLOCK_TIME.match(line):
            time_s = _seconds(*match.groups())
        elif match := _BLOCK_RANK.match(line):
            rank = int(match.group(1)[:9])
        elif (match := _BLOCK_EXIT.match(line)) and rank is not None:
            code, pid = int(match.group(1)[:9]), int(match.group(2)[:12])
            yield Exit(
                rank=rank,
                code=code,
                source=source,
                line=number,
                pid=pid,
                time_s=time_s,
                was_told=pid in told,
                is_first=is_first,
            )
            rank = None


def group_by_rank(exits: Iterable[Exit]) -> dict[int, Exit]:
    """The last exit of each rank."""
    by_rank: defaultdict[int, list[Exit]] = defaultdict(list)
    for exit_ in exits:
        by_rank[exit_.rank].append(exit_)
    return {rank: found[-1] for rank, found in by_rank.items()}
