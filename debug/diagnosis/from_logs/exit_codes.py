"""Ranks that ended by themselves with an exit code, where nothing shows that the trouble of a peer ended them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from signal import SIGTERM

from titan_ckpt.debug.diagnosis.rank_death import signal_of
from titan_ckpt.debug.diagnosis.standstill import LEAST_STANDSTILL_S, TIMES_LONGEST_GAP
from titan_ckpt.debug.incident.busy_with import last_words, speaks_of_others, tells_of_others
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.kinds import EventKind, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, RankRecord, Run, Verdict

UNCAUGHT = 1  # how Python ends for any uncaught exception: a victim's, too
_LAUNCHERS = re.compile(
    r"\s*(?:srun:|slurmstepd:|mpirun|mpiexec|prterun|-{5,}|={5,}|MPI_ABORT|with errorcode|Abort\(|Primary job"
    r"|the job to be terminated|Process name:|Exit code:|\[rank: \d+\] Child process|[Pp]rocess \d+ terminated)"
)
_NO_TROUBLE = (EventKind.SIGTERM, EventKind.CANCELLED)


def by_exit_codes(run: Run) -> Iterator[Verdict]:
    """RANK_DIED for the ranks that a launcher lists first, with a code that they gave themselves, or by a SIGTERM of another."""
    yield from (found := [*_told_by_another(run)])
    if found:
        return
    failed = [record for record in run.ranks.values() if _ended_itself(record)]
    first = [record for record in failed if record.exit and record.exit.is_first] or failed
    logs = [record.log for record in run.ranks.values() if record.log] + ([run.job_log] if run.job_log else [])
    has_trouble = any(event.kind not in _NO_TROUBLE for log in logs for event in log.events)
    if not first or has_trouble or any(_was_killed(record) for record in run.ranks.values()):
        return
    if any(map(_ended_for_a_hang, first)):
        return
    code = first[0].exit.code if first[0].exit else 0
    is_shown = _would_show(run, first)
    if code == UNCAUGHT and not is_shown and not _left_alone(run, first[0]):
        return
    alike = [record for record in failed if record.exit and record.exit.code == code]
    told = [record for record in run.ranks.values() if record.exit is not None and record.exit.was_told]
    if 0 < len(told) < len(alike) == len(run.ranks) - len(told):
        return  # most left alike, perhaps for one that they waited for and that its launcher had to end
    yield _verdict(alike, code, run, Basis.EXIT_CODE if is_shown else Basis.EXIT_CODE_ALONE)


def _told_by_another(run: Run) -> Iterator[Verdict]:
    """The one rank that SIGTERM ended first, without a signal of the launcher's, which then ended all others with one."""
    ends = {rank: record.exit for rank, record in run.ranks.items() if record.exit is not None}
    first = [end for end in ends.values() if end.is_first and not end.was_told and signal_of(end.code) == SIGTERM]
    others = [end for end in ends.values() if end not in first]
    log = run.job_log
    is_cancelled = log is not None and any(event.kind != EventKind.SIGTERM for event in log.events)
    if len(first) != 1 or not others or not all(end.was_told for end in others) or is_cancelled:
        return
    [end] = first
    record = run.ranks[end.rank]
    text = "ended by SIGTERM, which its launcher sent to the others alone, afterwards"
    yield Verdict(
        verdict=VerdictKind.RANK_DIED, subtype=Subtype.SIGNAL, signal="SIGTERM", culprits=(end.rank,),
        victims=tuple(rank for rank in run.ranks if rank != end.rank), step=run.step_of(end.rank),
        confidence=Basis.TOLD_BY_ANOTHER.confidence, headline=f"rank {end.rank} died: {text}",
        evidence=(Evidence(text=text, rank=end.rank, source=end.source), *last_words(record)),
        next_steps=("find out who sent it: a person, a watchdog of the host, a scheduler's step or container limit",),
    )  # fmt: skip


def _ended_itself(record: RankRecord) -> bool:
    ended = record.exit
    return ended is not None and ended.code > 0 and not ended.was_told and not signal_of(ended.code)


