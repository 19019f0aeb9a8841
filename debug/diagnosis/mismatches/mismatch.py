"""Ranks that met at the same sequence number with different operations: who deviated, and how. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from titan_ckpt.debug.diagnosis.align import Lane, first_disagreement
from titan_ckpt.debug.diagnosis.mismatches.larger_party import (
    LEAST_SIBLINGS,
    both_may_be_wrong,
    majority_of_few,
    siblings,
)
from titan_ckpt.debug.diagnosis.mismatches.meant_elsewhere import meant_for
from titan_ckpt.debug.diagnosis.mismatches.meeting import (
    HISTORY,
    Meeting,
    Side,
    call_site,
    history,
    key_of,
    predict,
    sides_at,
)
from titan_ckpt.debug.diagnosis.mismatches.readings import Reading, reading
from titan_ckpt.debug.diagnosis.mismatches.splits import split_mismatch
from titan_ckpt.debug.incident.confidence import SHIFTED, Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.frames import is_library, program_folder, user_frame
from titan_ckpt.debug.incident.kinds import EventKind, OperationState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Frame, Operation, Run, Verdict

LEAST_OTHERS = 2  # that agree with each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Who deviated, on what basis, and why in words."""

    culprits: tuple[int, ...]
    basis: Basis
    why: str


def mismatch(run: Run, lane: Lane, *, with_met: bool = False) -> Verdict | None:
    """The verdict on the first disagreement of a lane, or None if there is none or it did no harm. `with_met`: also on one that
    all ranks completed."""
    seq = first_disagreement(run, lane, with_met=with_met)
    splits = split_mismatch(run, lane, seq)
    if splits is not None:
        return splits
    if seq is None or _was_harmless(run, lane, seq):
        return None
    meeting = Meeting(run=run, lane=lane, seq=seq)
    sides = sides_at(run, lane, seq)
    blame = _blame(meeting, sides)
    common = next((side for side in sides if not set(side.ranks) & set(blame.culprits)), sides[0])
    deviant = next((side for side in sides if side is not common), sides[-1])
    start = _call_site_shift(run, lane, seq, blame.culprits)
    if start is not None:
        return _call_site_verdict(meeting, start, blame)
    meant = meant_for(run, blame.culprits[0], deviant.operation) if blame.culprits == deviant.ranks[:1] else None
    if meant is not None:
        return _wrong_group_verdict(meeting, common, deviant, blame, meant)
    return _verdict(meeting, reading(meeting, common, deviant), common, deviant, blame)


def shifted(run: Run, lane: Lane, roots: Collection[int]) -> Verdict | None:
    """CALLSITE_DIVERGENCE on the one rank that did not come to an operation, where its lines part from the others' before that:
    it left one out, and is one behind since."""
    newest = int(lane.last.max())
    behind = [
        rank
        for rank, last in zip(lane.members, lane.last.tolist(), strict=True)
        if rank in roots and last == newest - 1
    ]
    others = [rank for rank in lane.members if rank not in behind]
    if len(behind) != 1 or len(others) < LEAST_OTHERS:
        return None
    start = _call_site_shift(run, lane, newest, (behind[0],))
    if start is None or not _go_alike(run, lane, others, range(start, newest)):
        return None
    why = f"{len(others)} of {len(lane.members)} ranks agree with each other"
    blame = Blame(culprits=(behind[0],), basis=Basis.CLEAR_MAJORITY, why=why)
    return _call_site_verdict(Meeting(run=run, lane=lane, seq=newest), start, blame)


def _was_harmless(run: Run, lane: Lane, seq: int) -> bool:
    """All went on past it and no rank is waiting: sizes may differ legally, for example between steps of an uneven gather."""
    went_on = all(last > seq for last, silent in zip(lane.last, lane.is_silent, strict=True) if not silent)
    failed = any(record.exit and record.exit.code for record in run.ranks.values())
    return bool(went_on and lane.done.all() and not failed)


