"""Where ranks waited by their tracebacks and stacks, and the few that waited elsewhere than most. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from titan_ckpt.debug.diagnosis.from_logs.by_source import (
    EXCHANGES,
    ROOTED,
    may_wait_for_one,
    receivers_circle,
    without_group,
    wrong_peer,
)
from titan_ckpt.debug.diagnosis.from_logs.watchdogs import INFERRED, timed_out, wait_apart, wait_together
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.frames import INIT, is_library
from titan_ckpt.debug.incident.kinds import EventKind, RankState, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, LogEvent, RankRecord, Run, Situation, Verdict

SYMPTOMS = (
    EventKind.COMM_TIMEOUT,
    EventKind.COMM_CLOSED,
    EventKind.WATCHDOG,
    EventKind.COMM_MISMATCH,
    EventKind.COMM_ERROR,
)


def deviant(run: Run, witnesses: Sequence[int], states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """All waited, but not in the same call: a small minority took another way. In send and recv ranks differ by right."""
    calls = {rank: _known_as(waited_in(run.ranks[rank], states[rank])) for rank in witnesses}
    lines = {rank: _place(states[rank]) for rank in witnesses}
    places = lines if not all(calls.values()) and all(lines.values()) else {r: calls[r] or lines[r] for r in witnesses}
    counts = Counter(place for place in places.values() if place).most_common()
    if any(states[rank].kind == RankState.IN_P2P for rank in witnesses) or any(map(_is_p2p, calls.values())):
        if len(witnesses) == len(states):
            is_circle = all(_bare(call) in _RECEIVES for call in calls.values())
            yield from _all_receive(run, witnesses, states) if is_circle else wrong_peer(run, states)
        return
    if found := [*without_group(run, witnesses, states)]:
        yield from found
        return
    common = counts[0][0] if len(counts) == 2 and 2 * counts[1][1] <= counts[0][1] else _routine(run, places)
    culprits = tuple(rank for rank, place in places.items() if place and place != common)
    are_apart = _are_of_other_groups(run, calls) or wait_apart(run, culprits, witnesses)
    if not common or not culprits or are_apart or _are_in_start([*calls.values()]):
        return
    first, other = states[culprits[0]], states[next(rank for rank, place in places.items() if place == common)]
    basis = Basis.OTHER_WAIT if len(culprits) < len(witnesses) - len(culprits) else Basis.LEFT_ROUTINE
    is_rooted = _is_rooted(run, witnesses, culprits, calls, other.rank)
    basis = Basis.LEFT_ROOTED if is_rooted else basis
    key = next(
        (event.values.get("key", "") for event in run.ranks[culprits[0]].events if event.kind == EventKind.STORE_WAIT),
        "",
    )
    if key and not calls[culprits[0]]:
        yield _awaits_key(run, culprits, key, first, other)
        return
    yield Verdict(
        verdict=VerdictKind.SKIPPED_COLLECTIVE,
        culprits=tuple(witnesses) if is_rooted else culprits,
        victims=() if is_rooted else tuple(rank for rank in witnesses if rank not in culprits),
        op=calls[other.rank],
        step=run.step_of(culprits[0]),
        confidence=basis.confidence,
        headline=f"{rank_list(culprits)} waited in {calls[culprits[0]] or 'another operation'}"
        + first.where
        + f" while the others waited in {calls[other.rank] or 'an operation of torch'}{other.where}: it skipped one, or took "
        "them in another order",
        evidence=(*first.evidence[:1], *other.evidence[:1]),
        chain=tuple((rank, culprits[0]) for rank in witnesses if rank not in culprits),
        next_steps=(
            "look for a branch before that line that depends on the rank or on rank-local data",
            "with the recorder on, or with dumps, this would be certain",
        ),
    )


MOST_APART = 100


def _is_rooted(run: Run, ranks: Sequence[int], culprits: Sequence[int], calls: Mapping[int, str], other: int) -> bool:
    """Whether those that wait elsewhere than most may wait for one of these: in a smaller group, or in an operation with a root.
    Not if most are in the step that all repeat, or watchdogs give both one number."""
    is_step = _call_of(run.ranks[other]) in ROUTINE or _number(calls[culprits[0]]) == _number(calls[other]) != ""
    is_open = any(
        _bare(calls[rank]) in EXCHANGES if is_step else may_wait_for_one(run.ranks[rank], _bare(calls[rank]))
        for rank in culprits
    )
    return (
        is_open
        or any(_is_unknown(run.ranks[rank]) for rank in culprits)
        or _bare(calls[other]) in ROOTED
        or wait_together(run, culprits)
        or any(in_subgroup(run.ranks[rank]) for rank in ranks)
    )


def _are_of_other_groups(run: Run, calls: Mapping[int, str]) -> bool:
    """Whether watchdogs give numbers so far apart that they count in groups of their own: in one group nobody completes what
    another has not issued. Where they name groups, these tell, unless all wait in one operation."""
    works = (timed_out(run.ranks[rank]) for rank in calls)
    is_named = any(work is not None and work.group not in ("", INFERRED) for work in works)
    numbers = [int(number) for call in calls.values() if (number := _number(call)).isdigit()]
    is_told = is_named and len({*map(_bare, calls.values())}) > 1
    return not is_told and len(numbers) == len(calls) > 0 and max(numbers) - min(numbers) > MOST_APART


def _are_in_start(calls: Sequence[str]) -> bool:
    """Whether some have not joined the job yet, which others have: these skipped nothing."""
    return any(_bare(call) == "init_process_group" for call in calls)


def _awaits_key(run: Run, culprits: tuple[int, ...], key: str, first: Situation, other: Situation) -> Verdict:
    """A program's own wait for a key of the store, which nobody has set, while the others wait in an operation."""
    return Verdict(
        verdict=VerdictKind.STUCK_ON_CPU, culprits=culprits, step=run.step_of(culprits[0]),
        confidence=Basis.OTHER_WAIT.confidence,
        headline=f"{rank_list(culprits)} waited for the store's key {key!r}{first.where}, which nobody had set, while the others "
        f"waited in an operation{other.where}",
        evidence=(*first.evidence[:1], *other.evidence[:1]),
        next_steps=("look for where that key is set: is it spelled alike, and is that code reached on the rank that sets it?",),
    )  # fmt: skip


