"""All logs of a run together: which writer is which rank, what each rank logged, and how processes ended.

A rank that logs "connection closed by peer" or "timed out" is a witness, not a suspect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from signal import Signals

from titan_ckpt.debug.incident.contradictions import is_last_word, rank_list
from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import MAX_RANK, Exit, Launcher, LogEvent, RankLog
from titan_ckpt.debug.read.log_names.owners import Owners
from titan_ckpt.debug.read.log_names.pids import note_hosts
from titan_ckpt.debug.read.text.job_text import JobText
from titan_ckpt.debug.read.text.schedulers.host_lists import expanded
from titan_ckpt.debug.read.text.schedulers.process_ends import Ending, Note
from titan_ckpt.debug.read.text.several_files import merge_logs, with_error_end
from titan_ckpt.debug.read.text.streams import Stream, merged_log, values_of

UNCAUGHT = 1  # Python's exit code after an uncaught exception
MOST_NAMED = 65_536  # a larger number in a text is damage


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLogs:
    """What all text files of a run said. `job` holds what no rank is known to have written."""

    ranks: Mapping[int, Sequence[RankLog]]
    job: RankLog | None
    exits: Sequence[Exit]
    launcher: Launcher | None
    hosts: Mapping[int, str]
    pids: Mapping[int, int]
    crashes: Sequence[tuple[int, str, str]]  # rank, source, text: stacks that the fault handler wrote into a log
    num_ranks: int  # as many as texts name


def combine(texts: Sequence[JobText], known: Iterable[tuple[int, int, str]] = ()) -> JobLogs:
    """Resolve the writers of all files at once: a pid named in one file may be a rank in another. `known`: pid, rank and host."""
    note_hosts(texts)
    who = Owners(texts, known)
    ranks: defaultdict[int, list[RankLog]] = defaultdict(list)
    job: list[RankLog] = []
    exits: list[Exit] = []
    for text in texts:
        by_rank: defaultdict[int, list[Stream]] = defaultdict(list)
        for writer, stream in text.writers.items():
            by_rank[who.owner(writer, stream)].append(stream)
        ended = _exits(text, who, texts)
        exits += ended
        for rank in _unheard(text, by_rank, ended):
            by_rank[rank] = [Stream(source=text.source, rank=rank)]
        for rank, streams in by_rank.items():
            if rank >= 0:
                log = merged_log(streams, rank)
                ranks[rank].append(with_error_end(log, is_console=text.endings.is_elastic))
            else:
                job.append(merged_log(streams, -1))
        _take_notes(text, who, ranks, job)
        _take_unplaced(text, who, job)
    pids = {rank: pid for pid, rank in who.spawned.items()}
    pids.update({ended.rank: ended.pid for ended in exits if ended.pid is not None})
    for rank, pid in pids.items():
        who.pids.add(pid, rank)
    links = (link for text in texts for link in text.links.items())
    pids.update({rank: writer[2] for writer, rank in links if writer[0] == "pid" and rank <= MAX_RANK})
    stacks = [
        (who.rank(writer), text.source, stream.crash)
        for text in texts
        for writer, stream in text.writers.items()
        if stream.crash.lines or stream.crash.outlived
    ]
    crashes = [
        (rank, source, "\n".join(crash.lines))
        for rank, source, crash in stacks
        if crash.lines and not any(of == rank and crash.is_outlived_by(other) for of, _, other in stacks)
    ]
    logs = JobLogs(
        ranks=ranks, job=merge_logs(job), exits=exits, launcher=_launcher(texts, exits), hosts=who.hosts, pids=pids,
        crashes=crashes, num_ranks=_num_ranks([*chain.from_iterable(ranks.values()), *job]),
    )  # fmt: skip
    return _with_meant_ranks(who, _with_abort(logs))


def _with_abort(logs: JobLogs) -> JobLogs:
    """What `terminate` said, by a process that is not named, is the one rank's that it aborted, where no other rank failed."""
    failed = [ended for ended in logs.exits if ended.code and not ended.was_told]
    if len(failed) != 1 or failed[0].code != -int(Signals.SIGABRT) or logs.job is None or failed[0].rank in logs.ranks:
        return logs
    words = [event for event in logs.job.events if event.source == failed[0].source and "what():" in event.text]
    own = [event for event in words if not event.kind.is_communication]
    log = RankLog(source=failed[0].source, events=tuple(replace(event, rank=failed[0].rank) for event in own))
    return replace(logs, ranks={**logs.ranks, failed[0].rank: [log]}) if own else logs


