"""Ranks that met at the same sequence number with different operations: who deviated, and how. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_ckpt.debug.diagnosis.align import Lane, elements_of, first_disagreement, is_uneven
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.records import Evidence, Frame, Operation, Run, Verdict

HISTORY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """The ranks that issued the same thing, with one of their operations."""

    ranks: tuple[int, ...]
    operation: Operation
    row: int

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        op = self.operation
        return op.op, op.dtypes, () if is_uneven(op.op) else elements_of(op.sizes)


def mismatch(run: Run, lane: Lane) -> Verdict | None:
    """The verdict on the first disagreement of a lane, or None if there is none or it did no harm."""
    seq = first_disagreement(lane)
    if seq is None or _was_harmless(run, lane, seq):
        return None
    sides = _sides(run, lane, seq)
    culprits, certainty, why = _deviants(run, lane, seq, sides)
    common = next((side for side in sides if not set(side.ranks) & set(culprits)), sides[0])
    deviant = next((side for side in sides if side is not common), sides[-1])
    shift = _call_site_shift(run, lane, seq, culprits)
    if shift is not None:
        return _call_site_verdict(run, lane, shift, seq, culprits, certainty)
    name, subtype, alternative = _name(run, lane, seq, common, deviant)
    return _verdict(run, lane, seq, name, subtype, common, deviant, culprits, certainty, why, alternative)


def _was_harmless(run: Run, lane: Lane, seq: int) -> bool:
    """All went on past it and nobody is waiting: sizes may differ legally, for example between steps of an uneven gather."""
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
    sides = [_Side(ranks=tuple(r), operation=run.operation(r[0], rows[r[0]]), row=rows[r[0]]) for r in parties.values()]
    return sorted(sides, key=lambda side: (-len(side.ranks), side.ranks))


def _deviants(run: Run, lane: Lane, seq: int, sides: Sequence[_Side]) -> tuple[tuple[int, ...], float, str]:
    """Who deviated: a minority; between equal parties the one whose own history did not lead there."""
    first, rest = sides[0], sides[1:]
    if len(first.ranks) > len(rest[0].ranks):
        ranks = tuple(sorted(rank for side in rest for rank in side.ranks))
        certainty = 0.95 if len(first.ranks) > len(ranks) else 0.75
        return ranks, certainty, f"{len(first.ranks)} of {len(lane.members)} ranks agree with each other"
    tied = [side for side in sides if len(side.ranks) == len(first.ranks)]
    scores = [_strangeness(run, lane, seq, side) for side in tied]
    if max(scores) > min(scores):
        strange = tied[scores.index(max(scores))]
        return strange.ranks, 0.85, "its own earlier operations led elsewhere"
    everyone = tuple(sorted(rank for side in sides for rank in side.ranks))
    return everyone, 0.4, "both parties are equally large and neither breaks with its own history"


def _strangeness(run: Run, lane: Lane, seq: int, side: _Side) -> int:
    """How much an operation breaks with what the rank did before: not the predicted one, never issued, from a new line."""
    history = _history(run, lane, side.ranks[0], seq)
    keys = [key for key, _ in history]
    sites = [site for _, site in history]
    site = call_site(run, side.operation)
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


def _history(
    run: Run, lane: Lane, rank: int, seq: int
) -> list[tuple[tuple[str, str, tuple[int, ...]], tuple[Frame, ...]]]:
    """(key, call site) of the rank's collectives on this group before `seq`, oldest first."""
    i = lane.members.index(rank)
    stop = seq - lane.first_seq
    rows = [int(row) for row in lane.row[i, max(0, stop - HISTORY) : stop] if row >= 0]
    found = []
    for row in rows:
        operation = run.operation(rank, row)
        found.append((_Side(ranks=(rank,), operation=operation, row=row).key, call_site(run, operation)))
    return found


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


def _name(run: Run, lane: Lane, seq: int, common: _Side, deviant: _Side) -> tuple[str, str, str]:
    """(verdict, subtype, second-best verdict) for two sides that disagree."""
    a, b = common.operation, deviant.operation
    shift = _later_shift(lane, seq, common, deviant)
    if shift:
        return shift
    if a.op != b.op:
        return _different_ops(run, lane, seq, common, deviant)
    if common.key[2] != deviant.key[2]:
        if _is_extra(run, lane, seq, common, deviant):
            return "SKIPPED_COLLECTIVE", "extra_collective", "SIZE_MISMATCH"
        return "SIZE_MISMATCH", "", "CALLSITE_DIVERGENCE"
    return "DTYPE_MISMATCH", "", "SIZE_MISMATCH"


