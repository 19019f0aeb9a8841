"""Run all detectors in order and rank their verdicts. Pure: a Run in, verdicts out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from signal import SIGABRT

from titan_ckpt.console.ranks import ranks_text
from titan_ckpt.debug.diagnosis.advice import of_ended
from titan_ckpt.debug.diagnosis.align import Lane, lanes
from titan_ckpt.debug.diagnosis.ends import all_left_gone
from titan_ckpt.debug.diagnosis.from_logs.at_the_start import at_the_start
from titan_ckpt.debug.diagnosis.from_logs.by_witnesses import by_witnesses, elsewhere, sizes_in_logs
from titan_ckpt.debug.diagnosis.from_logs.cross_checks import ended_with_launcher, has_lost_launcher, is_contradicted
from titan_ckpt.debug.diagnosis.from_logs.earliest import in_order
from titan_ckpt.debug.diagnosis.from_logs.exit_codes import by_exit_codes
from titan_ckpt.debug.diagnosis.from_logs.gave_up import without_waiters
from titan_ckpt.debug.diagnosis.from_logs.named_ranks import named_ranks
from titan_ckpt.debug.diagnosis.from_logs.outlived import with_outlived
from titan_ckpt.debug.diagnosis.from_logs.reported import faults, reported
from titan_ckpt.debug.diagnosis.from_logs.watchdogs import watchdogs
from titan_ckpt.debug.diagnosis.looks import is_one_look, of_one_look, stands_still, went_on_between
from titan_ckpt.debug.diagnosis.looks_well import healthy, is_ending, looks_quiet, looks_well, went_on
from titan_ckpt.debug.diagnosis.mismatches.mismatch import mismatch, shifted
from titan_ckpt.debug.diagnosis.mismatches.one_too_many import one_too_many, outlasted
from titan_ckpt.debug.diagnosis.mismatches.out_of_step import (
    beside_the_waits,
    is_only_awaited,
    or_its_partner,
    out_of_step,
)
from titan_ckpt.debug.diagnosis.mismatches.unmet_pairs import everybody_in_p2p, unmet_pairs
from titan_ckpt.debug.diagnosis.no_culprit import all_gone, running, says_done, stands_in_torch, undecided
from titan_ckpt.debug.diagnosis.process_groups import group_conflicts, group_creation
from titan_ckpt.debug.diagnosis.rank_death import is_absent, own_exception
from titan_ckpt.debug.diagnosis.rank_state import has_other_death, saw_peers_close, saw_timeouts, situations
from titan_ckpt.debug.diagnosis.same_fault import merged, named_together, of_program
from titan_ckpt.debug.diagnosis.standstill import (
    Pace,
    ended_in_wait,
    is_beginning,
    is_not_yet,
    pace_of_live,
    pace_of_logs,
    stood_to_the_end,
)
from titan_ckpt.debug.diagnosis.stragglers import find_straggler
from titan_ckpt.debug.diagnosis.transport import same_operation, transport
from titan_ckpt.debug.diagnosis.waiting.awaited_rank import (
    left_no_end,
    lost_ranks,
    stopped_ticking,
    verdict_of,
    without_end,
)
from titan_ckpt.debug.diagnosis.waiting.deadlock import deadlock, off_rhythm
from titan_ckpt.debug.diagnosis.waiting.device_order import has_timed_out, waits_on_device
from titan_ckpt.debug.diagnosis.waiting.told_waits import with_told_chain
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge, can_wait, on_device, roots, wait_edges
from titan_ckpt.debug.incident.confidence import (
    ACCUSING,
    CONTRADICTED,
    DIED_FIRST,
    EXPLAINED,
    MET,
    OTHER_FAULT,
    WEIGHTS,
    Basis,
)
from titan_ckpt.debug.incident.frames import abort_stack, hang_stack, is_library, user_frame
from titan_ckpt.debug.incident.gc_off import no_gc
from titan_ckpt.debug.incident.kinds import STALL, RankState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Run, Situation, Verdict
from titan_ckpt.debug.incident.waits import process_ended

MAX_VERDICTS = 8
RECORDER_THREADS = "titan-recorder"  # how the names of its threads begin
SILENCE_S = 10.0


def diagnose(run: Run) -> list[Verdict]:
    """What happened, most likely first; never empty. HEALTHY and INSUFFICIENT_DATA are verdicts too."""
    with no_gc():
        return _diagnose(run)


def _diagnose(run: Run) -> list[Verdict]:
    run = with_outlived(run)
    states = situations(run)
    found_lanes = lanes(run)
    edges = wait_edges(run, found_lanes, states)
    states = on_device(run, states, edges)
    found = [*at_the_start(run)] or [*_faults(run, found_lanes, edges, states)]
    if not found and found_lanes and not went_on(run):
        found = [*by_witnesses(run, states)] or [*_fell_silent(run, edges, states)]
    elif found_lanes and not went_on(run) and all(verdict.is_undecided for verdict in found):
        found += elsewhere(run, states)
    found = found or [*by_exit_codes(run)] or [*without_end(run, states)] or [*_left_behind(run, states)]
    if not found:
        found = [_without_fault(run, found_lanes, edges, states)]
    found = [verdict for verdict in found if not ended_with_launcher(run, verdict)] or [undecided(run, edges, states)]
    in_turn = without_waiters(run, in_order(run, _checked(run, merged(run, found))))
    ranked = [_with_suspects(verdict) for verdict in _ranked(in_turn)]
    is_open = is_not_yet(ranked[0]) or ranked[0].verdict == VerdictKind.RUNNING
    if is_open and all_left_gone(run) and not stood_to_the_end(run):
        ranked = [all_gone(run, ranked[0])]
    pace = None if has_timed_out(run) else pace_of_live(run, edges)
    if is_not_yet(ranked[0]) and went_on_between(run):
        ranked = [replace(running(None, None), headline="the job went on from one look at its stacks to another")]
    elif is_not_yet(ranked[0]) and is_beginning(run):
        ranked = [running(None, ranked[0])]
    elif is_not_yet(ranked[0]) and ranked[0].culprits and is_one_look(run):
        ranked = [of_one_look(ranked[0])]
    if pace is not None and is_not_yet(ranked[0]):
        ranked = _not_yet_over(pace, ranked)
    if ranked[0].verdict == VerdictKind.RUNNING and has_lost_launcher(run):
        ranked = [undecided(run, edges, states)]
    ranked[0] = with_told_chain(run, edges, ranked[0])
    told = (of_program(run, _as_ended(run, _with_threads(run, verdict))) for verdict in ranked[:MAX_VERDICTS])
    return [_with_group(run, _with_step(run, verdict)) for verdict in told]


def _not_yet_over(pace: Pace, ranked: Sequence[Verdict]) -> list[Verdict]:
    """What one look at a wait that may well end tells: that they wait for a straggler, else that the job runs."""
    if pace.is_long_for_told:
        return [ended_in_wait(pace, ranked[0])]
    slow = [
        verdict for verdict in ranked if verdict.verdict == VerdictKind.STRAGGLER and verdict.confidence > OTHER_FAULT
    ]
    return slow if slow and pace.told is None else [running(pace, ranked[0])]


def _without_fault(
    run: Run, found_lanes: Sequence[Lane], edges: Sequence[Edge], states: Mapping[int, Situation]
) -> Verdict:
    is_over = went_on(run)
    if is_over or (looks_well(run, found_lanes, edges, states) and not faults(run)):
        return healthy(run, found_lanes, is_over=is_over)
    if is_ending(run) and not faults(run):
        return running(None, None, is_ending=True)
    is_aborted = any(abort_stack(record) is not None for record in run.ranks.values())
    stuck = same_operation(run, found_lanes) if not edges and not is_aborted else None
    if stuck is not None:
        return stuck
    is_waiting = bool(edges) or any(state.kind.is_waiting for state in states.values())
    is_waiting |= stands_in_torch(run, states) or stands_still(run)
    is_quiet = looks_quiet(run) and not is_waiting and not faults(run)
    if is_quiet:
        return running(None, None, is_done=says_done(run))
    ended = pace_of_logs(run) if not is_waiting else None
    if ended is not None:
        return running(ended, None)
    leads = (lead for lane in found_lanes if (lead := mismatch(run, lane, with_met=True)) is not None)
    lead = next(leads, None)
    return undecided(run, edges, states) if lead is None else replace(lead, confidence=lead.confidence * MET)


def _faults(
    run: Run, found_lanes: Sequence[Lane], edges: Sequence[Edge], states: Mapping[int, Situation]
) -> Iterable[Verdict]:
    progressed = went_on(run)
    yield from group_creation(run, states)
    mismatches = [found for lane in found_lanes if (found := mismatch(run, lane)) is not None]
    yield from (_unless_died_before(run, found) for found in mismatches)
    ends = roots(edges)
    unseen = tuple(rank for rank in ends.sinks if is_absent(run.ranks[rank]))
    if progressed or not unseen:  # lateness explains no wait for a rank that nobody heard
        yield from _slow(run, found_lanes, edges, states, progressed=progressed)
    if progressed:
        return
    if edges:
        yield from group_conflicts(run)
    absent = [root for root in ends.sinks if not (can_wait(states[root]) and waits_on_device(run, run.ranks[root]))]
    named = [root for root in absent if root not in unseen or _is_known_gone(run, unseen)]
    if not mismatches:
        yield from (late for lane in found_lanes if (late := shifted(run, lane, ends.sinks)) is not None)
    extra = [*one_too_many(run, found_lanes, states)] or [*outlasted(run, states)]
    yield from extra
    odd = [] if mismatches or extra else [*out_of_step(run, edges, states)]
    past = {rank for verdict in extra for rank in verdict.victims}
    past |= {
        root for verdict in odd for root in named if root not in verdict.culprits and is_only_awaited(states[root])
    }
    waits = [*_awaited(run, [root for root in named if root not in past], edges, states)]
    waits += off_rhythm(run, [root for root in ends.sinks if root not in absent], edges, states)
    waits += (deadlock(run, cycle, edges, states) for cycle in ends.cycles)
    yield from beside_the_waits(odd, waits)
    yield from _lost(run, states, edges or mismatches) or transport(run, found_lanes)
    yield from named_ranks(run, states)
    yield from reported(run, states)
    if not found_lanes:
        yield from watchdogs(run)
        yield from by_witnesses(run, states)
    elif not mismatches:
        yield from sizes_in_logs(run, states)
    unmet = [*unmet_pairs(run, states)]
    yield from unmet
    is_all = run.ranks and all(state.kind == RankState.IN_P2P for state in states.values())
    if is_all and not (unmet or ends.cycles):
        yield everybody_in_p2p(states)
    waited_for = set(ends.sinks)
    for rank, state in states.items():
        if state.kind in (RankState.DEAD, RankState.FROZEN, RankState.GIL_HELD) and rank not in waited_for:
            yield verdict_of(run, rank, edges, states)


def _slow(
    run: Run, found_lanes: Sequence[Lane], edges: Sequence[Edge], states: Mapping[int, Situation], *, progressed: bool
) -> Iterator[Verdict]:
    """The straggler, if there is one; what all wait in now first, for whoever was late has come to it."""
    is_over = progressed or all(state.kind == RankState.ON_CPU for state in states.values())
    slow = find_straggler(run, found_lanes, is_over=is_over)
    if slow is None:
        return
    together = None if edges or progressed else same_operation(run, found_lanes)
    yield from [] if together is None else [together]
    is_stalled = not progressed and any(not verdict.culprits for verdict in transport(run, found_lanes))
    is_other = (
        bool(together) or is_stalled or (bool(edges) and not progressed and slow.culprits[0] not in roots(edges).sinks)
    )
    yield replace(slow, confidence=slow.confidence * OTHER_FAULT) if is_other else slow


def _lost(run: Run, states: Mapping[int, Situation], others: Sequence[object]) -> list[Verdict]:
    """What is said of the ranks that were lost in a common wait, if nothing else parts the ranks."""
    lost = [] if others else [*lost_ranks(run, states)]
    return [named_together(lost)] if len(lost) > 1 else lost


def _awaited(
    run: Run, roots: Sequence[int], edges: Sequence[Edge], states: Mapping[int, Situation]
) -> Iterator[Verdict]:
    """Why ranks that others wait for do not come."""
    reasons = [or_its_partner(run, verdict_of(run, root, edges, states), edges) for root in roots]
    yield from _without_reason(run, [found for found in reasons if not _is_outnumbered(found, edges)], states)


def _without_reason(run: Run, found: Sequence[Verdict], states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """Name ranks whose absence is all that is known in one verdict, or not at all if no fewer ranks wait for them: then it
    is as likely that those went too far."""
    absent = (RankState.UNKNOWN, RankState.SILENT)
    unclear = [v for v in found if v.culprits and states[v.culprits[0]].kind in absent and not v.subtype]
    overtaking = [v for v in found if v.subtype == Subtype.ACROSS_GROUPS]
    gone = [v for v in unclear if v.verdict == VerdictKind.RANK_DIED and left_no_end(run, v.culprits[0])]
    if len(gone) > 1:
        unclear = [verdict for verdict in unclear if verdict not in gone]
        yield named_together(gone)
    yield from (verdict for verdict in found if verdict not in (*gone, *unclear, *overtaking))
    waiters = {rank for verdict in overtaking for rank in verdict.victims}
    if overtaking and len(overtaking) <= max(1, len(waiters)):  # else those few that wait went another way
        yield named_together(overtaking)
    culprits = tuple(sorted(rank for verdict in unclear for rank in verdict.culprits))
    victims = tuple(sorted({rank for verdict in unclear for rank in verdict.victims} - set(culprits)))
    if len(unclear) == 1:
        yield unclear[0]
    elif unclear and len(culprits) < len(victims):
        yield named_together(unclear)


def _is_outnumbered(verdict: Verdict, edges: Sequence[Edge]) -> bool:
    """Whether a verdict that rests on nothing but an operation not issued has more such ranks than ranks that wait in it: then
    those few went further than the rest, and not issuing it accuses nobody. Ranks that wait elsewhere are none of the rest."""
    if verdict.confidence > Basis.NOT_ISSUED.confidence or not verdict.culprits:
        return False
    direct = [edge for edge in edges if edge.awaited == verdict.culprits[0]]
    at = {(edge.group, edge.seq) for edge in direct if not edge.is_p2p}
    waiting = {edge.waiter for edge in edges}
    behind = {edge.awaited for edge in edges if (edge.group, edge.seq) in at} - waiting
    return len(behind) > len({edge.waiter for edge in edges if (edge.group, edge.seq) in at})


def _is_known_gone(run: Run, unseen: Sequence[int]) -> bool:
    """Whether closed connections show that the one rank of which nothing was collected has ended."""
    ended = run.ranks[unseen[0]].exit if unseen else None
    if ended is not None and ended.code in (-SIGABRT, 128 + SIGABRT):
        return False
    return (
        len(unseen) == 1
        and bool(saw_peers_close(run))
        and not saw_timeouts(run)
        and not has_other_death(run, unseen[0])
    )


def _fell_silent(run: Run, edges: Sequence[Edge], states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """Ranks that had joined the operation in which all wait, whose recorder ticked no more while the others' found the stall."""
    has_stall = any(dump.reason == STALL for record in run.ranks.values() for dump in record.dumps)
    waiting = tuple(rank for rank, state in states.items() if state.kind in (RankState.IN_COLLECTIVE, RankState.IN_P2P))
    if not has_stall or not waiting:
        return
    for rank, state in states.items():
        beat, silence_s = run.ranks[rank].heartbeat, stopped_ticking(run, rank)
        if state.kind == RankState.UNKNOWN and beat is not None and silence_s > SILENCE_S:
            text = f"its recorder last ticked {silence_s:.0f} s before the others'"
            silent = replace(
                state, kind=RankState.SILENT, evidence=(Evidence(text=text, rank=rank, source=beat.source),)
            )
            yield replace(verdict_of(run, rank, edges, {**states, rank: silent}), victims=waiting)