_NAMING = (EventKind.COMM_TIMEOUT, EventKind.COMM_MISMATCH, EventKind.DESYNC)


def _num_ranks(logs: Sequence[RankLog]) -> int:
    """How many ranks there are at least, by texts that name them or say how many are expected."""
    numbers = [0]
    for event in (event for log in logs for event in log.events):
        if event.kind in _NAMING:
            numbers += [int(name) + 1 for name in event.values.get("names", "").split(",") if name.isdigit()]
        numbers.append(int(event.values.get("expected", "0")))
    return max(number for number in numbers if number <= MOST_NAMED)


# --------------------------------------------------------------------------------------------------------- endings


def _lost_hosts(texts: Sequence[JobText]) -> set[str]:
    """The hosts that a scheduler says are lost."""
    notes = (note for text in texts for note in text.endings.notes if note.kind == EventKind.NODE_LOST)
    return {host for note in notes for host in expanded(note.values.get("host", ""))}


# How srun ends the other tasks.
_KILLED = (-int(Signals.SIGKILL), 128 + int(Signals.SIGKILL), 128 + int(Signals.SIGTERM))


def _exits(text: JobText, who: Owners, texts: Sequence[JobText]) -> list[Exit]:
    """The exits that a file tells of, one a rank: a table's (which has the time) rather than a line's. `texts`: all files."""
    told = text.endings.told
    lost = _lost_hosts(texts)
    found: dict[int, Exit] = {}
    if text.endings.code is not None and text.default[0] in ("rank", "local") and not _goes_on(text):
        rank = who.rank(text.default)
        found[rank] = Exit(rank=rank, code=text.endings.code, source=text.source, line=text.endings.over_line)
    for ending in text.endings.found:
        rank = who.of_ending(text, ending)
        if not 0 <= rank <= MAX_RANK:
            continue
        known = found.get(rank)
        if known is None or known.time_s is None:
            is_ended_for_node = bool(lost) and ending.host not in lost and ending.code in _KILLED
            is_stopped = ending.pid in told or (ending.is_task and (ending.code == -15 or is_ended_for_node))
            found[rank] = Exit(
                rank=rank, code=ending.code, source=text.source, line=ending.line, pid=ending.pid, time_s=ending.time_s,
                was_told=is_stopped, is_first=ending.is_first,
            )  # fmt: skip
    return [*found.values(), *_stopped(text, who, found, _last_of_folder(texts, who))]


MOST_LEFT = 1024


def _last_of_folder(texts: Sequence[JobText], who: Owners) -> int:
    """The highest rank that has a folder of logs, where one torchrun of one host made all of these; -1 elsewhere."""
    made = {text.default for text in texts if text.default[0] == "local"}
    launchers = [text for text in texts if text.endings.is_elastic]
    is_one = len(launchers) == 1 and len({place for _, place, _ in made}) == 1
    return max(map(who.rank, made)) if is_one else -1


def _stopped(text: JobText, who: Owners, found: Mapping[int, Exit], last: int) -> list[Exit]:
    """Ranks that torchrun's table of failures does not list: those it stopped, if as many are left over, or that ended well.
    `last`: the highest rank that it started, where that is known; its table, which has times, lists all of these that failed."""
    listed = {ended.pid for ended in found.values()}
    pids = sorted(pid for pid in text.endings.told if pid not in listed)
    if not found:
        return []
    first = min(who.rank(("local", f"{text.scope}|", 0)), min(found))
    if not pids and text.endings.has_failed:  # torchrun stops all that still run: who is between others had ended well
        is_table = all(ended.time_s is not None for ended in found.values())
        ended_well = [rank for rank in range(first, max(max(found), last + 1 if is_table else 0)) if rank not in found]
        return [Exit(rank=rank, code=0, source=text.source) for rank in ended_well[:MOST_LEFT]]
    left = [rank for rank in range(first, first + len(found) + len(pids)) if rank not in found]
    if len(left) != len(pids):
        return []
    return [
        Exit(rank=rank, code=_last_word(text.endings.told[pid]), source=text.source, pid=pid, was_told=True)
        for rank, pid in zip(left, pids, strict=True)
    ]


