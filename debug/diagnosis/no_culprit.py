"""No detector found a fault: the job is healthy, or the evidence does not decide and more must be collected. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from titan_ckpt.debug.diagnosis.from_logs.at_the_start import refusal
from titan_ckpt.debug.diagnosis.from_logs.elsewhere import waited_in
from titan_ckpt.debug.diagnosis.from_logs.reported import blaming, facts, faults, parting, suspects
from titan_ckpt.debug.diagnosis.looks import stands_still
from titan_ckpt.debug.diagnosis.looks_well import leaving, timer_of
from titan_ckpt.debug.diagnosis.rank_death import event_evidence, is_absent, last_error
from titan_ckpt.debug.diagnosis.standstill import Pace
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import num_ranks, rank_list
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import EventKind, RankState, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Frame, Run, Situation, Verdict

NO_FAULT = (EventKind.PREEMPTED, EventKind.TIME_LIMIT)


def stands_in_torch(run: Run, states: Mapping[int, Situation]) -> bool:
    """Whether stacks, and no operations, show more than half of the ranks in C++ of torch that may wait for others: whoever took
    the stacks of a job had a reason to."""
    if any(record.dumps for record in run.ranks.values()):
        return False
    return 2 * sum(state.kind.may_wait for state in states.values()) > len(states)


def says_done(run: Run) -> bool:
    """Whether logs say last of all that training is done; how its processes ended they do not show."""
    logs = [record.log for record in run.ranks.values() if record.log] or ([run.job_log] if run.job_log else [])
    return bool(logs) and all(log.done_line > log.last_step_line for log in logs)


_ONE_LOOK = (
    "the job runs, or has just stopped: one look cannot tell",
    "look again in a minute: only a job that has not gone on between two looks hangs",
)
_LOOK_AT_END = "look whether its processes are gone, and at the launcher's exit code: 0 means that all is well"
_LOOK_WHO = (
    "look who ended it: a time limit, a preemption, scancel, ctrl-c, or torchrun after the failure of another host"
)


def running(pace: Pace | None, suspected: Verdict | None, *, is_done: bool = False, is_ending: bool = False) -> Verdict:
    """RUNNING: what one look shows of a job that may well go on, and what a second one would have to show; or that it was ended
    while it went on: INSUFFICIENT_DATA if only some of its ranks were. `is_done`: its logs say that training is done;
    `is_ending`: its recorders have just stopped."""
    headline, next_step = _ONE_LOOK
    told = pace.told if pace is not None else None
    if told is not None:
        suspected = None if suspected is not None and suspected.is_undecided else suspected
        lost = "" if told.is_all else ", and the others lost their connections to it"
        headline, next_step = f"{told.text}{lost}; until then the job went on", _LOOK_WHO
    facts = "no error, no exit code, and nothing that has waited for long"
    if is_done:
        facts += "; the logs say that training is done, but not that the processes ended"
    if is_ending:
        facts = "the recorders stopped in order a moment ago; no exit status has followed yet"
    if pace is not None:
        facts = pace.text
    if suspected is not None:
        facts += f"; {'if that was a hang' if told else 'if it does not go on'}: {suspected.headline}"
    return Verdict(
        verdict=VerdictKind.RUNNING if told is None or told.is_all else VerdictKind.INSUFFICIENT_DATA,
        suspects=suspected.culprits if suspected else (),
        group=suspected.group if suspected else "",
        seq=suspected.seq if suspected else None,
        op=suspected.op if suspected else "",
        confidence=Basis.ONE_LOOK.confidence,
        headline=headline,
        evidence=(Evidence(text=facts), *(suspected.evidence[:4] if suspected else ())),
        next_steps=(_LOOK_AT_END if is_done or is_ending else next_step,),
    )


def all_gone(run: Run, suspected: Verdict) -> Verdict:
    """INSUFFICIENT_DATA: all processes ended and left nothing that tells which went first, or why."""
    return Verdict(
        verdict=VerdictKind.INSUFFICIENT_DATA,
        confidence=Basis.UNDECIDED.confidence,
        headline=f"all processes are gone ({num_ranks(len(run.ranks))}), and none left an end of its own",
        evidence=(
            Evidence(text="SIGKILL, os._exit or the end of the host leaves no trace in a recorder"),
            *(suspected.evidence[:4] if suspected.verdict != VerdictKind.RUNNING else ()),
        ),
        next_steps=(
            "look at the console of the launcher for exit codes and signals, and give it to debug with the recorders' folder",
            "look at `dmesg -T` on the host (out of memory), and at the scheduler's accounting (sacct, kubectl describe pod)",
        ),
    )


def undecided(run: Run, edges: Sequence[Edge], states: Mapping[int, Situation]) -> Verdict:
    """INSUFFICIENT_DATA: no culprit; lists waiting ranks, missing ranks, and what evidence would decide."""
    in_torch = stands_in_torch(run, states)
    waiting = {rank for rank, state in states.items() if state.kind.is_waiting or (in_torch and state.kind.may_wait)}
    waiting |= {edge.waiter for edge in edges}
    unseen = [rank for rank, record in run.ranks.items() if is_absent(record)]
    failed = [rank for rank, record in run.ranks.items() if record.exit and record.exit.code]
    errors = {rank: event for rank, record in run.ranks.items() if (event := last_error(record)) is not None}
    own = tuple(rank for rank, event in errors.items() if not event.kind.is_communication)
    few = next((some for some in (own, _elsewhere(run, states)) if 0 < 2 * len(some) < len(run.ranks)), ())
    chain = tuple(dict.fromkeys((edge.waiter, edge.awaited) for edge in edges if edge.awaited in unseen))
    waits = f"{num_ranks(len(waiting))} wait{'s' * (len(waiting) < 2)}"
    counts = f"{waits}, {len(unseen)} left nothing, {len(failed)} ended with an error"
    counts = counts if run.ranks else "no line shows which rank wrote it"
    return Verdict(
        verdict=VerdictKind.INSUFFICIENT_DATA,
        victims=tuple(sorted(waiting)),
        confidence=Basis.UNDECIDED.confidence,
        headline=_fault(run) or _headline(run, unseen, bool(waiting)),
        suspects=tuple(unseen) if waiting and len(unseen) == 1 else suspects(run) or few,
        evidence=(
            Evidence(text=counts),
            *([Evidence(text="who was looked at again was at the same place")] if stands_still(run) else ()),
            *facts(run),
            *islice(parting(run), MOST_WAITS),
            *(event_evidence(event) for event in [*errors.values(), *blaming(run)][:MOST_WAITS]),
            *_who_waited(run, states),
            *_timed(run, states),
            *_leaving(run),
            *_aborted(run),
            *(Evidence(text=flag.text, source=flag.source) for flag in run.flags[:3]),
        ),
        chain=chain[:64],
        next_steps=_to_collect(run, unseen),
    )


def _leaving(run: Run) -> Iterator[Evidence]:
    """Whose process has not come to its end after its recorder stopped in order."""
    found = leaving(run)
    if found:
        rest = "its process is gone" if found[0].is_gone else "the process may hang in an exit handler"
        text = f"its recorder stopped in order, and no exit status followed: {rest}"
        others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        yield Evidence(
            text=f"{text}{others}", rank=found[0].rank, source=found[0].heartbeat.source if found[0].heartbeat else ""
        )


MOST_WAITS = 4


def _timed(run: Run, states: Mapping[int, Situation]) -> tuple[Evidence, ...]:
    """Where the ranks were whose own timers went off, if they are not seen to wait; those at one place together."""
    places: dict[Frame | None, list[tuple[int, str]]] = {}
    for rank, record in run.ranks.items():
        if (stack := timer_of(record)) is not None and not states[rank].kind.is_waiting:
            frames = stack.main.frames if stack.main is not None else ()
            places.setdefault(user_frame(frames, run.wrappers), []).append((rank, stack.source))
    found = sorted(places.items(), key=lambda item: -len(item[1]))[:MOST_WAITS]
    return tuple(
        Evidence.at(
            frame,
            text=f"a timer of faulthandler went off on {rank_list([rank for rank, _ in stacks])}"
            f"{f' in {frame.function}' if frame else ''}",
            rank=None,
            source=stacks[0][1],
        )
        for frame, stacks in found
    )


def _who_waited(run: Run, states: Mapping[int, Situation]) -> tuple[Evidence, ...]:
    """Where the ranks waited, or may have, those at one place together; then those that were elsewhere."""
    places: dict[tuple[str, str], list[int]] = {}
    for rank, state in states.items():
        if state.kind.may_wait:
            places.setdefault((waited_in(run.ranks[rank], state) or state.call, state.where), []).append(rank)
    found = sorted(places.items(), key=lambda item: -len(item[1]))[:MOST_WAITS]
    waited = tuple(
        replace(
            states[ranks[0]].evidence[0], rank=None, text=f"{rank_list(ranks)} {_waited(states[ranks[0]], call)}{where}"
        )
        for (call, where), ranks in found
        if states[ranks[0]].evidence
    )
    return (*waited, *(states[rank].evidence[0] for rank in _elsewhere(run, states)[:MOST_WAITS]))


def _waited(state: Situation, call: str) -> str:
    return f"waited in {call or 'a call'}" if state.kind.is_waiting else f"may wait in {call or 'torch'}"


def _elsewhere(run: Run, states: Mapping[int, Situation]) -> tuple[int, ...]:
    """Those whose stacks show them in the program's own code, while most may wait below torch or all stand still."""
    if not stands_in_torch(run, states) and not stands_still(run):
        return ()
    return tuple(rank for rank, state in states.items() if state.kind == RankState.ON_CPU and run.ranks[rank].stacks)