def _left_behind(run: Run, states: Mapping[int, Situation]) -> Iterator[Verdict]:
    """Ranks whose shutdown had not come further for a recorder's stall time, when all others had ended in order."""
    left = [rank for rank, state in states.items() if state.kind != RankState.FINISHED]
    if len(left) == len(states) or not all(_stalls_in_teardown(run, states[rank]) for rank in left):
        return
    for rank in left:
        yield Verdict(
            verdict=VerdictKind.TEARDOWN_STUCK, culprits=(rank,), confidence=Basis.STACK_IN_TEARDOWN.confidence,
            headline=f"rank {rank} does not end: it hangs in {states[rank].call}, and all others have ended",
            evidence=states[rank].evidence, step=run.step_of(rank),
            next_steps=("look for a thread that is no daemon, a pool or a process that nobody stops before the program ends",),
        )  # fmt: skip


def _stalls_in_teardown(run: Run, state: Situation) -> bool:
    has_stall = any(stack.reason.startswith(STALL) for stack in run.ranks[state.rank].stacks)
    return state.kind == RankState.IN_TEARDOWN and has_stall


def _with_threads(run: Run, verdict: Verdict) -> Verdict:
    """The verdict; on a rank that does not end, with the threads of its program, for one of which the exit may wait."""
    if verdict.verdict != VerdictKind.TEARDOWN_STUCK or len(verdict.culprits) != 1:
        return verdict
    first, rest = verdict.evidence[:1], verdict.evidence[1:]
    return replace(verdict, evidence=(*first, *_program_threads(run, verdict.culprits[0]), *rest))


