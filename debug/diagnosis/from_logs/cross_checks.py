"""Evidence that speaks against a verdict which was inferred, not recorded. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from signal import SIGKILL

import numpy as np

from titan_ckpt.debug.diagnosis.from_logs.earlier_run import are_of_earlier_run
from titan_ckpt.debug.diagnosis.from_logs.named_ranks import absent_ranks
from titan_ckpt.debug.diagnosis.from_logs.reported import faults
from titan_ckpt.debug.diagnosis.from_logs.watchdogs import timed_out
from titan_ckpt.debug.diagnosis.looks import TOOLS
from titan_ckpt.debug.diagnosis.rank_death import own_exception
from titan_ckpt.debug.diagnosis.standstill import LEAST_STANDSTILL_S
from titan_ckpt.debug.incident.busy_with import counts_up
from titan_ckpt.debug.incident.frames import MAX_FRAMES
from titan_ckpt.debug.incident.kinds import EventKind, FlagKind, Subtype, VerdictKind
from titan_ckpt.debug.incident.parting_words import told_of_more, wrote_on
from titan_ckpt.debug.incident.records import COMPLETED, SCHEDULED, LogEvent, RankRecord, Run, StackSnapshot, Verdict

RECORDED = 0.85  # from here on a verdict rests on what was recorded of the rank itself

_NOT_COME = (VerdictKind.STUCK_ON_CPU, VerdictKind.SKIPPED_COLLECTIVE, VerdictKind.RANK_DIED, VerdictKind.RANK_FROZEN)


def is_contradicted(run: Run, verdict: Verdict) -> bool:
    """Whether a verdict that a rank did not come rests on inference, and either its dump is older than what it then did, or
    error texts name other ranks as those that did not come."""
    if _blame_one_more(run, verdict) or _was_ended_otherwise(run, verdict) or _was_killed_in_a_hang(run, verdict):
        return True
    if _was_felt_by_nobody(run, verdict) or _went_past(run, verdict) or _fell_alike(run, verdict):
        return True
    if are_of_earlier_run(run, verdict.culprits) or _is_of_old_dumps(run, verdict) or _took_part_later(run, verdict):
        return True
    if _was_at_work(run, verdict):
        return True
    if verdict.verdict in (VerdictKind.PG_INIT_HANG, *_NOT_COME) and _looked_before_steps(run):
        return True
    if verdict.subtype == Subtype.FINISHED_EARLY and not _ended_before(run, verdict):
        return True
    is_recorded = verdict.confidence >= RECORDED
    if (_may_be_two_attempts(run) and not _is_of_one_rank(verdict)) or (not is_recorded and _waited_too(run, verdict)):
        return True
    if is_recorded or not verdict.culprits or verdict.verdict not in _NOT_COME:
        return False
    if _all_said_that_they_are_done(run):
        return True
    accused, named = set(verdict.culprits), set(absent_ranks(run))
    return bool(accused & _dumped_too_early(run)) or bool(named and not accused & named)


def _was_at_work(run: Run, verdict: Verdict) -> bool:
    """Whether a dump says that others wait for a rank, one look of a tool found it in its own code, its last lines count up, and
    nobody waited for too long: it may be slow, as in an evaluation or save. (`standstill` judges a look without dumps.)"""
    if verdict.verdict != VerdictKind.STUCK_ON_CPU or not verdict.culprits or verdict.confidence < RECORDED:
        return False
    if any(record.exit or any(e.kind.is_communication for e in record.events) for record in run.ranks.values()):
        return False
    accused = [run.ranks[rank] for rank in verdict.culprits if rank in run.ranks]
    return all(
        record.heartbeat is None
        and record.log is not None
        and counts_up(record.log.tail)
        and bool(record.stacks)
        and all(stack.reason in TOOLS for stack in record.stacks)
        for record in accused
    )


def _looked_before_steps(run: Run) -> bool:
    """Whether a tool saw ranks in `init_process_group` that logged steps, and one that it is done: these stacks are the older."""
    logs = [record.log for record in run.ranks.values() if record.log is not None]
    joining = [record for record in run.ranks.values() if record.log is not None and any(map(_joins, record.stacks))]
    has_steps = any(record.log is not None and record.log.last_step is not None for record in joining)
    return has_steps and any(0 < log.tail_line <= log.done_line for log in logs)


def _joins(stack: StackSnapshot) -> bool:
    frames = (frame for thread in stack.threads for frame in thread.frames)
    return stack.reason in TOOLS and any(frame.function == "init_process_group" for frame in frames)


def _all_said_that_they_are_done(run: Run) -> bool:
    """Whether the last words of every rank are that its training is done, and a tool saw it at work, at a time that is not known:
    perhaps before that."""
    logs = [record.log for record in run.ranks.values()]
    are_done = bool(logs) and all(log is not None and 0 < log.tail_line <= log.done_line for log in logs)
    return are_done and all(
        record.exit is None and record.stacks and all(stack.reason in TOOLS for stack in record.stacks)
        for record in run.ranks.values()
    )


def _dumped_too_early(run: Run) -> set[int]:
    return {rank for flag in run.flags if flag.flag == FlagKind.DUMP_SKEW for rank in flag.ranks}


def _is_of_old_dumps(run: Run, verdict: Verdict) -> bool:
    """Whether it compares dumps of different moments: what a device had not ended in one may have ended since, and what the
    others had not issued they may have issued since."""
    if verdict.verdict in _OF_DEVICES:
        return bool(_dumped_too_early(run) & set(verdict.culprits))
    return verdict.subtype == Subtype.EXTRA_COLLECTIVE and bool(_dumped_too_early(run))


_OF_DEVICES = (VerdictKind.STARTED_NOT_COMPLETED, VerdictKind.SCHEDULED_NOT_STARTED)


def _went_past(run: Run, verdict: Verdict) -> bool:
    """Whether it says that a device did not end an operation, and later ones of that group are completed on a rank at fault: a
    group's collectives run one after the other, so the dump's word on the earlier one is old."""
    if verdict.verdict not in _OF_DEVICES or verdict.seq is None:
        return False
    groups = [number for number, group in enumerate(run.groups) if str(group) == verdict.group]
    tables = (run.ranks[rank].operations for rank in verdict.culprits)
    return any(
        (np.isin(t["group"], groups) & (t["p2p"] == 0) & (t["seq"] > verdict.seq) & (t["state"] == COMPLETED)).any()
        for t in tables
    )


# Which end on no rank before all have come.
_OF_ALL = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "barrier", "all_to_all", "alltoall")
MOST_CULPRITS = 8


def _took_part_later(run: Run, verdict: Verdict) -> bool:
    """Whether it says that a rank did not come, or that its device did not begin, and another rank has completed what ends on
    none before all have come: then the dump of the rank at fault is older than that."""
    if verdict.confidence >= RECORDED or verdict.verdict not in (*_NOT_COME, *_OF_DEVICES):
        return False
    begun = [_begun(run.ranks[rank]) for rank in verdict.culprits[:MOST_CULPRITS] if rank in run.ranks]
    met = _newest_met(run, {group for last in begun for group in last})
    return any(met[group] > number for last in begun for group, number in last.items())


def _begun(record: RankRecord) -> dict[int, int]:
    """By group, the newest collective that a rank, or its device where that is recorded, has begun; -1 if none."""
    table = record.operations[record.operations["p2p"] == 0]
    begun = table[table["state"] != SCHEDULED] if (table["started_ns"] > 0).any() else table
    groups = np.unique(table["group"]).tolist()
    return {group: int(begun["seq"][begun["group"] == group].max(initial=-1)) for group in groups}


def _newest_met(run: Run, groups: Collection[int]) -> dict[int, int]:
    """By group, the newest collective that a rank has completed, of those that end on none before all have come."""
    codes = [code for code, op in enumerate(run.names.ops) if any(name in op for name in _OF_ALL)]
    newest = dict.fromkeys(groups, -1)
    for table in (record.operations for record in run.ranks.values()):
        done = table[(table["p2p"] == 0) & (table["state"] == COMPLETED) & np.isin(table["op"], codes)]
        for group in newest:
            newest[group] = max(newest[group], int(done["seq"][done["group"] == group].max(initial=-1)))
    return newest


def has_lost_launcher(run: Run) -> bool:
    """Whether a rank says last of all that its launcher was gone: then all ranks ended for that."""
    events = run.job_log.events if run.job_log is not None else ()
    return any(event.values.get("cause") == "launcher" and _is_last(run, event) for event in events)


def ended_with_launcher(run: Run, verdict: Verdict) -> bool:
    """Whether it is only inferred of a rank that it died, and all ended with their launcher."""
    return verdict.verdict == VerdictKind.RANK_DIED and verdict.confidence < RECORDED and has_lost_launcher(run)


def _is_last(run: Run, event: LogEvent) -> bool:
    """Whether nothing follows in the log: ranks that are started again write into the same one."""
    logs = (record.log for record in run.ranks.values())
    return all(log.tail_line <= event.line for log in logs if log is not None and log.source == event.source)


def _waited_too(run: Run, verdict: Verdict) -> bool:
    """Whether it says that a rank did not come, whose watchdog reports the very operation in which another rank waits."""
    if verdict.verdict not in _NOT_COME:
        return False
    works = {rank: work.place for rank, record in run.ranks.items() if (work := timed_out(record)) is not None}
    others = {place for rank, place in works.items() if rank not in verdict.culprits}
    return any(works.get(rank) in others for rank in verdict.culprits)


def _may_be_two_attempts(run: Run) -> bool:
    """Whether the dumps tell of two times, and no majority says which of these is the hang's."""
    apart = {kind: {rank for flag in run.flags if flag.flag == kind for rank in flag.ranks} for kind in _APART}
    return all(apart.values()) and 2 * len(apart[FlagKind.CLOCK_SKEW]) >= len(run.ranks)