_RECEIVES = ("recv", "irecv", "recv_object_list")


def _all_receive(run: Run, ranks: Sequence[int], states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """Every rank waits to receive, so that none sends. Of those in the circle any may have left out its send; the others wait
    behind it."""
    circle = receivers_circle(run, states)
    if circle == ():
        return
    members = tuple(ranks) if circle is None else circle
    is_sure = len(members) == len(ranks) and (circle is not None or len(ranks) == 2)
    who = "every rank waits" if len(members) == len(ranks) else f"{rank_list(members)} wait for each other"
    yield Verdict(
        verdict=VerdictKind.P2P_CYCLE, culprits=members if is_sure else (), suspects=() if is_sure else members, op="recv",
        step=run.step_of(ranks[0]), confidence=Basis.ALL_IN_P2P.confidence,
        headline=f"{who} in recv at the same time, and none sends: a P2P cycle",
        evidence=tuple(item for rank in members[:4] for item in states[rank].evidence[:1]),
        next_steps=("reverse the order on every second rank, or use batch_isend_irecv",),
    )  # fmt: skip


def _bare(call: str) -> str:
    """The operation of a call, without the number that a watchdog gives it."""
    return call.partition(" ")[0]


def _number(call: str) -> str:
    """The number that a watchdog gives the operation of a call: operations of one number are one, if the ranks agree."""
    return call.partition(" #")[2]


def _known_as(call: str) -> str:
    """The name of an operation: what init_process_group calls in turn is a part of it."""
    return "init_process_group" if call in INIT and call != "new_group" else call


def _is_p2p(call: str) -> bool:
    return "send" in call or "recv" in call


def _is_unknown(record: RankRecord) -> bool:
    """Whether a rank's error shows its own line alone, and no call of torch below it: perhaps the wait for a send or recv, in
    which ranks differ by right."""
    is_error = event_of(record, SYMPTOMS, needs="type") is not None
    return is_error and not any(event_of(record, SYMPTOMS, needs=name) for name in ("call", "below"))


def _place(state: Situation) -> str:
    """The user's line of a wait below torch, which has no name of its own in a traceback."""
    return state.frame.place if state.frame else ""


def _routine(run: Run, places: Mapping[int, str]) -> str:
    """Of two parties, the place of the one that is in the step that all repeat: the backward pass, whose operations DDP and
    FSDP issue themselves. The other party called something explicitly, so it left the step or did not take it."""
    below = {place for rank, place in places.items() if _call_of(run.ranks[rank]) in ROUTINE}
    distinct = {place for place in places.values() if place}
    return next(iter(below)) if len(below) == 1 and len(distinct) == 2 and all(places.values()) else ""


_SUBGROUP = re.compile(r"\b(?:process_)?group ?= ?(?!None\b|(?:\w{1,40}\.){0,4}WORLD\b)\w")
# Modules of torch that name their group always.
_TENSOR = ("/torch/distributed/tensor/", "/torch/distributed/_functional_collectives.py")


def in_subgroup(record: RankRecord) -> bool:
    """Whether the traceback of a wait shows that it was in a group that the program named: whoever waits there waits for a
    member of that group, which may be elsewhere with all others."""
    event = event_of(record, SYMPTOMS, needs="type")
    calls = event.calls if event is not None else ()
    return any(
        any(part in frame.file for part in _TENSOR)
        or (not is_library(frame) and _SUBGROUP.search(frame.text) is not None)
        for frame in calls
    )


ROUTINE = ("backward", "forward")


def _call_of(record: RankRecord) -> str:
    event = event_of(record, SYMPTOMS, needs="below")
    return event.values["below"] if event else ""


def waited_in(record: RankRecord, state: Situation) -> str:
    """The operation a witness waited in, from its stack, its traceback or the watchdog's line."""
    if state.kind.is_waiting and state.call not in ("", "wait"):
        return state.call
    event = event_of(record, SYMPTOMS, needs="call") or event_of(record, (EventKind.WATCHDOG,), needs="op")
    if event is None:
        return ""
    return event.values.get("call") or f"{event.values['op'].lower()} #{event.values.get('seq', '?')}"


def event_of(record: RankRecord, kinds: Sequence[str], needs: str = "") -> LogEvent | None:
    return next(
        (event for event in record.events if event.kind in kinds and (not needs or needs in event.values)), None
    )


def said(event: LogEvent) -> Evidence:
    return Evidence(text=event.text[:200], rank=event.rank, source=f"{event.source}:{event.line}")