def _program_threads(run: Run, rank: int) -> Iterator[Evidence]:
    """Where the program's own threads are, beside the main one."""
    stack = hang_stack(run.ranks[rank])
    for thread in stack.threads if stack else ():
        frame = user_frame(thread.frames, run.wrappers)
        is_own = thread.name.startswith(RECORDER_THREADS)
        if not (thread.is_main or is_own) and frame is not None and not is_library(frame):
            yield Evidence.at(frame, text=f"thread {thread.name} in {frame.function}", rank=rank)


def _unless_died_before(run: Run, verdict: Verdict) -> Verdict:
    """A rank that raised an exception of its own before it deviated deviated because of that (its clean-up did)."""
    for rank in verdict.culprits:
        error = own_exception(run.ranks[rank])
        if error is not None and len(verdict.culprits) == 1:
            return replace(verdict, confidence=verdict.confidence * DIED_FIRST)
    return verdict


def _ranked(found: Iterable[Verdict]) -> list[Verdict]:
    """By confidence; a verdict whose culprits an earlier one already explains as victims steps back."""
    ordered = sorted(found, key=lambda v: -v.confidence * WEIGHTS.get(v.verdict, 1.0))
    if not ordered:
        return ordered
    top = ordered[0]
    explained = set(top.victims)
    rest = [
        replace(v, confidence=v.confidence * EXPLAINED) if v.culprits and set(v.culprits) <= explained else v
        for v in ordered[1:]
    ]
    return [top, *sorted(rest, key=lambda v: -v.confidence)]