def _is_of_one_rank(verdict: Verdict) -> bool:
    """Whether what a rank itself left shows it, without a comparison of ranks."""
    return verdict.verdict in (VerdictKind.RANK_DIED, VerdictKind.RANK_FROZEN) and verdict.confidence >= RECORDED


_APART = (FlagKind.DUMP_SKEW, FlagKind.CLOCK_SKEW)


_ON_DEVICE = re.compile(r"watchdog thread terminated with exception: (?P<error>(?:CUDA|HIP) error: [^.\n]{5,80})")


def _fell_alike(run: Run, verdict: Verdict) -> bool:
    """Whether the watchdogs of most ranks ended with the very error of the ranks that are blamed: whose was the first, the order
    in which they noticed it does not tell."""
    errors = {rank: _device_error(record) for rank, record in run.ranks.items()}
    blamed = {errors[rank] for rank in verdict.culprits if rank in errors}
    others = [rank for rank, error in errors.items() if error in blamed and rank not in verdict.culprits]
    return verdict.verdict == VerdictKind.RANK_DIED and "" not in blamed and 2 * len(others) >= len(run.ranks) > 2


def _device_error(record: RankRecord) -> str:
    return next((match["error"] for event in record.events if (match := _ON_DEVICE.search(event.text))), "")


