"""What `ncclras` prints of a job: ranks that are behind, that failed or that do not answer, and each rank's host and process.

Formats: NCCL 2.24 and later, src/ras/client_support.cc (`rasClientRunComms`: text, `jsonWriteRankData` and
`jsonWriteMissingRank`: `-f json`) and the user guide's page on RAS. A rank that is missing but did answer has left the
communicator. Ranks count within a communicator, so they are the job's in its largest communicator only. Operation counts are of
launches: one report alone does not show that a job stands still.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import MAX_RANK
from titan_ckpt.debug.read.text.job_text import JobText
from titan_ckpt.debug.read.text.schedulers.process_ends import Note
from titan_ckpt.parsing.json_values import JsonValue

MOST_NAMED = 4000
_ERRORS = {
    1: "Unhandled CUDA error", 2: "System error", 3: "Internal error", 4: "Invalid argument", 5: "Invalid usage",
    6: "Remote process error",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A rank of a communicator, where it runs, and what a line says of it."""

    rank: int
    host: str = ""
    pid: int = 0
    line: int = 0
    is_aborted: bool = False


def is_ras_text(head: bytes) -> bool:
    """Whether a text begins as `ncclras` prints it."""
    return b"Communicators..." in head and (b"Job summary\n==" in head or b"\nCUDA runtime version " in head)


def is_ras_json(document: JsonValue) -> bool:
    """Whether a JSON document is `ncclras -f json`."""
    return document.find("communicators") is not None and document.find("nccl_version") is not None


# ------------------------------------------------------------------------------------------------------------- JSON


def read_ras_json(document: JsonValue, source: str) -> JobText:
    """The largest communicator of a report. DamagedError for values of wrong types."""
    text = JobText(source=source, scope=source)
    communicators = list(document["communicators"].entries())
    if communicators:
        largest = max(communicators, key=lambda entry: entry["size"].whole(0, MAX_RANK))
        text.num_ranks = largest["size"].whole(0, MAX_RANK)
        _take_communicator(text, largest)
    at = document.find("timestamp")
    _date(text, at.text(40) if at is not None else "")
    return text


def _take_communicator(text: JobText, entry: JsonValue) -> None:
    counts: dict[int, Mapping[str, int]] = {}
    processes: dict[int, _Process] = {}
    for rank in entry["ranks"].entries():
        process = processes[rank["rank"].whole(0, MAX_RANK)] = _process(rank)
        counts[process.rank] = {name: value.whole() for name, value in rank["collective_counts"].items()}
        error = rank["status"]["async_error"].whole() or rank["status"]["init_state"].whole()
        if error in _ERRORS:
            what = f"NCCL RAS: rank {process.rank} reported {_ERRORS[error]}"
            _note(text, EventKind.COMM_ERROR, what, [process], pid=str(process.pid))
    for name in sorted({name for found in counts.values() for name in found}):
        _compare(text, name, {rank: found.get(name, 0) for rank, found in counts.items()}, processes)
    missing = [
        (_process(rank), _is(rank, "unresponsive"), _is(rank, "considered_dead"))
        for rank in entry["missing_ranks"].entries()
    ]
    dead = [process for process, _, is_dead in missing if is_dead]
    silent = [process for process, is_silent, is_dead in missing if is_silent and not is_dead]
    left = [process for process, is_silent, is_dead in missing if not is_silent and not is_dead]
    if dead:
        _note(text, EventKind.UNREACHABLE, f"NCCL RAS: considered dead: {_ranks(dead)}", dead, is_dead="1")
    if silent:
        _note(text, EventKind.UNREACHABLE, f"NCCL RAS: no answer from {_ranks(silent)}", silent)
    aborted = [process for process in processes.values() if process.is_aborted]
    for what, found in (("left the communicator", left), ("aborted the communicator", aborted)):
        if 0 < len(found) < len(processes) + len(missing):
            _note(text, EventKind.DESYNC, f"NCCL RAS: {_ranks(found)} {what}, the others have not", found)
    _know(text, [*processes.values(), *(process for process, _, _ in missing)])


def _is(rank: JsonValue, name: str) -> bool:
    return rank["status"][name].flag()


def _process(rank: JsonValue) -> _Process:
    """A rank's process; the host is "unknown" and the pid -1 where RAS lost it."""
    host, pid = rank["host"].text(200), rank["pid"].whole(-1)
    aborted = rank["status"].find("abort_flag")
    return _Process(
        rank=rank["rank"].whole(0, MAX_RANK), host="" if host == "unknown" else host, pid=max(pid, 0),
        is_aborted=aborted is not None and aborted.flag(),
    )  # fmt: skip


def _compare(text: JobText, name: str, launched: Mapping[int, int], processes: Mapping[int, _Process]) -> None:
    """Note the ranks that launched fewer operations of a kind than the one that launched most."""
    most = max(launched.values())
    behind = [processes[rank] for rank, count in launched.items() if count < most]
    if behind:
        least = min(launched.values())
        what = f"NCCL RAS: {name}: {_ranks(behind)} launched {least} or more, the others {most}"
        _note(text, EventKind.DESYNC, what, behind, counts=f"{name}:{least}<{most}")


# ------------------------------------------------------------------------------------------------------------- text

