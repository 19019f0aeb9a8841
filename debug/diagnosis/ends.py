"""Whether a rank left how its process ended, and whether a signal from outside ended the job. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ckpt.debug.diagnosis.rank_death import is_interrupt, own_exception, was_told
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import Dump, RankRecord, Run
from titan_ckpt.debug.incident.waits import looked_at_ns

_LATER_NS = 10**9  # progress so long after a dump shows that its process lived on


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A signal from outside (SIGTERM, ctrl-c) ended these ranks, the first at `first_ns` (0 if unknown)."""

    ranks: tuple[int, ...]
    is_all: bool
    by_sigterm: bool
    first_ns: int

    @property
    def text(self) -> str:
        """`all ranks were told to end (SIGTERM)`."""
        who = "all ranks" if self.is_all else rank_list(self.ranks)
        was = "was" if len(self.ranks) == 1 and not self.is_all else "were"
        return f"{who} {was} {'told to end (SIGTERM)' if self.by_sigterm else 'interrupted (ctrl-c)'}"


def told_to_end(run: Run) -> Told | None:
    """Which ranks a signal from outside ended, if all others ended after that, and because of it; None if it was not so."""
    heard = {rank: record for rank, record in run.ranks.items() if was_told(record) or was_interrupted(record)}
    if not heard:
        return None
    first_ns = min(filter(None, map(_heard_ns, heard.values())), default=0)
    others = [record for rank, record in run.ranks.items() if rank not in heard]
    if others and not (first_ns and all(_followed(record, first_ns) for record in others)):
        return None
    by_sigterm = any(map(was_told, heard.values()))
    return Told(ranks=tuple(heard), is_all=not others, by_sigterm=by_sigterm, first_ns=first_ns)


def was_interrupted(record: RankRecord) -> bool:
    """Whether KeyboardInterrupt ended its program."""
    return any("KeyboardInterrupt" in event.values.get("type", "") and is_interrupt(event) for event in record.events)


def _heard_ns(record: RankRecord) -> int:
    """When it heard SIGTERM, as its dump tells, else its last tick; a copied dump's file is younger. 0 if unknown."""
    told = [int(dump.time_s * 1e9) for dump in record.dumps if "sigterm" in dump.reason and dump.time_s]
    return min(filter(None, [*told, looked_at_ns(record)]), default=0)


def _followed(record: RankRecord, first_ns: int) -> bool:
    """Whether a rank lived when the first one ended, and lost its connection to it; one that hears no signal hangs."""
    beat = record.heartbeat
    has_lost = any(event.kind == EventKind.COMM_CLOSED for event in record.events)
    return has_lost and beat is not None and beat.alive_ns >= first_ns and own_exception(record) is None


def has_end(record: RankRecord) -> bool:
    """Whether a recorder left how its process ended: in order, told to, or by an exception."""
    is_stopped = record.heartbeat is not None and record.heartbeat.is_stopped
    return is_stopped or was_told(record) or had_exception(record)


def had_exception(record: RankRecord) -> bool:
    """Whether the recorder dumped because of an exception, and the rank did not get over it."""
    dumps = [dump for dump in record.dumps if "exception" in dump.reason]
    if dumps:
        return not all(got_over(record, dump) for dump in dumps)
    return any("exception" in stack.reason for stack in record.stacks)


def got_over(record: RankRecord, dump: Dump) -> bool:
    """Whether a rank went on after it had written a dump."""
    beat = record.heartbeat
    return beat is not None and bool(dump.time_s) and beat.moved_ns > (dump.time_s or 0.0) * 1e9 + _LATER_NS


def left_gone(record: RankRecord) -> bool:
    """Whether the kernel has no such process any more, and nothing tells how it ended."""
    is_gone = record.is_gone or record.process_state == "gone"
    return is_gone and record.exit is None and not has_end(record)


def all_left_gone(run: Run) -> bool:
    """Whether that is so of every rank: then none of them is known to have gone first."""
    return bool(run.ranks) and all(map(left_gone, run.ranks.values()))
