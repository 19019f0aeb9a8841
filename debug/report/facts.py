"""The facts under a verdict: who waits in what and since when, where the processes are, which commands to run next. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice

from titan_ckpt.console.units import format_age, format_duration
from titan_ckpt.debug.diagnosis.looks_well import went_on
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.frames import hang_stack
from titan_ckpt.debug.incident.kinds import Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, RankRecord, Run, StackSnapshot, Thread, Verdict
from titan_ckpt.debug.incident.waits import began_ns, last_sign_ns, places, process_ended, stopped_s, waits
from titan_ckpt.version import DOCUMENTATION

MAX_WAITS = 4
MAX_PLACES = 4
MAX_COMMANDS = 3
HANGS = "did not end"
LAST_WAITS = "the last rank begins to wait"  # from then on nobody goes on


def when(run: Run, top: Verdict, now_s: float) -> str:
    """`stopped 2026-11-22 01:49:23 UTC, 3 h ago; last sign of life 13 s later`; "" if no time is known. A slow job
    has not stopped."""
    last_s = last_sign_ns(run) / 1e9
    return ended(last_s, now_s) if went_on(run) else stopped(stopped_s(run, top, began_ns(run)), last_s, now_s)


def lasting(run: Run, top: Verdict, now_s: float) -> str:
    """What `when` says, for a file that is read later: times, and that of the report in place of ages."""
    said = when(run, top, 0.0)
    return f"{said}; reported {moment(now_s)}" if said else ""


def stopped(began_s: float, last_s: float, now_s: float) -> str:
    """What `when` says of a job that stopped at `began_s` and showed life at `last_s`, since the epoch; 0 if unknown."""
    if not began_s:
        return f"last sign of life {moment(last_s)}{_age(now_s, last_s)}" if last_s else ""
    after = f"; last sign of life {format_duration(last_s - began_s)} later" if last_s - began_s >= 1e-3 else ""
    return f"stopped {moment(began_s)}{_age(now_s, began_s)}{after}"


def ended(last_s: float, now_s: float) -> str:
    """What to say of a job that ended well; "" if no time is known."""
    return f"ended well {moment(last_s)}{_age(now_s, last_s)}" if last_s else ""


def moment(seconds: float) -> str:
    """Seconds since the epoch as `2026-11-22 01:49:23 UTC`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _age(now_s: float, then_s: float) -> str:
    return f", {format_age(now_s - then_s)} ago" if now_s > then_s else ""


def fact(item: Evidence) -> str:
    """`rank 3: its text at train.py:12  [the file it was read from]`."""
    rank = f"rank {item.rank}: " if item.rank is not None else ""
    place = f" at {item.file}:{item.line}" if item.file and f"{item.file}:{item.line}" not in item.text else ""
    source = item.source.removesuffix(":0")  # of no line
    return f"{rank}{item.text}{place}{f'  [{source}]' if source else ''}"


def step_text(run: Run, step: int) -> str:
    """`step 12`, or `last logged step 12` where no rank told its recorder: a rank stops in the step after the one it logged."""
    is_told = any(record.heartbeat and record.heartbeat.step >= 0 for record in run.ranks.values())
    return f"step {step}" if is_told else f"last logged step {step}"


def page_of(verdict: Verdict) -> str:
    """The page of the documentation about a kind of verdict."""
    return f"{DOCUMENTATION}/verdicts/{verdict.verdict}.md"


def stack_of(record: RankRecord) -> tuple[StackSnapshot, Thread] | None:
    """The stack that shows where a rank hung or ended, and its thread to look at: the one that crashed, else the main one."""
    hung = hang_stack(record)
    for stack in (hung,) if hung is not None else reversed(record.stacks):
        thread = stack.main if hung is not None else stack.current or stack.main
        if thread is not None and thread.frames:
            return stack, thread
    return None