def _later_shift(lane: Lane, seq: int, common: _Side, deviant: _Side) -> tuple[str, str, str] | None:
    """Where operations go on after the disagreement (NCCL, asynchronous calls), their order tells what happened."""
    ours = _following(lane, common.ranks[0], seq, 6)
    theirs = _following(lane, deviant.ranks[0], seq, 6)
    if min(len(ours), len(theirs)) < 2:
        return None
    if ours[0] == theirs[1] and ours[1] == theirs[0] and ours[2:][: len(theirs) - 2] == theirs[2:][: len(ours) - 2]:
        return "ORDER_MISMATCH", "", "SKIPPED_COLLECTIVE"
    n = min(len(ours) - 1, len(theirs))
    if n >= 2 and ours[1 : 1 + n] == theirs[:n]:
        return "SKIPPED_COLLECTIVE", "", "ORDER_MISMATCH"
    n = min(len(theirs) - 1, len(ours))
    if n >= 2 and theirs[1 : 1 + n] == ours[:n]:
        return "SKIPPED_COLLECTIVE", "extra_collective", "ORDER_MISMATCH"
    return None


def _following(lane: Lane, rank: int, seq: int, count: int) -> list[int]:
    values = lane.signature[lane.members.index(rank), seq - lane.first_seq :][:count]
    return [int(value) for value in values if value >= 0]


def _different_ops(run: Run, lane: Lane, seq: int, common: _Side, deviant: _Side) -> tuple[str, str, str]:
    a, b = common.operation, deviant.operation
    history = [key for key, _ in _history(run, lane, common.ranks[0], seq)]
    if elements_of(a.sizes) == elements_of(b.sizes) and deviant.key not in history:
        return "OP_MISMATCH", "", "ORDER_MISMATCH"
    if _is_extra(run, lane, seq, common, deviant):
        return "SKIPPED_COLLECTIVE", "extra_collective", "ORDER_MISMATCH"
    ours, theirs = user_frame(a.frames, run.wrappers), user_frame(b.frames, run.wrappers)
    if ours and theirs and (ours.file, ours.function) == (theirs.file, theirs.function):
        seen = {site[:1] for _, site in _history(run, lane, common.ranks[0], seq)}
        if (theirs,) not in seen:
            return "ORDER_MISMATCH", "", "SKIPPED_COLLECTIVE"
    if deviant.key in history or not history:
        return "SKIPPED_COLLECTIVE", "", "ORDER_MISMATCH"
    return "ORDER_MISMATCH", "", "SKIPPED_COLLECTIVE"


def _is_extra(run: Run, lane: Lane, seq: int, common: _Side, deviant: _Side) -> bool:
    """The others do what they always do at this point; the deviant does what nobody ever did, from a line never seen."""
    history = _history(run, lane, deviant.ranks[0], seq)
    keys, sites = [key for key, _ in history], [site[:1] for _, site in history]
    is_routine = predict(keys) == common.key or common.key in keys
    return bool(is_routine and deviant.key not in keys and call_site(run, deviant.operation)[:1] not in sites and sites)


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


def _call_site_verdict(
    run: Run, lane: Lane, start: int, seq: int, culprits: tuple[int, ...], certainty: float
) -> Verdict:
    rows = lane.seen_at(start)
    other = next(rank for rank in lane.members if rank not in culprits and rank in rows)
    mine, theirs = run.operation(culprits[0], rows[culprits[0]]), run.operation(other, rows[other])
    return Verdict(
        verdict="CALLSITE_DIVERGENCE",
        culprits=culprits,
        victims=tuple(rank for rank in lane.members if rank not in culprits),
        group=str(run.groups[lane.group]),
        seq=start,
        op=mine.op,
        confidence=certainty * 0.95,
        headline=f"{_who(culprits)} issued #{start} of group {run.groups[lane.group]} from another line than the others; "
        f"since then all of its operations are one off, which shows at #{seq}",
        evidence=(_issued(run, culprits[0], mine), _issued(run, other, theirs)),
        chain=tuple((rank, culprits[0]) for rank in lane.members if rank not in culprits),
        next_steps=_advice(run, mine, theirs),
    )