def _last_word(told: Sequence[int]) -> int:
    """The signal that ended a process which got several: SIGKILL if it was among them, else the first; the others came to a
    process that was ending already."""
    return -int(Signals.SIGKILL) if -int(Signals.SIGKILL) in told else told[0]


def _unheard(text: JobText, by_rank: Mapping[int, Sequence[Stream]], exits: Sequence[Exit]) -> list[int]:
    """Ranks of a console that logged nothing of their own in it, though others did: their logs are empty, not missing. Without a
    table of ends, those between others, if the launcher could not stop as many processes as these are."""
    is_console = text.endings.is_elastic and any(rank >= 0 for rank in by_rank)
    if exits or not is_console:
        return [ended.rank for ended in exits if ended.rank not in by_rank] if is_console else []
    between = [rank for rank in range(min(max(by_rank), MOST_LEFT)) if rank not in by_rank]
    return between if len(between) == len(text.endings.unmoved) == len(text.endings.told) else []


def _take_notes(text: JobText, who: Owners, ranks: defaultdict[int, list[RankLog]], job: list[RankLog]) -> None:
    """What was said of processes and hosts, as events of the ranks that are meant, else of the job."""
    for note in text.endings.notes:
        pid = note.values.get("pid", "")
        host = note.values.get("host", "")
        meant = [who.pids.rank(int(pid), host)] if pid else who.of_hosts(host)
        if "rank" in note.values:
            meant = [int(note.values["rank"])]
        elif "task" in note.values:
            meant = who.of_task(int(note.values["task"]))
        elif not pid and note.values.get("signal") and note.line in text.shells:
            meant = [who.rank(text.shells[note.line])]
        event = _note_event(text, note)
        for rank in [rank for rank in meant if 0 <= rank <= MAX_RANK]:
            ranks[rank].append(RankLog(source=text.source, events=(replace(event, rank=rank),)))
        if not any(rank >= 0 for rank in meant):
            job.append(RankLog(source=text.source, events=(event,)))


def _take_unplaced(text: JobText, who: Owners, job: list[RankLog]) -> None:
    """Ends of processes of which nothing says which ranks they were."""
    for ending in text.endings.found:
        if ending.code in (0, -int(Signals.SIGTERM)) or 0 <= who.of_ending(text, ending) <= MAX_RANK:
            continue
        ranks = who.tasks.ranks.get(ending.rank, ()) if ending.is_task and ending.rank is not None else ()
        values = {"host": ending.host, "names": ",".join(map(str, ranks))}
        event = LogEvent(
            kind=EventKind.EXITED, rank=-1, text=f"exit code {ending.code}: {_unplaced(ending, ranks)}", source=text.source,
            line=ending.line, values={name: value for name, value in values.items() if value},
        )  # fmt: skip
        job.append(RankLog(source=text.source, events=(event,)))


def _unplaced(ending: Ending, ranks: Sequence[int]) -> str:
    """What is known of a process that ended."""
    task = ending.rank if ending.is_task else None
    parts = (("task", task), ("local rank", ending.local_rank), ("pid", ending.pid), ("on", ending.host))
    where = " ".join(f"{name} {value}" for name, value in parts if value not in (None, "")) or "a process"
    if ranks:
        return f"{where}, which holds {rank_list(ranks)}"
    return f"{where}; nothing shows whether a task is a rank or a launcher of several" if task is not None else where


def _note_event(text: JobText, note: Note) -> LogEvent:
    return LogEvent(kind=note.kind, rank=-1, text=note.text, source=text.source, line=note.line, values=note.values)