def open_word(top: Verdict) -> str:
    """What is said of an operation that was open when it was recorded: in a job that hangs it did not end."""
    return "open when it was recorded" if _went_on(top) or top.verdict == VerdictKind.RUNNING else HANGS


def _went_on(top: Verdict) -> bool:
    return top.is_healthy or top.verdict == VerdictKind.STRAGGLER


def who_waits(run: Run, top: Verdict) -> tuple[str, str]:
    """`who waits`, and the verb of one rank alone: in the past where the ranks that waited have ended or went on."""
    waiters = {waiter for waiter, _ in top.chain} or set(run.ranks)
    is_past = _went_on(top) or all(process_ended(run, rank, top) for rank in waiters)
    return ("who waited", "waited") if is_past else ("who waits", "waits")


def waiting(run: Run, top: Verdict) -> Iterator[str]:
    """A line per operation that ranks wait in; none of a job that was only slow."""
    found = [] if _went_on(top) else waits(run)
    for wait in found[:MAX_WAITS]:
        yield f"{rank_list(wait.ranks)}: {wait.text}"
    if len(found) > MAX_WAITS:
        yield f"and {len(found) - MAX_WAITS} more operations; see --json"


def concerned(run: Run, top: Verdict) -> tuple[int, ...]:
    """The ranks to look at: the culprits or suspects, else those that wait in nothing, else all."""
    named = top.culprits or top.suspects
    if named:
        return named
    waiters = {rank for wait in waits(run) for rank in wait.ranks}
    absent = tuple(rank for rank in run.ranks if rank not in waiters)
    return absent if waiters and absent else tuple(run.ranks)


def where(run: Run, top: Verdict) -> list[str]:
    """Host and process of the ranks to look at."""
    return places(run, concerned(run, top)[:MAX_PLACES])


def commands(run: Run, top: Verdict) -> list[str]:
    """The exact commands that show more of the ranks to look at; a comment says where to run one if the host is unknown."""
    found: dict[str, list[int]] = {}  # by command, the ranks whose host it is for where no host is known
    for rank in concerned(run, top):
        command, is_placed = _command(run, run.ranks[rank], top)
        if command:
            found.setdefault(command, []).extend([] if is_placed else [rank])
    shown = (f"{c}  # on the host{'s' * (len(r) > 1)} of {rank_list(r)}" if r else c for c, r in found.items())
    return list(islice(shown, MAX_COMMANDS))


def _command(run: Run, record: RankRecord, top: Verdict) -> tuple[str, bool]:
    """`ssh node17 py-spy dump --pid 9192`, and whether it says where to run it; "" if the process has ended and its host has
    nothing to tell."""
    has_ended = process_ended(run, record.rank, top)
    if has_ended and not _may_be_the_hosts(top):
        return "", True
    is_known = bool(record.host) and not record.host.startswith("-")  # ssh would take that for an option
    what = _KERNEL_LOG if has_ended else f"py-spy dump --pid {record.pid}" if record.pid else _COLLECT
    if not is_known:
        is_everywhere = not record.pid and not has_ended
        return (f"{what}  # on each host of the job", True) if is_everywhere else (what, False)
    return f"ssh {shlex.quote(record.host)} " + (f'"{what}"' if has_ended else what), True


_KERNEL_LOG = "dmesg -T | grep -iE 'oom|xid|segfault|killed process'"
_COLLECT = "titan-ckpt debug collect --out stacks"  # finds this user's training processes


_OF_HOSTS = (VerdictKind.RANK_DIED, VerdictKind.RANK_FROZEN, VerdictKind.INSUFFICIENT_DATA, VerdictKind.WAIT_CHAIN)


def _may_be_the_hosts(top: Verdict) -> bool:
    """Whether the kernel's log may tell more: of a process that was killed or is gone, not of a program that took another way."""
    return top.verdict in _OF_HOSTS and top.subtype != Subtype.PYTHON_EXCEPTION