def _was_felt_by_nobody(run: Run, verdict: Verdict) -> bool:
    """Whether the exceptions that it is about may have been caught, and nothing shows that a process failed or waited: a logger
    wrote them, the rank had raised them before or says that it is done, or its launcher tells of no failure."""
    if verdict.verdict != VerdictKind.RANK_DIED or not verdict.culprits or (run.launcher and run.launcher.code):
        return False
    for rank, record in run.ranks.items():
        if (record.exit and record.exit.code) or any(e.kind.is_communication or e.kind in _ENDS for e in record.events):
            return False
        if len(record.operations) or record.stacks or record.heartbeat is not None:
            return False  # other evidence tells
        if rank in verdict.culprits and not _may_be_caught(run, record):
            return False
    return True


_ENDS = (EventKind.WATCHDOG, EventKind.FATAL_SIGNAL, EventKind.KILLED, EventKind.NODE_LOST, EventKind.STORE_WAIT)


def _may_be_caught(run: Run, record: RankRecord) -> bool:
    error, launcher = own_exception(record), run.launcher
    if error is None or record.log is None:
        return False
    if record.log.is_done_elsewhere or _raised_before(record, error):
        return True
    has_ended_well = launcher is not None and launcher.code == 0
    if launcher is not None and launcher.source != error.source and (has_ended_well or launcher.is_torchrun):
        return True  # torchrun reports each worker that fails
    if launcher is not None and launcher.is_called_good:
        return True
    if _is_of_the_start(record, error) or (_STDERR.search(error.source) and wrote_on(record, error)):
        return True
    if _job_went_on(run, error) or told_of_more(record, error) or _was_printed(error):
        return True
    is_later = 0 < record.log.done_line < error.line or wrote_on(record, error)
    return "announced" in error.values and (has_ended_well or is_later)


