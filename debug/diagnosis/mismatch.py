"""Ranks that met at the same sequence number with different operations: who deviated, and how. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from titan_ckpt.debug.diagnosis.align import Lane, elements_of, first_disagreement, is_uneven
from titan_ckpt.debug.incident.confidence import SHIFTED, Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import OperationState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Frame, Operation, Run, Verdict

HISTORY = 256


Key: TypeAlias = tuple[str, str, tuple[int, ...]]  # op, dtypes, numbers of elements


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """The ranks that issued the same thing, with one of their operations."""

    ranks: tuple[int, ...]
    operation: Operation

    @property
    def key(self) -> Key:
        return _key(self.operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meeting:
    """The first sequence number of a lane at which ranks issued different operations."""

    run: Run
    lane: Lane
    seq: int

    @property
    def group(self) -> str:
        return str(self.run.groups[self.lane.group])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blame:
    """Who deviated, on what basis, and why in words."""

    culprits: tuple[int, ...]
    basis: Basis
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """What two sides that disagree mean, and the second-best reading."""

    verdict: VerdictKind
    alternative: VerdictKind
    subtype: Subtype = Subtype.NONE


def mismatch(run: Run, lane: Lane) -> Verdict | None:
    """The verdict on the first disagreement of a lane, or None if there is none or it did no harm."""
    seq = first_disagreement(lane)
    if seq is None or _was_harmless(run, lane, seq):
        return None
    meeting = _Meeting(run=run, lane=lane, seq=seq)
    sides = _sides(run, lane, seq)
    blame = _blame(meeting, sides)
    common = next((side for side in sides if not set(side.ranks) & set(blame.culprits)), sides[0])
    deviant = next((side for side in sides if side is not common), sides[-1])
    start = _call_site_shift(run, lane, seq, blame.culprits)
    if start is not None:
        return _call_site_verdict(meeting, start, blame)
    return _verdict(meeting, _reading(meeting, common, deviant), common, deviant, blame)


def _was_harmless(run: Run, lane: Lane, seq: int) -> bool:
    """All went on past it and no rank is waiting: sizes may differ legally, for example between steps of an uneven gather."""
    went_on = all(last > seq for last, silent in zip(lane.last, lane.is_silent, strict=True) if not silent)
    failed = any(record.exit and record.exit.code for record in run.ranks.values())
    return bool(went_on and lane.done.all() and not failed)


def _sides(run: Run, lane: Lane, seq: int) -> list[_Side]:
    """The parties at `seq`, largest first."""
    column = lane.signature[:, seq - lane.first_seq]
    parties: dict[int, list[int]] = {}
    for rank, signature in zip(lane.members, column, strict=True):
        if signature >= 0:
            parties.setdefault(int(signature), []).append(rank)
    rows = lane.seen_at(seq)
    sides = [_Side(ranks=tuple(r), operation=run.operation(r[0], rows[r[0]])) for r in parties.values()]
    return sorted(sides, key=lambda side: (-len(side.ranks), side.ranks))


def _blame(meeting: _Meeting, sides: Sequence[_Side]) -> _Blame:
    """Who deviated: a minority; between equal parties the one whose own history did not lead there."""
    first, rest = sides[0], sides[1:]
    if len(first.ranks) > len(rest[0].ranks):
        ranks = tuple(sorted(rank for side in rest for rank in side.ranks))
        basis = Basis.CLEAR_MAJORITY if len(first.ranks) > len(ranks) else Basis.PLURALITY
        why = f"{len(first.ranks)} of {len(meeting.lane.members)} ranks agree with each other"
        return _Blame(culprits=ranks, basis=basis, why=why)
    tied = [side for side in sides if len(side.ranks) == len(first.ranks)]
    scores = [_strangeness(meeting, side) for side in tied]
    if max(scores) > min(scores):
        strange = tied[scores.index(max(scores))]
        why = "its own earlier operations led elsewhere"
        return _Blame(culprits=strange.ranks, basis=Basis.BROKE_HISTORY, why=why)
    everyone = tuple(sorted(rank for side in sides for rank in side.ranks))
    why = "both parties are equally large and neither breaks with its own history"
    return _Blame(culprits=everyone, basis=Basis.TIE, why=why)


def _strangeness(meeting: _Meeting, side: _Side) -> int:
    """How much an operation breaks with what the rank did before: not the predicted one, never issued, from a new line."""
    history = _history(meeting, side.ranks[0])
    keys = [key for key, _ in history]
    sites = [site for _, site in history]
    site = call_site(meeting.run, side.operation)
    score = 0
    predicted = predict(keys)
    if predicted is not None and predicted != side.key:
        score += 2
    if keys and side.key not in keys:
        score += 2
    if keys and side.operation.op not in {key[0] for key in keys}:
        score += 1
    if sites and site not in sites:
        score += 1
    return score


def _history(meeting: _Meeting, rank: int) -> list[tuple[Key, tuple[Frame, ...]]]:
    """(key, call site) of the rank's collectives on this group before the meeting, oldest first."""
    run, lane = meeting.run, meeting.lane
    stop = meeting.seq - lane.first_seq
    rows = [int(row) for row in lane.row[lane.members.index(rank), max(0, stop - HISTORY) : stop] if row >= 0]
    operations = (run.operation(rank, row) for row in rows)
    return [(_key(operation), call_site(run, operation)) for operation in operations]