def _launcher(texts: Sequence[JobText], exits: Sequence[Exit]) -> Launcher | None:
    """How the job's launcher ended, from the last file that shows it, else from the last that calls a part of the job good."""
    of_files = {text.source: [ended for ended in exits if ended.source == text.source] for text in texts}
    own = [
        text for text in texts if text.default[0] not in ("rank", "local") or text.endings.is_elastic
    ]  # no rank's own end
    shown = [text for text in own if _is_launchers(text, of_files[text.source])]
    text = next(reversed(shown or [text for text in own if text.endings.is_called_good]), None)
    if text is None:
        return None
    of_file, endings = of_files[text.source], text.endings
    said = endings.code if endings.code is not None else 0 if endings.has_finished else None
    code = None if said is not None and _goes_on(text) else said
    if endings.code is None and of_file:
        code = 1
    return Launcher(
        source=text.source, code=code, first_rank=next((ended.rank for ended in of_file if ended.is_first), None),
        num_unmoved=len(endings.unmoved), is_shared=text.is_shared, is_torchrun=endings.is_torchrun or endings.is_elastic,
        has_finished=endings.has_finished and code == 0,
        is_called_good=endings.is_called_good and not code and not _goes_on(text),
    )  # fmt: skip


def _is_launchers(text: JobText, of_file: Sequence[Exit]) -> bool:
    """Whether a file is of a launcher, or tells how the job ended."""
    endings, name = text.endings, text.source
    is_named = "launcher" in name or "torchrun" in name
    return endings.is_elastic or (endings.is_torchrun and not of_file) or endings.code is not None or is_named


def _goes_on(text: JobText) -> bool:
    """Whether steps or errors follow what told of a good end: that of an earlier command in the same file."""
    over = text.endings.over_line
    streams = text.writers.values()
    return any(
        max([stream.last_step_line, *(event.line for event in (*stream.first, *stream.last))]) > over
        for stream in streams
    )


def _aborted_rank(logs: JobLogs) -> int:
    """The one rank that SIGABRT ended, -1 if there is none, or several: it wrote the C++ exception that nobody's name is on."""
    aborted = {ended.rank for ended in logs.exits if ended.code in (-int(Signals.SIGABRT), 128 + int(Signals.SIGABRT))}
    return aborted.pop() if len(aborted) == 1 else -1


def _raising_rank(logs: JobLogs) -> int:
    """The one rank that ended as Python does after an uncaught exception, and whose log shows no other error; -1 if there is
    none, or several, or if more than one error is nobody's."""
    raised = {ended.rank for ended in logs.exits if ended.code == UNCAUGHT and not ended.was_told}
    errors = [event for event in logs.job.events if _is_uncaught(logs.job, event)] if logs.job else []
    if len(raised) != 1 or len(errors) != 1:
        return -1
    rank = raised.pop()
    return -1 if any(log.events for log in logs.ranks.get(rank, ())) else rank


def _is_uncaught(job: RankLog, event: LogEvent) -> bool:
    """Whether it is an error of the program's own: a traceback, or after the last step a type alone, or a traceback that a log
    record announced: who logs an error and goes on makes further steps."""
    is_late = event.line > job.last_step_line
    is_own = event.kind in (EventKind.EXCEPTION, EventKind.OOM) and (event.frame is not None or is_late)
    is_shown = is_late or not {"alone", "announced"} & event.values.keys()
    return is_own and is_shown and "handled" not in event.values


def _with_meant_ranks(who: Owners, logs: JobLogs) -> JobLogs:
    """Events of the kernel and of drivers that name a process of a known rank, moved to that rank; so the text of an abort or
    of an uncaught exception, where only one rank ended so."""
    if logs.job is None:
        return logs
    aborted, raising = _aborted_rank(logs), _raising_rank(logs)
    ranks = {rank: list(found) for rank, found in logs.ranks.items()}
    kept = []
    for event in logs.job.events:
        pid = event.values.get("pid", "")
        rank = (
            who.pids.rank(int(pid), event.values.get("host", ""))
            if pid.isdigit() and "program" not in event.values
            else -1
        )
        if event.kind == EventKind.COMM_MISMATCH and is_last_word(event):
            rank = aborted
        elif _is_uncaught(logs.job, event):
            rank = raising
        if rank < 0:
            kept.append(event)
            continue
        moved = replace(event, rank=rank, values=values_of(event, pid=pid) if pid else event.values)
        ranks.setdefault(rank, []).append(RankLog(source=event.source, events=(moved,)))
    return replace(logs, ranks=ranks, job=replace(logs.job, events=tuple(kept)))