def _job_went_on(run: Run, error: LogEvent) -> bool:
    """Whether lines of no rank follow in its file: that the training is done, or a progress bar. (Steps by number may have been
    held back.)"""
    log = run.job_log
    if log is None or log.source != error.source:
        return False
    return log.done_line > error.line or (log.last_step is None and log.last_step_line > error.line)


_STDERR = re.compile(r"stderr[^/]*$|\.err$")


# Where Python enters a program, or a process or thread of it: there a traceback begins that nobody caught.
_ENTRIES = re.compile(r"^<module>$|_bootstrap|^_run_module|^_run_code$|^spawn_main$|^wrapper$|^_wrap$|^main$")


def _was_printed(error: LogEvent) -> bool:
    """Whether a traceback in a file of standard error begins within the program: `traceback.print_exc` shows the calls below the
    one that caught the exception alone."""
    outer = error.calls[-1] if 0 < len(error.calls) < MAX_FRAMES else None
    return outer is not None and _STDERR.search(error.source) is not None and not _ENTRIES.search(outer.function)


def _is_of_the_start(record: RankRecord, error: LogEvent) -> bool:
    """Whether a module was missing, which is mostly seen before the first step, and another file tells of steps."""
    is_import = error.values.get("type", "").rpartition(".")[2] in ("ImportError", "ModuleNotFoundError")
    return is_import and record.log is not None and record.log.last_step is not None and "unstepped" in error.values


def _raised_before(record: RankRecord, error: LogEvent) -> bool:
    """Whether the same line had raised the same error before, and the rank had gone on."""
    alike = [event for event in record.events if (event.kind, event.frame) == (error.kind, error.frame)]
    return error.frame is not None and len(alike) > 1


# What a program raises for its own mistakes, on as many ranks as have them.
_OF_PROGRAMS = (
    "ArithmeticError", "AssertionError", "AttributeError", "FileNotFoundError", "FloatingPointError", "ImportError", "IndexError",
    "KeyError", "LookupError", "MemoryError", "ModuleNotFoundError", "NameError", "NotImplementedError", "OutOfMemoryError",
    "PermissionError", "RecursionError", "StopIteration", "SyntaxError", "TypeError", "UnboundLocalError", "UnicodeDecodeError",
    "ValueError", "ZeroDivisionError",
)  # fmt: skip
_OF_PEERS = re.compile(
    r"tim(?:es?|ed|ing)[ -]?out|\bpeers?\b|\bremote\b|MPI_ERR|ncclCommAbort|onnection (?:reset|closed|refused)|\bother ranks?\b",
    re.I,
)