def _blame(meeting: Meeting, sides: Sequence[Side]) -> Blame:
    """Who deviated: a minority; between equal parties the one whose own history did not lead there."""
    first, rest = sides[0], sides[1:]
    if len(first.ranks) > len(rest[0].ranks):
        if (few := majority_of_few(meeting, sides)) is not None:
            return Blame(culprits=few, basis=Basis.BROKE_HISTORY, why="most of the job's ranks did what the others did")
        if both_may_be_wrong(meeting, sides):
            return _tie(sides, "the larger party breaks with its own history, the smaller one does not")
        ranks = tuple(sorted(rank for side in rest for rank in side.ranks))
        basis = Basis.CLEAR_MAJORITY if len(first.ranks) > len(ranks) else Basis.PLURALITY
        why = f"{len(first.ranks)} of {len(meeting.lane.members)} ranks agree with each other"
        return Blame(culprits=ranks, basis=basis, why=why)
    tied = [side for side in sides if len(side.ranks) == len(first.ranks)]
    if (unlike := _unlike_siblings(meeting, tied)) is not None:
        return unlike
    scores = [_strangeness(meeting, side) for side in tied]
    if max(scores) > min(scores) and not all(_is_new(meeting, side) for side in tied):
        strange = tied[scores.index(max(scores))]
        if (due := _due(meeting, tied)) is not None and due is strange:
            others = tuple(sorted(rank for side in tied if side is not due for rank in side.ranks))
            return Blame(culprits=others, basis=Basis.BROKE_HISTORY, why="an operation of every few steps was due")
        if max(scores) == UNEXPECTED and _came_so_before(meeting, strange):
            return _tie(sides, "what either party did had followed on the operation before")
        why = "its own earlier operations led elsewhere"
        return Blame(culprits=strange.ranks, basis=Basis.BROKE_HISTORY, why=why)
    return _tie(sides, "both parties are equally large and neither breaks with its own history")


def _tie(sides: Sequence[Side], why: str) -> Blame:
    everyone = tuple(sorted(rank for side in sides for rank in side.ranks))
    return Blame(culprits=everyone, basis=Basis.TIE, why=why)


def _unlike_siblings(meeting: Meeting, tied: Sequence[Side]) -> Blame | None:
    """The one party that did not do what the ranks of other groups of the same description did under that number: those of a
    mesh do the same side by side."""
    found = Counter(key_of(operation) for operation in siblings(meeting, meeting.seq))
    known = {side.key: side for side in tied}
    usual = [key for key in known if found[key] >= LEAST_SIBLINGS and 2 * found[key] > found.total()]
    others = tuple(sorted(rank for key, side in known.items() if key not in usual for rank in side.ranks))
    if len(usual) != 1 or not others or any(found[key] for key in known if key not in usual):
        return None
    why = f"{found[usual[0]]} ranks of other groups of that kind did what {rank_list(known[usual[0]].ranks)} did"
    return Blame(culprits=others, basis=Basis.BROKE_HISTORY, why=why)


def _is_new(meeting: Meeting, side: Side) -> bool:
    """Whether it comes from a new line or was never issued: then the past does not show whether it is right."""
    before = history(meeting, side.ranks[0])
    site = call_site(meeting.run, side.operation)[:1]
    is_new_line = bool(site) and site not in [known[:1] for _, known in before]
    return is_new_line or side.key not in [key for key, _ in before]


def _due(meeting: Meeting, sides: Sequence[Side]) -> Side | None:
    """The one party whose operation comes after the same number of others each time, and now again: as one of every few steps."""
    due = []
    for side in sides:
        keys = [key for key, _ in history(meeting, side.ranks[0])]
        places = [place for place, key in enumerate(keys) if key == side.key]
        gaps = {after - before for before, after in pairwise([*places, len(keys)])}
        if len(places) > 1 and len(gaps) == 1:
            due.append(side)
    return due[0] if len(due) == 1 else None


def _came_so_before(meeting: Meeting, side: Side) -> bool:
    """Whether an operation had followed on the one before it already: it may be one of every few steps, though it is not what the
    shortest period leads to."""
    keys = [key for key, _ in history(meeting, side.ranks[0])]
    return (keys[-1], side.key) in pairwise(keys)


UNEXPECTED = 2  # how strange an operation is that is known, and is not the predicted one


def _strangeness(meeting: Meeting, side: Side) -> int:
    """How much an operation breaks with what the rank did before: not the predicted one, never issued, from a new line."""
    before = history(meeting, side.ranks[0])
    keys = [key for key, _ in before]
    sites = [site for _, site in before]
    site = call_site(meeting.run, side.operation)
    score = 0
    predicted = predict(keys)
    if predicted is not None and predicted != side.key:
        score += UNEXPECTED
    if keys and side.key not in keys:
        score += 2
    if keys and side.operation.op not in {key[0] for key in keys}:
        score += 1
    if sites and site not in sites:
        score += 1
    return score


# ---------------------------------------------------------------------------------------------- diverged call sites


def _go_alike(run: Run, lane: Lane, ranks: Sequence[int], numbers: range) -> bool:
    """Whether ranks issued the operations of these numbers from the same stacks."""
    columns = slice(numbers.start - lane.first_seq, numbers.stop - lane.first_seq)
    rows = (lane.row[lane.members.index(rank), columns] for rank in ranks)
    stacks = [run.ranks[rank].operations["frames"][of] for rank, of in zip(ranks, rows, strict=True) if (of >= 0).all()]
    return len(stacks) == len(ranks) and all(np.array_equal(stack, stacks[0]) for stack in stacks[1:])


