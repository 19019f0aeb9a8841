"""Errors that all ranks meet alike before the first step: a wrong command line, a module that is missing. Pure.

Ranks of one launcher share the command line, so its refusal is no one rank's, whoever was seen to end of it first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titan_ckpt.debug.diagnosis.rank_death import event_evidence, is_interrupt
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.kinds import USAGE_ERROR, EventKind, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import LogEvent, RankLog, Run, Verdict

_NO_ERRORS = (EventKind.SIGTERM, EventKind.CANCELLED, EventKind.EXITED)


def at_the_start(run: Run) -> Iterator[Verdict]:
    """RANK_DIED for all ranks whose command line was refused, or for those of which a console holds as many equal errors."""
    logs = [record.log for record in run.ranks.values() if record.log] + ([run.job_log] if run.job_log else [])
    errors = [event for log in logs for event in log.events if event.kind not in _NO_ERRORS and not is_interrupt(event)]
    if not errors or not run.ranks or any(map(_has_begun, logs)):
        return
    if all(event.values.get("type") == USAGE_ERROR for event in errors):
        yield from _refused(run, errors)
    elif all(event.rank < 0 and _what(event) == _what(errors[0]) for event in errors):
        yield from _alike(run, errors)


def _has_begun(log: RankLog) -> bool:
    return log.last_step is not None or log.last_step_line > 0 or log.done_line > 0


def _what(event: LogEvent) -> tuple[object, ...]:
    return event.kind, event.text, event.frame


def refusal(run: Run) -> LogEvent | None:
    """What a launcher said of its own command line, which started no rank."""
    events = run.job_log.events if run.job_log and not run.ranks else ()
    return next((event for event in events if event.values.get("type") == USAGE_ERROR), None)


def _refused(run: Run, errors: Sequence[LogEvent]) -> Iterator[Verdict]:
    if not _has_ended(run):
        return
    known = {event.rank for event in errors}
    others = [record for record in run.ranks.values() if record.rank not in known]
    if any(record.log and record.log.tail for record in others):  # which did not refuse it
        return
    basis = Basis.COMMAND_LINE if others else Basis.OWN_EXCEPTION
    yield _verdict(
        run, tuple(run.ranks), errors, basis, f"the program refused its command line: {errors[0].values['message'][:160]}",
        "correct the command line: a restart ends in the same way",
    )  # fmt: skip


def _has_ended(run: Run) -> bool:
    """Whether a process failed, or wrote no more after it: else a program that it called may have refused other arguments."""
    logs = [record.log for record in run.ranks.values() if record.log]
    is_last = all(log.events and log.events[-1].line == log.tail_line for log in logs)
    return (bool(logs) and is_last) or any(record.exit and record.exit.code > 0 for record in run.ranks.values())


def _alike(run: Run, errors: Sequence[LogEvent]) -> Iterator[Verdict]:
    """Of a console without labels: as many equal tracebacks as ranks that ended by themselves with 1."""
    ends = {rank: record.exit for rank, record in run.ranks.items() if record.exit is not None}
    ended = [rank for rank, end in ends.items() if end.code == 1 and not end.was_told]
    is_own = errors[0].kind in (EventKind.EXCEPTION, EventKind.OOM) and "alone" not in errors[0].values
    if is_own and 1 < len(ended) <= len(errors):
        yield _verdict(
            run, tuple(ended), errors, Basis.OWN_EXCEPTION, "each raised the same exception" + _place(errors[0]),
            "fix the exception at that line, which every rank comes to",
        )  # fmt: skip


def _place(event: LogEvent) -> str:
    return f" at {event.frame.place}" if event.frame else ""


def _verdict(
    run: Run, ranks: tuple[int, ...], errors: Sequence[LogEvent], basis: Basis, text: str, step: str
) -> Verdict:
    whom = "all ranks" if len(ranks) == len(run.ranks) else f"{len(ranks)} ranks ({', '.join(map(str, ranks[:8]))})"
    is_oom = errors[0].kind == EventKind.OOM
    return Verdict(
        verdict=VerdictKind.RANK_DIED, subtype=Subtype.OOM if is_oom else Subtype.PYTHON_EXCEPTION, culprits=ranks,
        victims=tuple(rank for rank in run.ranks if rank not in ranks), confidence=basis.confidence,
        headline=f"{whom} died: {text}", evidence=tuple(map(event_evidence, errors[:4])), next_steps=(step,),
    )  # fmt: skip