def _key(operation: Operation) -> Key:
    """What must be equal where ranks meet."""
    elements = () if is_uneven(operation.op) else elements_of(operation.sizes)
    return operation.op, operation.dtypes, elements


def predict(history: Sequence[object]) -> object | None:
    """What comes next if the history goes on with its shortest period; None when it has none.

    >>> predict(["a", "b", "a", "b"])
    'a'
    """
    for period in range(1, len(history) // 2 + 1):
        tail = history[-2 * period :]
        if tail[:period] == tail[period:]:
            return history[-period]
    return None


def call_site(run: Run, operation: Operation) -> tuple[Frame, ...]:
    """The user's frames of an operation, innermost first, without the common entry."""
    inner = user_frame(operation.frames, run.wrappers)
    if inner is None:
        return ()
    position = operation.frames.index(inner)
    return operation.frames[position : position + 4]


# ---------------------------------------------------------------------------------------------------------- naming


def _reading(meeting: _Meeting, common: _Side, deviant: _Side) -> _Reading:
    """What two sides that disagree mean."""
    shift = _later_shift(meeting, common, deviant)
    if shift is not None:
        return shift
    if common.operation.op != deviant.operation.op:
        return _different_ops(meeting, common, deviant)
    if common.key[2] != deviant.key[2]:
        if _is_extra(meeting, common, deviant):
            return replace(_EXTRA, alternative=VerdictKind.SIZE_MISMATCH)
        if _is_next(meeting, common, deviant):
            return replace(_SKIPPED, alternative=VerdictKind.SIZE_MISMATCH)
        return _Reading(verdict=VerdictKind.SIZE_MISMATCH, alternative=VerdictKind.CALLSITE_DIVERGENCE)
    return _Reading(verdict=VerdictKind.DTYPE_MISMATCH, alternative=VerdictKind.SIZE_MISMATCH)


_SKIPPED = _Reading(verdict=VerdictKind.SKIPPED_COLLECTIVE, alternative=VerdictKind.ORDER_MISMATCH)
_EXTRA = replace(_SKIPPED, subtype=Subtype.EXTRA_COLLECTIVE)
_SWAPPED = _Reading(verdict=VerdictKind.ORDER_MISMATCH, alternative=VerdictKind.SKIPPED_COLLECTIVE)


def _later_shift(meeting: _Meeting, common: _Side, deviant: _Side) -> _Reading | None:
    """If operations went on after the disagreement (NCCL, asynchronous calls), their order shows what happened. Where several
    readings fit, the one by which the most operations come from the same lines on both sides."""
    ours = _following(meeting, common.ranks[0], 6)
    theirs = _following(meeting, deviant.ranks[0], 6)
    if min(len(ours), len(theirs)) < 2:
        return None
    readings = (
        (_SWAPPED, [(ours[0], theirs[1]), (ours[1], theirs[0]), *zip(ours[2:], theirs[2:], strict=False)]),
        (_SKIPPED, list(zip(ours[1:], theirs, strict=False))),
        (_EXTRA, list(zip(ours, theirs[1:], strict=False))),
    )
    fitting = [
        (reading, pairs) for reading, pairs in readings if len(pairs) > 1 and all(a[0] == b[0] for a, b in pairs)
    ]
    return max(fitting, key=lambda one: sum(a == b for a, b in one[1]), default=(None,))[0]


def _following(meeting: _Meeting, rank: int, count: int) -> list[tuple[int, int]]:
    """(signature, call site) of a rank's operations from the disagreement on; call site 0: not recorded."""
    lane, frames = meeting.lane, meeting.run.ranks[rank].operations["frames"]
    at, start = lane.members.index(rank), meeting.seq - lane.first_seq
    cells = zip(lane.signature[at, start:][:count].tolist(), lane.row[at, start:][:count].tolist(), strict=True)
    return [(signature, int(frames[row])) for signature, row in cells if signature >= 0]


def _different_ops(meeting: _Meeting, common: _Side, deviant: _Side) -> _Reading:
    a, b, run = common.operation, deviant.operation, meeting.run
    history = _history(meeting, common.ranks[0])
    keys = [key for key, _ in history]
    if elements_of(a.sizes) == elements_of(b.sizes) and deviant.key not in keys:
        return _Reading(verdict=VerdictKind.OP_MISMATCH, alternative=VerdictKind.ORDER_MISMATCH)
    if _is_extra(meeting, common, deviant):
        return _EXTRA
    ours, theirs = user_frame(a.frames, run.wrappers), user_frame(b.frames, run.wrappers)
    if ours and theirs and (ours.file, ours.function) == (theirs.file, theirs.function):
        seen = {site[:1] for _, site in history}
        if (theirs,) not in seen:
            return _SWAPPED
    return _SKIPPED if deviant.key in keys or not keys else _SWAPPED


def _is_extra(meeting: _Meeting, common: _Side, deviant: _Side) -> bool:
    """The others do what they always do at this point; the deviant issues an operation that is new to it, from a new line."""
    history = _history(meeting, deviant.ranks[0])
    keys, sites = [key for key, _ in history], [site[:1] for _, site in history]
    is_routine = predict(keys) == common.key or common.key in keys
    is_new_line = call_site(meeting.run, deviant.operation)[:1] not in sites
    return bool(is_routine and deviant.key not in keys and is_new_line and sites)


def _is_next(meeting: _Meeting, common: _Side, deviant: _Side) -> bool:
    """Whether the others do what they always do at this point, and the deviant what follows it, from the line that always does:
    it left one out."""
    history = _history(meeting, common.ranks[0])
    mine = common.key, call_site(meeting.run, common.operation)[:1]
    theirs = deviant.key, call_site(meeting.run, deviant.operation)[:1]
    path = [(key, site[:1]) for key, site in history]
    return mine != theirs and predict(path) == mine and predict([*path, mine]) == theirs


# ---------------------------------------------------------------------------------------------- diverged call sites


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


def _call_site_verdict(meeting: _Meeting, start: int, blame: _Blame) -> Verdict:
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
    VerdictKind.SKIPPED_COLLECTIVE: "{who} skipped {common} #{seq} of group {group}: it issued {deviant} while the others wait "
    "in {common}",
    VerdictKind.ORDER_MISMATCH: "{who} issued {deviant} and {common} of group {group} in another order than the others "
    "(from #{seq})",
    VerdictKind.OP_MISMATCH: "{who} called {deviant} where the others called {common} (#{seq} of group {group})",
    VerdictKind.SIZE_MISMATCH: "{who} passed {deviant_sizes} elements to {common} #{seq} of group {group}, the others "
    "{common_sizes}",
    VerdictKind.DTYPE_MISMATCH: "{who} passed {deviant_dtypes} to {common} #{seq} of group {group}, the others "
    "{common_dtypes}",
}
_EXTRA_TEXT = (
    "{who} issued an extra {deviant} (#{seq} of group {group}) that no other rank issues; the others are in {common}"
)


