"""Jobs that hang in the creation of process groups, or because ranks disagree about the members of one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from titan_ckpt.debug.diagnosis.rank_death import is_absent
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import conflicts, rank_list
from titan_ckpt.debug.incident.frames import INIT
from titan_ckpt.debug.incident.kinds import EventKind, RankState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Frame, Group, RankRecord, Run, Situation, Verdict
from titan_ckpt.debug.incident.waits import pending

_CALL = "init_process_group"


def group_creation(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """PG_INIT_HANG when ranks sit in init_process_group or new_group; culprits are those who are not there."""
    waiting = [rank for rank, state in states.items() if state.kind == RankState.IN_INIT and not _is_over(run, state)]
    if not waiting:
        return
    disagreements = list(group_conflicts(run))
    if disagreements:
        yield from disagreements
        return
    has_run = any(len(run.ranks[rank].operations) for rank in waiting)
    awaited = _awaited_in_store(run)
    others = tuple(rank for rank in run.ranks if rank not in waiting)
    if (behind := _behind(run, waiting, others)) is not None:
        yield _passed_over(behind, waiting, states)
        return
    came = () if has_run else tuple(r for r in others if _has_come(run.ranks[r]) or _is_past(run, states, r, waiting))
    if came and not set(others) - set(came):
        yield _lost_each_other(waiting, came, states)
        return
    waiting, others = [*waiting, *came], tuple(rank for rank in others if rank not in came)
    named = tuple(rank for rank in sorted(awaited) if rank in others)
    seen = tuple(rank for rank in others if not is_absent(run.ranks[rank]))
    culprits = named or _fewer_in_init(waiting, others, states) or seen or others
    if not named and not seen:
        culprits = ()  # nothing was collected of any of them
    if any(_has_gone_on(run, rank, waiting) for rank in culprits):
        yield _out_of_step(run, waiting, culprits, states)
        return
    if any(states[rank].kind == RankState.DEAD for rank in culprits) or (has_run and not culprits):
        return  # the death is the cause, which the wait graph finds
    if set(culprits) <= set(waiting) and culprits:
        yield _went_alone(culprits, others, states)
        return
    yield _never_came(run, waiting, culprits, named, states)


def _never_came(
    run: Run, waiting: Sequence[int], culprits: tuple[int, ...], named: tuple[int, ...], states: Mapping[int, Situation]
) -> Verdict:
    """The verdict on ranks that are not where the others make a group; `named`: those whose store key was waited for."""
    has_run = any(len(run.ranks[rank].operations) for rank in waiting)
    others = tuple(rank for rank in run.ranks if rank not in waiting)
    call = states[waiting[0]].call or "init_process_group"
    evidence = [item for rank in (*culprits[:3], waiting[0]) for item in states[rank].evidence[:2]]
    if named:
        evidence.insert(
            0, Evidence(text=f"{_awaited_in_store(run)[named[0]]} ranks waited for the store key of rank {named[0]}")
        )
    is_one = bool(named) or len(culprits) == 1
    basis = Basis.INIT_AWAITED if is_one else Basis.INIT_ABSENT if culprits else Basis.INIT_ALL
    return Verdict(
        verdict=VerdictKind.PG_INIT_HANG,
        subtype=Subtype.NEW_GROUP if has_run or call == "new_group" else Subtype.NONE,
        culprits=culprits,
        victims=tuple(waiting),
        op=call,
        suspects=others if not culprits and len(others) == 1 else (),
        confidence=basis.confidence,
        headline=_headline(culprits, others, states, call),
        evidence=tuple(evidence),
        chain=tuple((rank, culprits[0]) for rank in waiting) if culprits else (),
        next_steps=(
            "look at that rank's line: what runs before the process group is made (downloads, locks, another rendezvous)",
            "call new_group on every rank, members or not"
            if has_run
            else "check MASTER_ADDR, MASTER_PORT and WORLD_SIZE on that host",
        ),
    )  # fmt: skip


def _has_come(record: RankRecord) -> bool:
    """Whether a rank was in init_process_group too: it issued operations since, failed in it, or logged last that it calls it."""
    failed = [event for event in record.events if "type" in event.values]
    lines = [frame.text for event in failed for frame in event.calls]
    last = record.log.tail[-1] if record.log is not None and record.log.tail else ""
    has_failed_in_it = any(event.values.get("call", "") in INIT for event in failed)
    return len(record.operations) > 0 or has_failed_in_it or any(_CALL in text for text in (*lines, last))


def _is_past(run: Run, states: Mapping[int, Situation], rank: int, waiting: Sequence[int]) -> bool:
    """Whether a rank's stack is beyond init_process_group: in an operation, or at a later line of the function that calls it."""
    calls = [frame for other in waiting if states[other].call == _CALL and (frame := states[other].frame) is not None]
    return (bool(calls) and states[rank].kind in (RankState.IN_COLLECTIVE, RankState.IN_P2P)) or any(
        (frame.file, frame.function) == (call.file, call.function) and frame.line > call.line
        for frame in _main_frames(run, rank)
        for call in calls
    )


