"""What py-spy, gdb and the like saw of a job that may live: once or more than once, and whether it had gone on since. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.frames import is_importing, main_thread_state
from titan_ckpt.debug.incident.kinds import FlagKind, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, RankRecord, Run, Thread, Verdict

TOOLS = ("pyspy", "gdb", "eu-stack", "pystack")


def stands_still(run: Run) -> bool:
    """Whether a tool looked at ranks more than once, and saw each at the same place again."""
    again = [frames for frames in (_places(record) for record in run.ranks.values()) if len(frames) > 1]
    return bool(again) and all(frames[0] == other for frames in again for other in frames[1:])


def went_on_between(run: Run) -> bool:
    """Whether a rank that waited for others at one look was elsewhere at another: then all of them had come to that."""
    return any(_left_a_wait(record) for record in run.ranks.values())


def is_one_look(run: Run) -> bool:
    """Whether nothing speaks against a job whose logs tell of steps but one look at its stacks, or a second one before which its
    threads ran: no error, no exit, no recorder. A job that runs looks the same, and so does one that starts: there a rank still
    imports, and a tool that looks at rank after rank sees the next one further."""
    seen = [stack for record in run.ranks.values() for stack in record.stacks]
    moved = {rank for flag in run.flags if flag.flag == FlagKind.WENT_ON for rank in flag.ranks}
    if not seen or any(stack.reason not in TOOLS for stack in seen):
        return False
    if not moved and not any(_has_steps(record) or _imports(record) for record in run.ranks.values()):
        return False
    if any(len(_places(record)) > 1 for rank, record in run.ranks.items() if rank not in moved):
        return False
    is_ended = run.launcher is not None and run.launcher.code is not None
    has_words = run.job_log is not None and bool(run.job_log.events)
    are_done = {_is_done(record) for record in run.ranks.values()}  # where some are, the others did not go on
    return not (is_ended or has_words or len(are_done) > 1 or any(map(_tells_more, run.ranks.values())))


def of_one_look(suspected: Verdict) -> Verdict:
    """INSUFFICIENT_DATA: what one look shows, and that another one would show whether it stays so."""
    return replace(
        suspected, verdict=VerdictKind.INSUFFICIENT_DATA, subtype=suspected.subtype, culprits=(), suspects=suspected.culprits,
        confidence=Basis.UNDECIDED.confidence,
        headline=f"the stacks do not show that the job stands still; if it does: {suspected.headline}",
        evidence=(*suspected.evidence, Evidence(text="of a job that goes on, they show the same")),
        next_steps=(
            "compare the time of the look with the last step in the logs: a job that hangs has logged none for long",
            "look again in a minute (`titan-ckpt debug collect` does so by itself): who is at the same place hangs",
        ),
    )  # fmt: skip


def _places(record: RankRecord) -> list[tuple[object, ...]]:
    return [main.frames for main in _mains(record)]


def _mains(record: RankRecord) -> Iterator[Thread]:
    yield from (stack.main for stack in record.stacks if stack.main is not None and stack.reason in TOOLS)


def _left_a_wait(record: RankRecord) -> bool:
    mains = list(_mains(record))
    waits = [main for main in mains if main_thread_state(main)[0].is_waiting]
    return any(main.frames != waits[0].frames for main in mains) if waits else False


def _imports(record: RankRecord) -> bool:
    return any(is_importing(main.frames) for main in _mains(record))


def _has_steps(record: RankRecord) -> bool:
    return record.log is not None and record.log.last_step is not None


def _is_done(record: RankRecord) -> bool:
    return record.log is not None and record.log.done_line > record.log.last_step_line


def _tells_more(record: RankRecord) -> bool:
    return bool(len(record.operations) or record.heartbeat or record.exit or record.events or record.dumps)
