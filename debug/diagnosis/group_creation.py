"""Jobs that hang while process groups are made. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from titan_ckpt.debug.diagnosis.rank_state import DEAD, IN_INIT, Situation, awaited_in_store, is_absent
from titan_ckpt.debug.incident.records import Evidence, Run, Verdict


def initialisation(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """PG_INIT_HANG when ranks sit in init_process_group or new_group; culprits are those who are not there."""
    waiting = [rank for rank, state in states.items() if state.kind == IN_INIT and not _is_over(run, state)]
    if not waiting:
        return
    has_run = any(len(run.ranks[rank].operations) for rank in waiting)
    awaited = awaited_in_store(run)
    others = tuple(rank for rank in run.ranks if rank not in waiting)
    named = tuple(rank for rank in sorted(awaited) if rank in others)
    seen = tuple(rank for rank in others if not is_absent(run.ranks[rank]))
    culprits = named or seen or others
    if len(culprits) > 1 and not seen:
        culprits = ()  # nothing was collected of any of them
    if any(states[rank].kind == DEAD for rank in culprits) or (has_run and not culprits):
        return  # the death is the cause; the graph says so
    first = states[waiting[0]]
    call = first.call or "init_process_group"
    evidence = [item for rank in (*culprits[:3], waiting[0]) for item in states[rank].evidence[:2]]
    if named:
        evidence.insert(0, Evidence(text=f"{awaited[named[0]]} ranks waited for the store key of rank {named[0]}"))
    yield Verdict(
        verdict="PG_INIT_HANG",
        subtype="new_group" if has_run or call == "new_group" else "",
        culprits=culprits,
        victims=tuple(waiting),
        op=call,
        confidence=0.95 if named or len(culprits) == 1 else 0.75 if culprits else 0.5,
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
    where = f"; it is at {frame.file}:{frame.line}" if frame else ""
    who = f"rank {culprits[0]}" if len(culprits) == 1 else "ranks " + ", ".join(map(str, culprits[:8]))
    return f"{who} never came to {call}, where the others wait{where}"