def _checked(run: Run, found: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts, those lowered that other evidence speaks against."""
    return [
        replace(verdict, confidence=verdict.confidence * CONTRADICTED) if is_contradicted(run, verdict) else verdict
        for verdict in found
    ]


def _with_suspects(verdict: Verdict) -> Verdict:
    """A verdict that rests on too little to accuse anybody names suspects."""
    if verdict.confidence >= ACCUSING or not verdict.culprits or verdict.verdict == VerdictKind.STRAGGLER:
        return verdict
    return replace(verdict, culprits=(), suspects=verdict.culprits)


def _as_ended(run: Run, verdict: Verdict) -> Verdict:
    """Without advice that only a living process can follow, where those that it is about have ended."""
    named = [rank for rank in verdict.culprits or verdict.suspects if rank in run.ranks]
    has_ended = bool(named) and all(process_ended(run, rank, verdict) for rank in named)
    return replace(verdict, next_steps=of_ended(verdict.next_steps)) if has_ended else verdict


def _with_step(run: Run, verdict: Verdict) -> Verdict:
    if verdict.step is not None:
        return verdict
    ranks = verdict.culprits or tuple(run.ranks)[:1]
    return replace(verdict, step=run.step_of(ranks[0]) if ranks else None)


def _with_group(run: Run, verdict: Verdict) -> Verdict:
    """With the ranks of the group in the headline, where several groups, such as those of one axis of a mesh, have its name."""
    named = {group.members for group in run.groups if verdict.group and str(group) == verdict.group and group.members}
    ranks = set(verdict.culprits or verdict.suspects or verdict.victims)
    its = [members for members in named if ranks & set(members)]
    if len(named) < 2 or len(its) != 1:
        return verdict
    pattern, whose = rf"#\d+ of group {re.escape(verdict.group or '')}(?![\w.])", f" of ranks {ranks_text(its[0], 4)}"
    return replace(verdict, headline=re.sub(pattern, lambda found: found[0] + whose, verdict.headline, count=1))
