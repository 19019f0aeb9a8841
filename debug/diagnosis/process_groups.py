"""Jobs that hang in the creation of process groups, or because ranks disagree about the members of one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from titan_ckpt.debug.diagnosis.rank_death import is_absent
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import conflicts, rank_list
from titan_ckpt.debug.incident.kinds import EventKind, RankState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Run, Situation, Verdict


def group_creation(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """PG_INIT_HANG when ranks sit in init_process_group or new_group; culprits are those who are not there."""
    waiting = [rank for rank, state in states.items() if state.kind == RankState.IN_INIT and not _is_over(run, state)]
    if not waiting:
        return
    has_run = any(len(run.ranks[rank].operations) for rank in waiting)
    awaited = _awaited_in_store(run)
    others = tuple(rank for rank in run.ranks if rank not in waiting)
    named = tuple(rank for rank in sorted(awaited) if rank in others)
    seen = tuple(rank for rank in others if not is_absent(run.ranks[rank]))
    culprits = named or seen or others
    if len(culprits) > 1 and not seen:
        culprits = ()  # nothing was collected of any of them
    if any(states[rank].kind == RankState.DEAD for rank in culprits) or (has_run and not culprits):
        return  # the death is the cause, which the wait graph finds
    first = states[waiting[0]]
    call = first.call or "init_process_group"
    evidence = [item for rank in (*culprits[:3], waiting[0]) for item in states[rank].evidence[:2]]
    if named:
        evidence.insert(0, Evidence(text=f"{awaited[named[0]]} ranks waited for the store key of rank {named[0]}"))
    is_one = bool(named) or len(culprits) == 1
    basis = Basis.INIT_AWAITED if is_one else Basis.INIT_ABSENT if culprits else Basis.INIT_ALL
    yield Verdict(
        verdict=VerdictKind.PG_INIT_HANG,
        subtype=Subtype.NEW_GROUP if has_run or call == "new_group" else Subtype.NONE,
        culprits=culprits,
        victims=tuple(waiting),
        op=call,
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


def _is_over(run: Run, state: Situation) -> bool:
    """Whether a rank has issued operations after it was seen in init_process_group: that stack is an old one."""
    return state.call == "init_process_group" and len(run.ranks[state.rank].operations) > 0


def _headline(culprits: tuple[int, ...], others: tuple[int, ...], states: Mapping[int, Situation], call: str) -> str:
    if not culprits and others:
        return f"ranks wait in {call}; nothing was collected of ranks {', '.join(map(str, others[:8]))}, one of which is late"
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
        counts.update({int(event.values["rank"]) for event in waits if "rank" in event.values})
    return counts


def group_conflicts(run: Run) -> Iterator[Verdict]:
    """PG_CONFIG_CONFLICT: the ranks wait for each other in groups of one name and different members."""
    for conflict in conflicts(run):
        used = {members: ranks for members, ranks in conflict.users.items() if ranks}
        if len(used) < 2:
            continue
        ordered = sorted(used, key=lambda members: (-len(used[members]), members))
        most, others = used[ordered[0]], [used[members] for members in ordered[1:]]
        is_tie = len(most) == len(others[0])
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
