"""Whether nothing is wrong with a job: it ended well, or all its ranks agree and nothing tells of trouble. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from titan_ckpt.debug.diagnosis.align import Lane
from titan_ckpt.debug.diagnosis.from_logs.reported import parting, trouble_of_job
from titan_ckpt.debug.diagnosis.rank_death import ended_well, logged_on, own_exception, was_told
from titan_ckpt.debug.diagnosis.waiting.awaited_rank import is_silent
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.kinds import STALL, EventKind, RankState, VerdictKind
from titan_ckpt.debug.incident.records import (
    TIMER,
    Evidence,
    LogEvent,
    RankRecord,
    Run,
    Situation,
    StackSnapshot,
    Verdict,
)
from titan_ckpt.debug.incident.waits import waited_at_the_end

_TROUBLE = re.compile(r"error|except|abort|timeout|stall|fatal|hang", re.IGNORECASE)
MOST_THREADS = 4


def went_on(run: Run) -> bool:
    """Whether the job ended well: then nothing hung. A claim that no error, no exit code and no rank may contradict."""
    if any(record.exit and record.exit.code for record in run.ranks.values()):
        return False
    if run.launcher is not None and run.launcher.code == 0:
        of_others = (event for event in trouble_of_job(run) if event.source != run.launcher.source)
        if any(event.kind != EventKind.SIGTERM for event in of_others):
            return False
        return not any(_failed_for_good(run, record, run.launcher.source) for record in run.ranks.values())
    if run.ranks and all(map(ended_well, run.ranks.values())):
        return True  # what is pending then, a daemon thread waited for
    if any(map(was_told, run.ranks.values())):
        return False
    if any(own_exception(record) or _has_failed(record) for record in run.ranks.values()):
        return False
    beats = [record.heartbeat for record in run.ranks.values()]
    if any(beat is not None and beat.status for beat in beats) or leaving(run):
        return False
    if beats and all(beat is not None and beat.is_stopped for beat in beats):
        return not any(map(waited_at_the_end, run.ranks.values()))
    codes = [record.exit.code for record in run.ranks.values() if record.exit]
    return len(codes) == run.world_size > 0


def _failed_for_good(run: Run, record: RankRecord, source: str) -> bool:
    """Whether a rank reported an error after which no rank logged on in the file that tells of a good end."""
    if record.log is None or ended_well(record):
        return False
    logs = [other.log for other in run.ranks.values() if other.log] + ([run.job_log] if run.job_log else [])
    steps_at = max((log.last_step_line for log in logs if log.source == source), default=0)
    done_at = max((log.done_line for log in logs if log.source == source), default=0)
    has_finished = run.launcher is not None and run.launcher.has_finished

    def is_left(event: LogEvent) -> bool:
        """A watchdog's timeout ends the process: only a later step, and no word of an end, shows that it did not."""
        at = steps_at if event.kind == EventKind.WATCHDOG else max(steps_at, done_at)
        if has_finished and event.kind in (EventKind.EXCEPTION, EventKind.OOM):
            return False  # all workers ended with 0, so that something caught it
        return event.source != source or event.line > at

    events = tuple(filter(is_left, record.log.events))
    left = replace(record, log=replace(record.log, events=events))
    return own_exception(left) is not None or _has_failed(left)


def _has_failed(record: RankRecord) -> bool:
    """Whether the communication library or the interpreter reported an error that the rank did not get over."""
    harmless = (EventKind.SIGTERM, EventKind.EXCEPTION)
    return any(event.kind not in harmless and _is_left(record, event) for event in record.events)


def _is_left(record: RankRecord, event: LogEvent) -> bool:
    """Whether nothing shows that a rank got over an error; one of NCCL's that is no rank's own ended it all the same."""
    return "felt" in event.values or not logged_on(record, event)


def looks_well(run: Run, lanes: Sequence[Lane], edges: Sequence[Edge], states: Mapping[int, Situation]) -> bool:
    """Whether the operations of all ranks agree and nothing indicates trouble."""
    is_stopped = any(state.kind.may_wait or state.kind == RankState.SILENT for state in states.values())
    is_equal = all(int(lane.last.min()) == int(lane.last.max()) and bool(lane.done.all()) for lane in lanes)
    has_none = not any(_had_trouble(record) or was_told(record) for record in run.ranks.values())
    return (
        bool(lanes)
        and is_equal
        and not edges
        and not is_stopped
        and has_none
        and not _lacks_end(run)
        and not leaving(run)
        and not _has_stall(run)
        and not any(parting(run))
    )


def leaving(run: Run) -> list[RankRecord]:
    """Ranks whose recorder stopped in order and whose process has not ended, as far as is known: an exit handler may hang."""
    return [
        record
        for record in run.ranks.values()
        if record.exit is None and record.heartbeat and record.heartbeat.is_leaving
    ]


def as_ended(run: Run, states: Mapping[int, Situation]) -> dict[int, Situation]:
    """The states; ranks of a job that ended well have finished: what a stack shows was after the end, or has gone on since."""
    return {rank: Situation(rank=rank, kind=RankState.FINISHED) for rank in states} if went_on(run) else dict(states)