# -------------------------------------------------------------------------------------------------------- verdicts


_SAYS = {
    "SKIPPED_COLLECTIVE": "{who} skipped {common} #{seq} of group {group}: it issued {deviant} while the others wait in {common}",
    "ORDER_MISMATCH": "{who} issued {deviant} and {common} of group {group} in another order than the others (from #{seq})",
    "OP_MISMATCH": "{who} called {deviant} where the others called {common} (#{seq} of group {group})",
    "SIZE_MISMATCH": "{who} passed {deviant_sizes} elements to {common} #{seq} of group {group}, the others {common_sizes}",
    "DTYPE_MISMATCH": "{who} passed {deviant_dtypes} to {common} #{seq} of group {group}, the others {common_dtypes}",
}
_EXTRA = (
    "{who} issued an extra {deviant} (#{seq} of group {group}) that no other rank issues; the others are in {common}"
)


def _verdict(
    run: Run, lane: Lane, seq: int, name: str, subtype: str, common: _Side, deviant: _Side,
    culprits: tuple[int, ...], certainty: float, why: str, alternative: str,
) -> Verdict:  # fmt: skip
    a, b = common.operation, deviant.operation
    is_tie = set(common.ranks) <= set(culprits)
    text = (_EXTRA if subtype == "extra_collective" else _SAYS[name]).format(
        who=_who(culprits), common=a.op, deviant=b.op, seq=seq, group=run.groups[lane.group],
        common_sizes=a.sizes, deviant_sizes=b.sizes, common_dtypes=a.dtypes, deviant_dtypes=b.dtypes,
    ) if not is_tie else (
        f"{_who(common.ranks)} issued {_spelled(a)} where {_who(deviant.ranks)} issued {_spelled(b)} (#{seq} of group "
        f"{run.groups[lane.group]}); the evidence does not tell which of them is wrong"
    )  # fmt: skip
    victims = tuple(rank for rank in lane.members if rank not in culprits)
    return Verdict(
        verdict=name,
        subtype=subtype,
        culprits=culprits,
        victims=victims,
        group=str(run.groups[lane.group]),
        seq=seq,
        op=a.op,
        confidence=certainty,
        headline=text,
        evidence=(
            *(_issued(run, side.ranks[0], side.operation, len(side.ranks)) for side in (deviant, common)),
            Evidence(text=f"why {_who(culprits)}: {why}; the other reading would be {alternative}"),
        ),
        chain=tuple((rank, culprits[0]) for rank in victims),
        next_steps=_advice(run, b, a),
    )


def _spelled(operation: Operation) -> str:
    return f"{operation.op}({operation.sizes or 'nothing'}, {operation.dtypes or '-'})"


def _who(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _issued(run: Run, rank: int, operation: Operation, count: int = 1) -> Evidence:
    frame = user_frame(operation.frames, run.wrappers)
    others = f" (and {count - 1} more ranks)" if count > 1 else ""
    state = "returned" if operation.state == "completed" else "pending or failed"
    return Evidence(
        text=f"issued {operation.op}({operation.sizes or 'nothing'}, {operation.dtypes or '-'}) as #{operation.seq}{others}"
        f", {state}"
        + (f", in {frame.function}" if frame else ""),
        rank=rank, source="flight recorder", file=frame.file if frame else "", line=frame.line if frame else 0,
    )  # fmt: skip


def _advice(run: Run, deviant: Operation, common: Operation) -> tuple[str, ...]:
    here, there = user_frame(deviant.frames, run.wrappers), user_frame(common.frames, run.wrappers)
    places = " and ".join(f"{frame.file}:{frame.line}" for frame in dict.fromkeys((here, there)) if frame)
    return (
        f"compare the two call sites: {places}"
        if places
        else "run again with stack recording on, to get the call sites",
        "look for a branch there that depends on the rank or on rank-local data (overflow, empty batch, `if rank == 0`)",
    )