def _was_killed_in_a_hang(run: Run, verdict: Verdict) -> bool:
    """Whether SIGKILL came long after the last step, which one rank alone was past by then: it had left an operation out that the
    others waited in, and somebody ended the job for that."""
    killed = [run.ranks[rank].exit for rank in verdict.culprits] if verdict.verdict == VerdictKind.RANK_DIED else []
    if not killed or not all(ended is not None and ended.code == -SIGKILL and ended.time_s for ended in killed):
        return False
    logs = {rank: record.log for rank, record in run.ranks.items() if record.log is not None and record.log.step_times}
    if not len(logs) == len(run.ranks) > 2:
        return False
    newest = {rank: max(log.step_times) for rank, log in logs.items()}
    ahead = max(newest, key=lambda rank: newest[rank])
    behind = {step for rank, step in newest.items() if rank != ahead}
    if len(behind) > 1 or newest[ahead] in behind or ahead in verdict.culprits:
        return False
    last_s = max(max(log.step_times.values()) for log in logs.values())
    return all(ended is not None and (ended.time_s or 0.0) - last_s > LEAST_STANDSTILL_S for ended in killed)


_OTHER_ENDS = (EventKind.TIME_LIMIT, EventKind.PREEMPTED)


def _was_ended_otherwise(run: Run, verdict: Verdict) -> bool:
    """Whether the errors that ranks died of were announced by a log record, so caught, and nothing but a time limit or a
    preemption is known to have ended the job."""
    if verdict.subtype != Subtype.PYTHON_EXCEPTION or not any(event.kind in _OTHER_ENDS for event in faults(run)):
        return False
    records = [run.ranks[rank] for rank in verdict.culprits]
    errors = [own_exception(record) for record in records if record.exit is None]
    return len(errors) == len(records) and all(error is not None and "announced" in error.values for error in errors)


LEAST_WITNESSES = 3


def _blame_one_more(run: Run, verdict: Verdict) -> bool:
    """Whether most ranks raised the same error at the same line, one that libraries raise for a peer: a quiet rank may be the
    cause, whatever words the library has for it. Where all known ranks raised it, by the words it has."""
    quiet = set(range(run.world_size)) - set(verdict.culprits)
    if verdict.subtype != Subtype.PYTHON_EXCEPTION or len(verdict.culprits) < max(LEAST_WITNESSES, len(quiet) + 1):
        return False
    if any(own_exception(run.ranks[rank]) for rank in quiet & set(run.ranks)):
        return False
    raised = [event for rank in verdict.culprits if (event := own_exception(run.ranks[rank])) is not None]
    types = {event.values.get("type", "").rpartition(".")[2] for event in raised}
    is_worded = all(_OF_PEERS.search(event.text) for event in raised)
    return len(types) == 1 and not types & set(_OF_PROGRAMS) and (bool(quiet) or is_worded)


def _tells_exceptions(run: Run) -> bool:
    """Whether a recorder dumped for an exception and did not take that for an orderly end."""
    return any(
        record.heartbeat
        and not record.heartbeat.is_stopped
        and any(dump.reason == "exception" for dump in record.dumps)
        for record in run.ranks.values()
    )


def _has_ended_well(record: RankRecord) -> bool:
    """Whether its recorder says so, or nobody raised an exception in its log."""
    if record.heartbeat and record.heartbeat.status == 0:
        return True
    return record.log is not None and own_exception(record) is None


EARLIER_NS = 1_000_000_000


def _ended_before(run: Run, verdict: Verdict) -> bool:
    """Whether a rank that is said to have finished early ended before those that waited for it, where its recorder alone says so,
    and may have taken an uncaught exception for an orderly end, as older ones did."""
    finished = [run.ranks[rank] for rank in verdict.culprits if run.ranks[rank].exit is None]
    if all(_has_ended_well(record) for record in finished) or _tells_exceptions(run):
        return True
    ends = [record.heartbeat.alive_ns for record in finished if record.heartbeat and record.heartbeat.is_stopped]
    others = [run.ranks[rank].heartbeat for rank in verdict.victims if rank in run.ranks]
    later = [beat.alive_ns for beat in others if beat is not None]
    return not ends or not later or max(ends) + EARLIER_NS < max(later)