def is_ending(run: Run) -> bool:
    """Whether all recorders stopped in order, and the processes without an exit status were seen a moment ago."""
    beats = [record.heartbeat for record in run.ranks.values()]
    are_stopped = all(beat is not None and beat.is_stopped and not beat.status for beat in beats)
    last = [record.heartbeat for record in leaving(run) if record.heartbeat is not None]
    return are_stopped and bool(last) and not any(is_silent(run, beat) for beat in last)


def _has_stall(run: Run) -> bool:
    """Whether a recorder saw its stall time pass without progress, and nothing newer of its rank was collected."""
    reasons = (one.reason for record in run.ranks.values() for found in (record.dumps, record.stacks) for one in found)
    return any(reason.startswith(STALL) for reason in reasons)


def _lacks_end(run: Run) -> bool:
    """Whether a recorder left no end of its process: the others did, or it was silent when the evidence was read."""
    ends = {record.heartbeat.is_stopped for record in run.ranks.values() if record.heartbeat is not None}
    return len(ends) > 1 or _is_one_silent(run)


def _is_one_silent(run: Run) -> bool:
    """Whether a recorder that did not stop was silent when the evidence was read."""
    beats = [record.heartbeat for record in run.ranks.values() if record.heartbeat is not None]
    return any(not beat.is_stopped and is_silent(run, beat) for beat in beats)


def looks_quiet(run: Run) -> bool:
    """Whether there is evidence of each rank, and none of trouble: nobody can tell a running job from one that hangs by it."""
    has_any = all(record.dumps or record.log or record.stacks for record in run.ranks.values())
    if any(event.kind != EventKind.SIGTERM for event in trouble_of_job(run)) or (run.launcher and run.launcher.code):
        return False
    stopped = [record for record in run.ranks.values() if record.heartbeat and record.heartbeat.is_stopped]
    if any(map(was_told, run.ranks.values())) or not all(map(ended_well, stopped)) or (stopped and _is_one_silent(run)):
        return False
    job = run.job_log
    has_steps = job is not None and (job.last_step is not None or job.last_step_line > 0 or job.done_line > 0)
    is_clean = not any(map(_had_trouble, run.ranks.values())) and not any(parting(run))
    return (bool(run.ranks) or has_steps) and has_any and is_clean


def _had_trouble(record: RankRecord) -> bool:
    """An exit code, a line of the log, a timer of the program, or what its dump was written for."""
    return (
        timer_of(record) is not None
        or bool(record.exit and record.exit.code)
        or any(event.kind != EventKind.SIGTERM and _is_left(record, event) for event in record.events)
        or any(_TROUBLE.search(dump.reason) for dump in record.dumps)
    )


def healthy(run: Run, lanes: Sequence[Lane], *, is_over: bool) -> Verdict:
    """HEALTHY: the job ended well. RUNNING, where no end of it is known, and all ranks agree: it may stand still elsewhere."""
    newest = ", ".join(f"group {run.groups[lane.group]} at #{int(lane.last.max())}" for lane in lanes[:3])
    heard = sum(bool(record.dumps) for record in run.ranks.values())
    is_sure = heard == len(run.ranks)
    basis = Basis.QUIET_LOGS if not lanes else Basis.ALL_DONE if is_sure else Basis.ALL_AGREE
    found = "no fault found: all ranks issued the same operations" if lanes else "no fault found in the logs"
    return Verdict(
        verdict=VerdictKind.HEALTHY if is_over else VerdictKind.RUNNING,
        confidence=basis.confidence if is_over else Basis.ALL_AGREE.confidence,
        headline=found if is_over else "no fault so far: all ranks issued the same operations, and none is pending",
        next_steps=()
        if is_over
        else ("look whether its processes are there, and at the launcher's exit code: 0 means that all is well",),
        evidence=(
            Evidence(
                text=f"{heard} of {run.world_size} ranks agree ({newest})" if newest else f"{run.world_size} ranks seen"
            ),
            *_lost_threads(run),
        ),
    )


def _lost_threads(run: Run) -> Iterator[Evidence]:
    """Exceptions that ended a thread, and no process: no fault of the job, but somebody may miss what the thread did."""
    logs = [*(record.log for record in run.ranks.values() if record.log), *([run.job_log] if run.job_log else [])]
    lost = (event for log in logs for event in log.events if event.values.get("thread"))
    for event in islice(lost, MOST_THREADS):
        name = event.values["thread"]
        who = name if name.startswith("child process") else f"the thread {name}"
        text = f"an exception ended {who}, though not the process: {event.text[:160]}"
        rank = event.rank if event.rank >= 0 else None
        yield Evidence.at(event.frame, text=text, rank=rank, source=f"{event.source}:{event.line}")


# Lines of a dump, as faulthandler prints them.
_OF_DUMP = re.compile(r'Timeout \(\d|hread 0x|File "[^"]*", line \d+ in |Extension modules: ')


def timer_of(record: RankRecord) -> StackSnapshot | None:
    """The stack that a timer of the program wrote since something took too long; None if its log goes on after it."""
    stack = next((stack for stack in reversed(record.stacks) if stack.reason == TIMER), None)
    if stack is None or record.log is None or record.log.source != stack.source:
        return stack
    return stack if record.log.tail and _OF_DUMP.search(record.log.tail[-1]) else None