def _call_site_shift(run: Run, lane: Lane, seq: int, culprits: tuple[int, ...]) -> int | None:
    """The sequence number where call sites first parted and stayed apart up to `seq`, if that was before `seq`."""
    others = [rank for rank in lane.members if rank not in culprits]
    if not others or not culprits:
        return None
    ours, theirs = _sites(run, lane, others[0]), _sites(run, lane, culprits[0])
    start = seq
    for position in range(seq - 1, max(lane.first_seq, seq - HISTORY) - 1, -1):
        if position not in ours or position not in theirs or ours[position] == theirs[position]:
            break
        start = position
    before = range(lane.first_seq, start)
    is_new = all(ours.get(p) == theirs.get(p) for p in before) and len(before) > 0
    return start if start < seq and is_new else None


def _sites(run: Run, lane: Lane, rank: int) -> Mapping[int, Frame | None]:
    i = lane.members.index(rank)
    names, table = run.names.frames, run.ranks[rank].operations
    return {
        lane.first_seq + column: user_frame(names[table["frames"][row]], run.wrappers)
        for column, row in enumerate(lane.row[i])
        if row >= 0 and table["frames"][row] > 0
    }


def _call_site_verdict(meeting: Meeting, start: int, blame: Blame) -> Verdict:
    run, lane, culprits = meeting.run, meeting.lane, blame.culprits
    rows = lane.seen_at(start)
    other = next(rank for rank in lane.members if rank not in culprits and rank in rows)
    mine, theirs = run.operation(culprits[0], rows[culprits[0]]), run.operation(other, rows[other])
    victims = tuple(rank for rank in lane.members if rank not in culprits)
    return Verdict(
        verdict=VerdictKind.CALLSITE_DIVERGENCE,
        culprits=culprits,
        victims=victims,
        group=meeting.group,
        seq=start,
        op=mine.op,
        confidence=blame.basis.confidence * SHIFTED,
        headline=f"{rank_list(culprits)} issued #{start} of group {meeting.group} from another line than the others; "
        f"since then all of its operations are one off, which shows at #{meeting.seq}",
        evidence=(_issued(run, culprits[0], mine), _issued(run, other, theirs)),
        chain=tuple((rank, culprits[0]) for rank in victims),
        next_steps=_advice(run, mine, theirs),
    )


# -------------------------------------------------------------------------------------------------------- verdicts


_TEXT = {
    VerdictKind.SKIPPED_COLLECTIVE: "{who} skipped {op} #{seq} of group {group}: it issued {deviant} while the others wait "
    "in {common}",
    VerdictKind.ORDER_MISMATCH: "{who} issued {deviant} and {common} of group {group} in a different order from the others "
    "(from #{seq})",
    VerdictKind.OP_MISMATCH: "{who} called {deviant} where the others called {common} (#{seq} of group {group})",
    VerdictKind.SIZE_MISMATCH: "{who} passed {deviant_sizes} elements to {common} #{seq} of group {group}, the others "
    "passed {common_sizes}",
    Subtype.ROOT: "{who} called {common} #{seq} of group {group} with root {deviant_root}, the others with root {common_root}",
    VerdictKind.DTYPE_MISMATCH: "{who} passed {deviant_dtypes} to {common} #{seq} of group {group}, the others "
    "passed {common_dtypes}",
    Subtype.EXTRA_COLLECTIVE: "{who} issued an extra {deviant} (#{seq} of group {group}) that no other rank issues; the others "
    "are in {common}",
}


def _verdict(meeting: Meeting, reading: Reading, common: Side, deviant: Side, blame: Blame) -> Verdict:
    run, culprits = meeting.run, blame.culprits
    victims = tuple(rank for rank in meeting.lane.members if rank not in culprits)
    why = f"why {rank_list(culprits)}: {blame.why}; the other reading would be {reading.alternative}"
    return Verdict(
        verdict=reading.verdict,
        subtype=reading.subtype,
        culprits=culprits,
        victims=victims,
        group=meeting.group,
        seq=meeting.seq,
        op=common.operation.op,
        confidence=blame.basis.confidence,
        headline=_headline(meeting, reading, common, deviant, culprits),
        evidence=(
            *(_issued(run, side.ranks[0], side.operation, len(side.ranks)) for side in (deviant, common)),
            *_unfit(run, reading),
            Evidence(text=why),
        ),
        chain=tuple((rank, culprits[0]) for rank in victims),
        next_steps=_advice(run, deviant.operation, common.operation),
    )