def _verdict(meeting: _Meeting, reading: _Reading, common: _Side, deviant: _Side, blame: _Blame) -> Verdict:
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
            Evidence(text=why),
        ),
        chain=tuple((rank, culprits[0]) for rank in victims),
        next_steps=_advice(run, deviant.operation, common.operation),
    )


def _headline(meeting: _Meeting, reading: _Reading, common: _Side, deviant: _Side, culprits: tuple[int, ...]) -> str:
    a, b = common.operation, deviant.operation
    if set(common.ranks) <= set(culprits):
        return (
            f"{rank_list(common.ranks)} issued {_spelled(a)} where {rank_list(deviant.ranks)} issued {_spelled(b)} "
            f"(#{meeting.seq} of group {meeting.group}); the evidence does not show which of them is wrong"
        )
    template = _EXTRA_TEXT if reading.subtype == Subtype.EXTRA_COLLECTIVE else _TEXT[reading.verdict]
    return template.format(
        who=rank_list(culprits), common=a.op, deviant=b.op, seq=meeting.seq, group=meeting.group,
        common_sizes=a.sizes, deviant_sizes=b.sizes, common_dtypes=a.dtypes, deviant_dtypes=b.dtypes,
    )  # fmt: skip


def _spelled(operation: Operation) -> str:
    return f"{operation.op}({operation.sizes or 'nothing'}, {operation.dtypes or '-'})"


def _issued(run: Run, rank: int, operation: Operation, count: int = 1) -> Evidence:
    frame = user_frame(operation.frames, run.wrappers)
    others = f" (and {count - 1} more ranks)" if count > 1 else ""
    state = "returned" if operation.state == OperationState.COMPLETED else "pending or failed"
    text = f"issued {_spelled(operation)} as #{operation.seq}{others}, {state}" + (
        f", in {frame.function}" if frame else ""
    )
    return Evidence.at(frame, text=text, rank=rank, source="flight recorder")


def _advice(run: Run, deviant: Operation, common: Operation) -> tuple[str, ...]:
    here, there = user_frame(deviant.frames, run.wrappers), user_frame(common.frames, run.wrappers)
    places = " and ".join(frame.place for frame in dict.fromkeys((here, there)) if frame)
    return (
        f"compare the two call sites: {places}"
        if places
        else "run again with stack recording on, to get the call sites",
        "look for a branch there that depends on the rank or on rank-local data (overflow, empty batch, `if rank == 0`)",
    )
