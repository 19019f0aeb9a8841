"""Ranks that error texts of other ranks name: monitoredBarrier, torch's desync report, mismatches in DETAIL mode. Who logs such
a text is a witness; who is named by it is at fault, unless what the named one logged itself says otherwise. Pure.

Texts from torch/csrc/distributed/c10d: ProcessGroupGloo.cpp, TraceUtils.h, ProcessGroupWrapper.cpp, reducer.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from titan_ckpt.debug.diagnosis.advice import advice
from titan_ckpt.debug.incident.busy_with import busy_by_log
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.kinds import EventKind, RankState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, LogEvent, RankLog, Run, Situation, Verdict

_ENDED = (RankState.DEAD, RankState.FROZEN, RankState.GIL_HELD)  # which have verdicts of their own


def named_ranks(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """Verdicts on ranks that others name; none where they name each other, or where a named one is known to have died."""
    yield from _different_calls(run)
    absent = absent_ranks(run)
    if not absent:
        return
    culprits = tuple(sorted(absent))
    witnesses = tuple(sorted({event.rank for event in absent.values() if event.rank >= 0} - set(culprits)))
    if any(states[rank].kind in _ENDED for rank in culprits) or 2 * len(culprits) > run.world_size:
        return
    yield _did_not_come(run, culprits, witnesses, states, next(iter(absent.values())))


def absent_ranks(run: Run) -> dict[int, LogEvent]:
    """Ranks that did not come by the text of one that waited. Not those that logged such a text themselves: who gave up waiting
    in a monitoredBarrier is named by the next one, whose connection to it closed."""
    named: dict[int, LogEvent] = {}
    joined: set[int] = set()
    gave_up: set[int] = set()
    newest = max((int(seq) for seq in _timed_out(run)), default=0)
    for event in _events(run, (EventKind.COMM_TIMEOUT, EventKind.DESYNC)):
        ranks = _numbers(event.values.get("names", ""))
        if event.kind == EventKind.DESYNC and "missed" not in event.values and not 0 < _seq(event) < newest:
            joined.update(ranks)
            continue
        named.update({rank: event for rank in ranks if rank in run.ranks})
        gave_up.update({event.rank} if ranks and event.kind == EventKind.COMM_TIMEOUT else ())
    return {} if joined & set(named) else {rank: event for rank, event in named.items() if rank not in gave_up}


def present_ranks(run: Run) -> set[int]:
    """Ranks that torch's desync report has in the operation that timed out: their silence says nothing."""
    newest = max((int(seq) for seq in _timed_out(run)), default=0)
    reports = (event for event in _events(run, (EventKind.DESYNC,)) if "missed" not in event.values)
    return {rank for event in reports if 0 < newest <= _seq(event) for rank in _numbers(event.values["names"])}


def _seq(event: LogEvent) -> int:
    """The number of the collective that ranks joined and did not finish; 0 if the text gives none."""
    return int(event.values.get("seq", "0"))


def _timed_out(run: Run) -> Iterator[str]:
    """The numbers of the operations that watchdogs report."""
    events = (event for record in run.ranks.values() for event in record.events if event.kind == EventKind.WATCHDOG)
    return (event.values["seq"] for event in events if event.values.get("seq", "").isdigit())


def _did_not_come(
    run: Run, culprits: tuple[int, ...], witnesses: tuple[int, ...], states: Mapping[int, Situation], event: LogEvent
) -> Verdict:
    """The verdict on ranks that others waited for by name."""
    state = states[culprits[0]]
    is_elsewhere = state.kind.is_waiting or state.kind == RankState.FINISHED
    verdict = VerdictKind.SKIPPED_COLLECTIVE if is_elsewhere else VerdictKind.STUCK_ON_CPU
    subtype = Subtype.FINISHED_EARLY if state.kind == RankState.FINISHED else Subtype.NONE
    if not is_elsewhere:
        subtype = state.detail or busy_by_log(run.ranks[culprits[0]])
    where = state.where if is_elsewhere or state.kind == RankState.ON_CPU else ""
    number = event.values.get("missed") or str(_seq(event) + 1)
    what = "the barrier" if event.kind == EventKind.COMM_TIMEOUT else f"collective #{number}"
    return Verdict(
        verdict=verdict, subtype=subtype, culprits=culprits, victims=witnesses,
        op="barrier" if event.kind == EventKind.COMM_TIMEOUT else "", step=run.step_of(culprits[0]),
        confidence=Basis.NAMED_BY_PEERS.confidence,
        headline=f"{rank_list(culprits)} did not come to {what}, by the error text of the ranks that waited"
        + (f"; it was elsewhere{where}" if where else ""),
        evidence=(_said(event), *state.evidence[:2]),
        chain=tuple((witness, culprits[0]) for witness in witnesses),
        next_steps=advice(verdict, subtype) or ("look for a branch that leaves that operation out on this rank",),
    )  # fmt: skip