def _unfit(run: Run, reading: Reading) -> Iterator[Evidence]:
    """The first line of a log in which the communication library says that sizes did not fit."""
    said = [event for record in run.ranks.values() for event in record.events if event.kind == EventKind.COMM_MISMATCH]
    if said and reading.verdict == VerdictKind.SIZE_MISMATCH:
        first = min(said, key=lambda event: (event.time_s is None, event.time_s or 0.0, event.rank))
        yield Evidence(text=first.text[:150], rank=first.rank, source=f"{first.source}:{first.line}")


def _wrong_group_verdict(meeting: Meeting, common: Side, deviant: Side, blame: Blame, meant: Operation) -> Verdict:
    run, [rank] = meeting.run, blame.culprits
    return Verdict(
        verdict=VerdictKind.WRONG_GROUP, culprits=(rank,), victims=tuple(one for one in meeting.lane.members if one != rank),
        group=meeting.group, seq=meeting.seq, op=deviant.operation.op, confidence=Basis.ALONE_ON_GROUP.confidence,
        headline=f"rank {rank} called {deviant.operation.op} on group {meeting.group}, as #{meeting.seq}, where the others call "
        f"{_spelled(common.operation)}; its peers wait for the same operation, from the same line, on group {meant.group}",
        evidence=(_issued(run, rank, deviant.operation), _issued(run, common.ranks[0], common.operation)),
        chain=tuple((one, rank) for one in meeting.lane.members if one != rank),
        next_steps=("check which group the call site passes (group=...)",),
    )  # fmt: skip


def _headline(meeting: Meeting, reading: Reading, common: Side, deviant: Side, culprits: tuple[int, ...]) -> str:
    a, b = common.operation, deviant.operation
    if set(common.ranks) <= set(culprits):
        return (
            f"{rank_list(common.ranks)} issued {_spelled(a)} where {rank_list(deviant.ranks)} issued {_spelled(b)} "
            f"(#{meeting.seq} of group {meeting.group}); the evidence does not show which of them is wrong"
        )
    kind = reading.subtype or reading.verdict
    is_alike = kind == VerdictKind.SKIPPED_COLLECTIVE and a.op == b.op and a.sizes != b.sizes
    usual, other = (f"{each.op} of {each.sizes or 'nothing'}" if is_alike else each.op for each in (a, b))
    return _TEXT[kind].format(
        who=rank_list(culprits), op=a.op, common=usual, deviant=other, seq=meeting.seq, group=meeting.group,
        common_sizes=a.sizes, deviant_sizes=b.sizes, common_dtypes=a.dtypes, deviant_dtypes=b.dtypes,
        common_root=a.peer, deviant_root=b.peer,
    )  # fmt: skip


def _spelled(operation: Operation) -> str:
    root = f", root {operation.peer}" if operation.peer >= 0 else ""
    return f"{operation.op}({operation.sizes or 'nothing'}, {operation.dtypes or '-'}{root})"


def _issued(run: Run, rank: int, operation: Operation, count: int = 1) -> Evidence:
    frame = user_frame(operation.frames, run.wrappers)
    others = f" (and {count - 1} more rank{'s' if count > 2 else ''})" if count > 1 else ""
    table = run.ranks[rank].operations
    later = (table["group"] == run.groups.index(operation.group)) & (table["p2p"] == 0) & (table["seq"] > operation.seq)
    has_returned = operation.state == OperationState.COMPLETED or (operation.retired and bool(later.any()))
    state = "returned" if has_returned else "not completed"
    text = f"issued {_spelled(operation)} as #{operation.seq}{others}, {state}" + (
        f", in {frame.function}{_caller(operation, frame)}" if frame else ""
    )
    return Evidence.at(frame, text=text, rank=rank, source="flight recorder")


def _caller(operation: Operation, frame: Frame) -> str:
    """` (called at file:line)`: the line at fault is often not that of a shared training step or of a library outside of
    site-packages, but the one that calls it."""
    around = [one for one in operation.frames[operation.frames.index(frame) + 1 :] if not is_library(one)]
    program = program_folder(operation.frames)
    is_outside = bool(program) and not frame.file.startswith(f"{program}/")
    own = [one for one in around if one.file.startswith(f"{program}/")] if is_outside else []
    caller = next(iter(own or around), None)
    return f" (called at {caller.place})" if caller else ""


def _advice(run: Run, deviant: Operation, common: Operation) -> tuple[str, ...]:
    here, there = user_frame(deviant.frames, run.wrappers), user_frame(common.frames, run.wrappers)
    places = [frame.place for frame in dict.fromkeys((here, there)) if frame]
    return (
        f"compare the two call sites: {' and '.join(places)}"
        if len(places) > 1
        else f"compare what each rank passes at {places[0]}, and how it got there"
        if places
        else "run again with stack recording on, to get the call sites",
        "look for a branch there that depends on the rank or on rank-local data (overflow, empty batch, `if rank == 0`)",
    )