_HEADING = re.compile(r"#\d{1,9}-\d{1,9} \([0-9a-f]{1,16}\) (?P<what>INCOMPLETE|ERROR|MISMATCH)")
_PROCESS = r"GPU \S{1,40}(?: \(NVML \d{1,4}\))? managed by process (?P<pid>\d{1,9}) on node (?P<host>\S{1,200})"
_RANK = re.compile(rf"  Rank (?P<rank>\d{{1,6}})(?P<said> .{{1,200}}?)? -- (?:{_PROCESS}|\[process information)")
_LAUNCHED = re.compile(r"(?:(?:launched up to operation|status) (?P<count>\w+)|have not launched)")
_DEAD = re.compile(r"  Process (?P<pid>\d{1,9}) on node (?P<host>\S{1,200}) managing GPU")
_SIZE = re.compile(r" {1,6}\d{1,6} {2,}\d{1,8} {2,}\d{1,8} {2,}[\d-]{1,12} {2,}(?P<size>\d{1,8}) {2,}\d{1,8} {2,}[A-Z]")


@dataclass(slots=True)
class _Section:
    """The lines of one communicator's trouble, while they are read. `count` is what the last heading of ranks gave."""

    what: str = ""
    reason: str = ""
    count: int = 0
    most: int = 0
    status: str = ""
    found: list[tuple[int, _Process, str]] = field(default_factory=list)


def read_ras_text(data: str, source: str, at: str) -> JobText:
    """All troubles that a report lists for the first of its largest communicators, `#0-0`, and for processes. `at` is when it was
    written, as the report does not say."""
    text = JobText(source=source, scope=source)
    section = _Section()
    known: list[_Process] = []
    for number, line in enumerate(data.splitlines(), 1):
        if (match := _SIZE.match(line)) and not text.num_ranks:
            text.num_ranks = min(int(match["size"]), MAX_RANK)
        elif match := _HEADING.match(line):
            _finish(text, section)
            section = _Section(what=match["what"] if line.startswith("#0-0 ") else "")
        elif line.strip() in ("DEAD", "INCOMPLETE", "Errors", "Warnings", "TIMEOUT"):
            _finish(text, section)
            section = _Section()
        elif section.what and (match := _RANK.match(line)):
            process = _Process(
                rank=int(match["rank"]), host=match["host"] or "", pid=int(match["pid"] or 0), line=number
            )
            known.append(process)
            _take_rank(section, process, match["said"] or "")
        elif match := _DEAD.match(line):
            values = {"host": match["host"], "pid": match["pid"]}
            text.endings.notes.append(
                Note(kind=EventKind.UNREACHABLE, text=f"NCCL RAS: {line.strip()}", line=number, values=values)
            )
        elif section.what and line.startswith("  Communicator ranks have different "):
            _finish(text, section)
            section = _Section(what=section.what, reason=line.strip())
        elif section.what and line.startswith("  "):
            _take_count(section, line)
    _finish(text, section)
    _know(text, known)
    _date(text, at)
    return text


def _take_count(section: _Section, line: str) -> None:
    section.reason = section.reason or line.strip()
    if match := _LAUNCHED.search(line):
        _set_count(section, match)


def _set_count(section: _Section, match: re.Match[str]) -> None:
    """What the ranks of the following lines, or of this one, launched, or which status they have."""
    count = match["count"] or "0"
    section.status = "" if count.isdigit() else f"has status {count}"
    section.count = int(count) if count.isdigit() else 0
    section.most = max(section.most, section.count)


def _take_rank(section: _Section, process: _Process, said: str) -> None:
    if match := _LAUNCHED.search(said):
        _set_count(section, match)
    section.found.append((section.count, process, section.status or said.strip()))


def _finish(text: JobText, section: _Section) -> None:
    if not section.found:
        return
    if section.what == "MISMATCH" and section.reason.endswith(" status"):
        for status in sorted({status for _, _, status in section.found}):
            alike = [process for _, process, said in section.found if said == status]
            _note(text, EventKind.DESYNC, f"NCCL RAS: {section.reason}: {_ranks(alike)} {status}", alike)
    elif section.what == "MISMATCH":
        behind = [process for count, process, _ in section.found if count < section.most]
        if behind:
            what = f"NCCL RAS: {section.reason}; behind: {_ranks(behind)}"
            _note(text, EventKind.DESYNC, what, behind, counts=f"{section.reason}:<{section.most}")
    elif section.what == "INCOMPLETE":
        lost = [process for _, process, _ in section.found]
        _note(text, EventKind.UNREACHABLE, f"NCCL RAS: no answer from {_ranks(lost)}", lost)
    else:
        for _, process, said in section.found:
            what = f"NCCL RAS: rank {process.rank} {said or section.reason}"
            _note(text, EventKind.COMM_ERROR, what, [process], pid=str(process.pid))


# -------------------------------------------------------------------------------------------------------- both


def _know(text: JobText, processes: Sequence[_Process]) -> None:
    """Note where ranks run."""
    for process in processes:
        if process.host and process.pid and process.rank <= MAX_RANK:
            text.hosts.setdefault(process.rank, process.host)
            text.links.setdefault(("pid", process.host, process.pid), process.rank)


def _date(text: JobText, at: str) -> None:
    """Note when a report was made: equal counts in two of them show that ranks stand still."""
    text.endings.notes[:] = [replace(note, values={**note.values, "at": at}) for note in text.endings.notes]


def _note(text: JobText, kind: EventKind, what: str, processes: Sequence[_Process], **values: str) -> None:
    names = ",".join(str(process.rank) for process in processes[:MOST_NAMED])
    text.endings.notes.append(
        Note(kind=kind, text=what[:400], line=processes[0].line, values={"names": names, **values})
    )


def _ranks(processes: Sequence[_Process]) -> str:
    return "ranks " * (len(processes) > 1) + "rank " * (len(processes) == 1) + ", ".join(_shown(processes))


def _shown(processes: Sequence[_Process]) -> Iterator[str]:
    for process in processes[:8]:
        where = f" (pid {process.pid} on {process.host})" if process.pid else ""
        yield f"{process.rank}{where}"
    if len(processes) > 8:
        yield f"{len(processes) - 8} more"