def _different_calls(run: Run) -> Iterator[Verdict]:
    """Ranks whose call differs from most others', as the ranks themselves and their peers say."""
    said = {int(event.values["own"]): event for event in _events(run, (EventKind.COMM_MISMATCH,))}
    said_calls = {
        int(event.values[name]): event.values[call]
        for name, call in (("names", "call_of_named"), ("own", "call_of_own"))  # what a rank says of itself counts more
        for event in said.values()
        if call in event.values and int(event.values[name]) in run.ranks
    }
    as_named = next((event.values["call_of_named"] for event in said.values() if "others" in event.values), None)
    if as_named is not None:  # all compare with that rank, so those that raised nothing are like it
        said_calls.update({rank: as_named for rank in run.ranks if rank not in said_calls})
    calls = _comparable(said_calls)
    counts = Counter(calls.values()).most_common()
    if len(counts) < 2:
        return
    is_clear = counts[0][1] > sum(count for _, count in counts[1:])
    common = counts[0][0]
    others = tuple(sorted(rank for rank, call in calls.items() if call != common or not is_clear))
    first = next(rank for rank in others if calls[rank] != common)
    yield Verdict(
        verdict=_kind_of_difference(common, calls[first]),
        culprits=others if is_clear else (), suspects=() if is_clear else others,
        victims=tuple(sorted(set(calls) - set(others))) if is_clear else (),
        step=run.step_of(first),
        confidence=(Basis.NAMED_BY_PEERS if is_clear else Basis.TIE).confidence,
        headline=f"{rank_list(others)} called {_short(calls[first])} where the others called {_short(common)}"
        if is_clear
        else f"of {rank_list(others)} some called {_short(common)}, some {_short(calls[first])}: who is wrong is not shown",
        evidence=tuple(_said(event) for event in list(said.values())[:2]),
        next_steps=("look for a branch before that call that depends on the rank or on rank-local data",),
    )  # fmt: skip


def _comparable(calls: Mapping[int, str]) -> Mapping[int, str]:
    """The calls by their operations alone where these differ, or where one gives no more."""
    ops = {rank: call.partition("|")[0] for rank, call in calls.items()}
    return ops if len(set(ops.values())) > 1 or any("|" not in call for call in calls.values()) else calls


def _kind_of_difference(common: str, other: str) -> VerdictKind:
    """By which part of two fingerprints ("op|shape|dtype") differs first."""
    parts = list(zip(common.split("|"), other.split("|"), strict=False))
    kinds = (VerdictKind.OP_MISMATCH, VerdictKind.SIZE_MISMATCH, VerdictKind.DTYPE_MISMATCH)
    return next((kind for kind, (a, b) in zip(kinds, parts, strict=False) if a != b), VerdictKind.OP_MISMATCH)


def _short(call: str) -> str:
    return " ".join(part for part in call.split("|")[:3] if part)


def _events(run: Run, kinds: Sequence[EventKind]) -> Iterator[LogEvent]:
    """The events of these kinds that name ranks, of all ranks and of the job, but for those that their writer outlived."""
    logs = [record.log for record in run.ranks.values() if record.log] + ([run.job_log] if run.job_log else [])
    for log in logs:
        for event in log.events:
            if event.kind in kinds and event.values.get("names") and not _is_history(log, event):
                yield event


OUTLIVED_S = 10.0
SEVERAL = 2  # steps


def _is_history(log: RankLog, event: LogEvent) -> bool:
    """Whether the job ended well, or its steps went on for long, after a text: a caught error, or one that was quoted. Where a
    wait gave up, its rank has caught that if it came to several steps more."""
    if event.source == log.source and log.done_line > event.line:
        return True
    if event.time_s is None:
        return False
    later = [time_s for time_s in log.step_times.values() if time_s > event.time_s]
    is_caught = event.kind == EventKind.COMM_TIMEOUT and len(later) >= SEVERAL
    return is_caught or max(later, default=0.0) - event.time_s > OUTLIVED_S


def _numbers(names: str) -> set[int]:
    return {int(name) for name in names.split(",") if name.isdigit()}


def _said(event: LogEvent) -> Evidence:
    rank = event.rank if event.rank >= 0 else None
    return Evidence(text=event.text[:300], rank=rank, source=f"{event.source}:{event.line}")