def _main_frames(run: Run, rank: int) -> Sequence[Frame]:
    mains = [stack.main for stack in run.ranks[rank].stacks if stack.main is not None]
    return mains[0].frames if mains else ()


def _lost_each_other(waiting: Sequence[int], came: Sequence[int], states: Mapping[int, Situation]) -> Verdict:
    """All came to init_process_group, and some are past it or failed in it: a matter of addresses, ports and old entries of the
    store, of which nothing shows whose they are."""
    first, other = states[waiting[0]], states[came[0]]
    return Verdict(
        verdict=VerdictKind.PG_INIT_HANG, victims=tuple(waiting), op="init_process_group",
        confidence=Basis.INIT_ALL.confidence,
        headline=f"all ranks came to init_process_group: {rank_list(waiting)} wait{'s' if len(waiting) == 1 else ''} in "
        f"it, {rank_list(came)} failed in it or passed it: they do not find each other (address, port, world size, what an "
        "earlier attempt left in the store)",
        evidence=(*other.evidence[:2], *first.evidence[:2]),
        next_steps=(
            "check MASTER_ADDR, MASTER_PORT and WORLD_SIZE on each host",
            "after a restart: gloo may have found addresses of the attempt before in the launcher's store; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or restart the launcher, too",
        ),
    )  # fmt: skip


def _has_gone_on(run: Run, rank: int, waiting: Sequence[int]) -> bool:
    """Whether a rank waits in the first operation of a group that none of the ranks which make one has used: so it has made its
    groups, and they are at another one."""
    table = run.ranks[rank].operations
    open_rows = np.flatnonzero(pending(table))
    if not len(open_rows):
        return False
    entry = table[int(open_rows[0])]
    group = int(entry["group"])
    used = any(bool((run.ranks[other].operations["group"] == group).any()) for other in waiting)
    return int((table["group"] == group).sum()) == 1 and len(np.unique(table["group"])) > 1 and not used


def _out_of_step(run: Run, waiting: Sequence[int], others: Sequence[int], states: Mapping[int, Situation]) -> Verdict:
    """Some ranks are done with making groups, others are at one that these do not make: nobody can tell whose order is wrong."""
    first, other = states[waiting[0]], states[others[0]]
    return Verdict(
        verdict=VerdictKind.PG_INIT_HANG, subtype=Subtype.NEW_GROUP, suspects=tuple(sorted({*waiting, *others})),
        op=first.call or "new_group", step=run.step_of(waiting[0]), confidence=Basis.GROUP_TIE.confidence,
        headline=f"{rank_list(waiting)} wait in {first.call or 'new_group'}{first.where}; past it, {rank_list(others)} "
        f"wait{'s' * (len(others) == 1)}{other.where}: some ranks make their groups in another order, or leave one out",
        evidence=(*first.evidence[:2], *other.evidence[:2]),
        next_steps=("call new_group on every rank, members or not, in the same order",),
    )  # fmt: skip


def _went_alone(culprits: tuple[int, ...], others: tuple[int, ...], states: Mapping[int, Situation]) -> Verdict:
    """A few ranks make a process group where most ranks wait in an operation."""
    first, other = states[culprits[0]], states[others[0]]
    return Verdict(
        verdict=VerdictKind.PG_INIT_HANG,
        subtype=Subtype.NEW_GROUP,
        culprits=culprits,
        victims=others,
        op=other.call,
        confidence=Basis.INIT_ABSENT.confidence,
        headline=f"{rank_list(culprits)} called {first.call or 'new_group'}{first.where}, where the others do not come: they "
        f"wait in {other.call or 'an operation'}{other.where}",
        evidence=(*first.evidence[:2], *other.evidence[:1]),
        chain=tuple((rank, culprits[0]) for rank in others),
        next_steps=("call new_group on every rank, members or not, in the same order",),
    )


def _behind(run: Run, waiting: Sequence[int], others: Sequence[int]) -> tuple[tuple[int, ...], int, Group] | None:
    """Ranks that make another group than the one that a rank outside already has with them; that rank, and its group."""
    known = {rank: {group.members for group in run.ranks[rank].groups} for rank in waiting}
    for rank in others:
        for group in run.ranks[rank].groups:
            behind = tuple(other for other in group.members if other in waiting and group.members not in known[other])
            if behind and all(known[other] for other in behind):
                return behind, rank, group
    return None


def _passed_over(
    found: tuple[tuple[int, ...], int, Group], waiting: Sequence[int], states: Mapping[int, Situation]
) -> Verdict:
    """Ranks that took the creations of groups in another order."""
    culprits, ahead, group = found
    first, other = states[culprits[0]], states[ahead]
    victims = tuple(sorted({ahead, *waiting} - set(culprits)))
    return Verdict(
        verdict=VerdictKind.PG_INIT_HANG,
        subtype=Subtype.NEW_GROUP,
        culprits=culprits,
        victims=victims,
        op=first.call,
        confidence=Basis.INIT_ABSENT.confidence,
        headline=f"{rank_list(culprits)} called {first.call or 'new_group'}{first.where} for another group than group "
        f"{group.name} ({rank_list(group.members)}), which rank {ahead} made before: they make groups in another order",
        evidence=(*first.evidence[:2], *other.evidence[:1]),
        chain=tuple((rank, culprits[0]) for rank in victims),
        next_steps=("call new_group on every rank, members or not, in the same order",),
    )