def _ended_for_a_hang(record: RankRecord) -> bool:
    """Whether its last words speak of a hang, or it said nothing after a standstill: it may have waited, and left for that."""
    log = record.log
    if log is None:
        return False
    if speaks_of_others(record):
        return True
    ended_s, steps = record.exit.time_s if record.exit else None, sorted(log.step_times.values())
    has_spoken = bool(log.error_end) and log.last_step_line < log.tail_line
    if has_spoken or ended_s is None:
        return False
    if len(steps) < 2:
        return _by_the_clock(log.tail, ended_s) > LEAST_STANDSTILL_S
    longest_s = max(after - before for before, after in pairwise(steps))
    return ended_s - steps[-1] > max(LEAST_STANDSTILL_S, TIMES_LONGEST_GAP * longest_s)


_CLOCK = re.compile(r"\s{0,8}\[?(\d\d):(\d\d):(\d\d)\b")
DAY_S = 86_400


def _by_the_clock(tail: Sequence[str], ended_s: float) -> float:
    """Seconds from the last line to the end, where lines have a time and no date; 0 if they have none."""
    match = _CLOCK.match(tail[-1]) if tail else None
    if match is None:
        return 0.0
    hours, minutes, seconds = map(int, match.groups())
    return (ended_s - (hours * 3600 + minutes * 60 + seconds)) % DAY_S


def _was_killed(record: RankRecord) -> bool:
    number = signal_of(record.exit.code) if record.exit is not None and not record.exit.was_told else 0
    return number not in (0, SIGTERM)  # by which launchers end the others


def _would_show(run: Run, first: Sequence[RankRecord]) -> bool:
    """Whether the text at hand would hold the traceback of an exception: the rank's own lines, or a console that all write to."""
    if run.launcher is not None and run.launcher.code is not None:
        console = run.launcher.source  # with labels: the launcher's own message shows that it holds what goes to stderr
        logs = [record.log for record in first]
        return all(log and (log.error_end is not None or (log.tail and log.source == console)) for log in logs)
    lines = run.job_log.tail if run.job_log is not None else ()
    is_console = any(line.strip() and not _LAUNCHERS.match(line) for line in lines)
    return is_console or all(record.log is not None and record.log.tail for record in first)


SHORTEST_TIMEOUT_S = 30.0  # for which programs wait for peers; torch's shortest default is 300 s, for its store


def _left_alone(run: Run, record: RankRecord) -> bool:
    """Whether it ended in a console that shows the errors of all, without a word, while all others ran until their launcher ended
    them, and no standstill came before, in which it may have waited."""
    log, launcher, ended = run.job_log, run.launcher, record.exit
    others = [other.exit for other in run.ranks.values() if other is not record]
    if ended is None or launcher is None or not others or not all(other and other.was_told for other in others):
        return False
    if log is None or not launcher.is_shared or ended.source != launcher.source or ended.time_s is None:
        return False
    last_s = max(log.step_times.values(), default=None)
    is_at_work = last_s is not None and 0 <= ended.time_s - last_s < SHORTEST_TIMEOUT_S
    return is_at_work and not any(map(tells_of_others, log.tail))


def _verdict(culprits: Sequence[RankRecord], code: int, run: Run, basis: Basis) -> Verdict:
    ranks = tuple(record.rank for record in culprits)
    victims = tuple(rank for rank in run.ranks if rank not in ranks)
    evidence = [
        item
        for record in culprits[:4]
        if record.exit
        for item in (
            Evidence(text=f"exit code {code}, before the others", rank=record.rank, source=record.exit.source),
            *_error_end(record),
            *last_words(record),
        )
    ]
    return Verdict(
        verdict=VerdictKind.RANK_DIED, subtype=Subtype.EXIT_CODE, culprits=ranks, victims=victims, step=run.step_of(ranks[0]),
        confidence=basis.confidence,
        headline=f"{rank_list(ranks)} died: ended by {'itself' if len(ranks) == 1 else 'themselves'} with exit code {code}, and "
        "nothing shows an exception, a signal or the trouble of a peer",
        evidence=tuple(evidence),
        next_steps=(
            f"look for what ends the program with {code}: sys.exit, os._exit, a launcher's or a library's abort",
            "read the end of that rank's output, which may go to another file than the one given here",
        ),
    )  # fmt: skip


def _error_end(record: RankRecord) -> Iterator[Evidence]:
    """What it wrote last to its standard error: `sys.exit(text)` writes that text."""
    if record.log is not None and record.log.error_end:
        text = f"last line of its standard error: {record.log.error_end[:160]}"
        yield Evidence(text=text, rank=record.rank)