def _fault(run: Run) -> str:
    """The gravest fact that a kernel, a scheduler or another tool reports; "" if none does."""
    found = faults(run)
    if found and found[0].kind == EventKind.CANCELLED:
        return f"the job was told to end, which is no fault of a rank; none is shown before: {found[0].text[:160]}"
    if found and found[0].kind in NO_FAULT:
        return f"the scheduler ended the job, which is no fault of a rank; none is shown before: {found[0].text[:160]}"
    return f"the evidence does not show which rank is at fault; reported is: {found[0].text[:160]}" if found else ""


def _to_collect(run: Run, unseen: Sequence[int]) -> tuple[str, ...]:
    """What would decide, by what there is already."""
    records = run.ranks.values()
    has_recorder = any(record.has_recorder for record in records)
    lacking = [
        *(["a Flight Recorder dump"] if not any(record.has_flight_recorder for record in records) else []),
        *(["the stack (`py-spy dump --pid PID`)"] if not any(record.stacks for record in records) else []),
        *(["the log of each rank"] if not any(record.log for record in records) else []),
        *(["the launcher's output with the exit codes"] if run.launcher is None else []),
    ]
    whom = rank_list(unseen) if unseen else "every rank"
    what = ", ".join(lacking) or "a second look a minute later"
    later = "the next time it hangs, before it ends"
    when = later if _has_ended(run) else f"now if it still hangs, else {later}"
    steps = [f"collect from {whom}, {when}: {what}"]
    if not has_recorder:
        steps.append(
            "turn the recorder on (titan_ckpt.debug.Recorder.start(folder, rank=..., world_size=...)) and run again"
        )
    return tuple(steps)