def _fewer_in_init(waiting: Sequence[int], others: Sequence[int], states: Mapping[int, Situation]) -> tuple[int, ...]:
    """The ranks that make a group while more others wait in an operation: then these few took another way than most."""
    elsewhere = [rank for rank in others if states[rank].kind in (RankState.IN_COLLECTIVE, RankState.IN_P2P)]
    return tuple(waiting) if len(elsewhere) == len(others) > len(waiting) else ()


def _made_by_members_alone(used: Mapping[tuple[int, ...], tuple[int, ...]]) -> tuple[int, ...] | None:
    """The group that exactly its members made, while ranks outside of it gave its name to a larger one: they alone called
    new_group for it. (torch numbers groups by calls, so all ranks must make each of them, members or not.)"""
    found = [
        members
        for members, users in used.items()
        if users == members and any(set(members) < set(other) and set(used[other]) - set(members) for other in used)
    ]
    return found[0] if len(found) == 1 else None


def _is_one_call(run: Run, name: str, lists: Iterable[tuple[int, ...]]) -> bool:
    """Whether the program gave the group the same description wherever it has other members: the ranks disagree in one call."""
    groups = [*run.groups, *(group for record in run.ranks.values() for group in record.groups)]
    found = [{g.description for g in groups if g.name == name and g.members == members} for members in lists]
    return bool(found) and bool(set.intersection(*found) - {"", "undefined", name})


def _is_over(run: Run, state: Situation) -> bool:
    """Whether a rank has issued operations after it was seen in init_process_group: that stack is an old one."""
    return state.call == "init_process_group" and len(run.ranks[state.rank].operations) > 0


def _headline(culprits: tuple[int, ...], others: tuple[int, ...], states: Mapping[int, Situation], call: str) -> str:
    if not culprits and others:
        late = "" if len(others) == 1 else ", one of which is late"
        return f"ranks wait in {call}; nothing was collected of {rank_list(others)}{late}"
    if not culprits:
        return f"all ranks wait in {call}: they do not find each other (address, port, world size)"
    frame = states[culprits[0]].frame
    where = f"; it is at {frame.place}" if frame else ""
    who = f"rank {culprits[0]}" if len(culprits) == 1 else "ranks " + ", ".join(map(str, culprits[:8]))
    return f"{who} never came to {call}, where the others wait{where}"


def _awaited_in_store(run: Run) -> Mapping[int, int]:
    """How many ranks waited for each rank's key in the rendezvous store."""
    counts: Counter[int] = Counter()
    for record in run.ranks.values():
        waits = (event for event in record.events if event.kind == EventKind.STORE_WAIT)
        names = (event.values.get("awaited") or event.values.get("rank") for event in waits)
        counts.update({int(name) for name in names if name})
    return counts


def group_conflicts(run: Run) -> Iterator[Verdict]:
    """PG_CONFIG_CONFLICT: the ranks wait for each other in groups of one name and different members."""
    for conflict in conflicts(run):
        used = {members: ranks for members, ranks in conflict.users.items() if ranks}
        if len(used) < 2:
            continue
        ordered = sorted(used, key=lambda members: (-len(used[members]), members))
        alone = None if _is_one_call(run, conflict.name, used) else _made_by_members_alone(used)
        # One rank alone outside: it may as well list itself by mistake.
        is_tie = alone is not None and len(set().union(*used) - set(alone)) == 1
        if alone is not None:
            ordered = [*(members for members in ordered if members != alone), alone]
        most, others = used[ordered[0]], [used[members] for members in ordered[1:]]
        is_tie = is_tie or (alone is None and len(most) == len(others[0]))
        culprits = tuple(sorted({rank for ranks in others for rank in ranks} | set(most if is_tie else ())))
        yield Verdict(
            verdict=VerdictKind.PG_CONFIG_CONFLICT, culprits=culprits, victims=() if is_tie else most, group=conflict.name,
            step=run.step_of(culprits[0]), confidence=(Basis.GROUP_TIE if is_tie else Basis.GROUP_MINORITY).confidence,
            headline=f"ranks disagree about who belongs to group {conflict.name}: "
            + "; ".join(
                f"{rank_list(used[members])} say{'s' * (len(used[members]) == 1)} {rank_list(members)}" for members in ordered[:3]
            ),
            evidence=tuple(
                Evidence(text=f"group {conflict.name} has the members {rank_list(members)}", rank=used[members][0], source="dump")
                for members in ordered[:4]
            ),
            chain=() if is_tie else tuple((rank, culprits[0]) for rank in most),
            next_steps=(
                "make every rank call new_group (or init_device_mesh) with the same ranks and in the same order",
                "look for a group that is made under a condition which differs between ranks",
            ),
        )  # fmt: skip