_ENDS = (
    EventKind.TIME_LIMIT, EventKind.PREEMPTED, EventKind.CANCELLED, EventKind.NODE_LOST, EventKind.KILLED, EventKind.EXITED,
)  # fmt: skip


def _has_ended(run: Run) -> bool:
    """Whether an exit code, a launcher, a scheduler or the job itself says that it is over."""
    if any(record.exit for record in run.ranks.values()) or (
        run.launcher is not None and run.launcher.code is not None
    ):
        return True
    job = run.job_log
    return job is not None and (job.done_line > 0 or any(event.kind in _ENDS for event in job.events))


def _headline(run: Run, unseen: Sequence[int], has_waiters: bool) -> str:
    if (refused := refusal(run)) is not None:
        return f"no rank was started: the command line was refused: {refused.text[:160]}"
    if unseen and not has_waiters and len(unseen) < len(run.ranks):
        return (
            f"nothing was collected of {rank_list(unseen)}, and what the other ranks left does not show who is at fault"
        )
    if unseen and len(unseen) < len(run.ranks):
        return (
            f"the others wait, and nothing was collected of {rank_list(unseen)}: dead, frozen, stuck or elsewhere, the evidence "
            "does not tell"
        )
    return "the evidence does not show who is at fault"


def _aborted(run: Run) -> tuple[Evidence, ...]:
    """Ranks that SIGABRT ended: mostly a library's doing, on a rank whose peers went wrong."""
    return tuple(
        Evidence(
            text="was ended by SIGABRT: mostly a library's doing on a rank whose peers went wrong; its log would show that",
            rank=rank, source=record.exit.source,
        )
        for rank, record in run.ranks.items()
        if record.exit and record.exit.code in (-6, 134) and record.log is None
    )[:4]  # fmt: skip
