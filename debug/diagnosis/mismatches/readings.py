"""What it means that two parties met with different operations: left out, one too many, swapped, another size. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from titan_ckpt.debug.diagnosis.align import elements_of
from titan_ckpt.debug.diagnosis.mismatches.meeting import Meeting, Side, call_site, history, predict
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.kinds import Subtype, VerdictKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What two sides that disagree mean, and the second-best reading."""

    verdict: VerdictKind
    alternative: VerdictKind
    subtype: Subtype = Subtype.NONE


def reading(meeting: Meeting, common: Side, deviant: Side) -> Reading:
    """What two sides that disagree mean."""
    shift = _later_shift(meeting, common, deviant)
    if shift is not None:
        return shift
    if common.operation.op != deviant.operation.op:
        return _different_ops(meeting, common, deviant)
    roots = {common.operation.peer, deviant.operation.peer}
    if len(roots) > 1 and min(roots) >= 0:
        return Reading(
            verdict=VerdictKind.OP_MISMATCH, subtype=Subtype.ROOT, alternative=VerdictKind.SKIPPED_COLLECTIVE
        )
    if common.key[2] != deviant.key[2]:
        if _is_extra(meeting, common, deviant):
            return replace(_EXTRA, alternative=VerdictKind.SIZE_MISMATCH)
        if _is_next(meeting, common, deviant):
            return replace(_SKIPPED, alternative=VerdictKind.SIZE_MISMATCH)
        return Reading(verdict=VerdictKind.SIZE_MISMATCH, alternative=VerdictKind.CALLSITE_DIVERGENCE)
    return Reading(verdict=VerdictKind.DTYPE_MISMATCH, alternative=VerdictKind.SIZE_MISMATCH)


_SKIPPED = Reading(verdict=VerdictKind.SKIPPED_COLLECTIVE, alternative=VerdictKind.ORDER_MISMATCH)
_EXTRA = replace(_SKIPPED, subtype=Subtype.EXTRA_COLLECTIVE)
_SWAPPED = Reading(verdict=VerdictKind.ORDER_MISMATCH, alternative=VerdictKind.SKIPPED_COLLECTIVE)


_OTHER_OP = Reading(verdict=VerdictKind.OP_MISMATCH, alternative=VerdictKind.ORDER_MISMATCH)


def _later_shift(meeting: Meeting, common: Side, deviant: Side) -> Reading | None:
    """If operations went on after the disagreement (NCCL, asynchronous calls), their order shows what happened. Where several
    readings fit, the one by which the most operations come from the same lines on both sides."""
    ours = _following(meeting, common.ranks[0], 6)
    theirs = _following(meeting, deviant.ranks[0], 6)
    if min(len(ours), len(theirs)) < 2 or _is_same_call(meeting, common, deviant):
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


def _is_same_call(meeting: Meeting, common: Side, deviant: Side) -> bool:
    """Whether both issued the same operation from the same line: then its size or dtype differs, and none is one too many."""
    sites = [call_site(meeting.run, side.operation)[:1] for side in (common, deviant)]
    return bool(sites[0]) and sites[0] == sites[1] and common.operation.op == deviant.operation.op


def _following(meeting: Meeting, rank: int, count: int) -> list[tuple[int, int]]:
    """(signature, call site) of a rank's operations from the disagreement on; call site 0: not recorded."""
    lane, frames = meeting.lane, meeting.run.ranks[rank].operations["frames"]
    at, start = lane.members.index(rank), meeting.seq - lane.first_seq
    cells = zip(lane.signature[at, start:][:count].tolist(), lane.row[at, start:][:count].tolist(), strict=True)
    return [(signature, int(frames[row])) for signature, row in cells if signature >= 0]


def _different_ops(meeting: Meeting, common: Side, deviant: Side) -> Reading:
    a, b, run = common.operation, deviant.operation, meeting.run
    before = history(meeting, common.ranks[0])
    keys = [key for key, _ in before]
    if elements_of(a.sizes) == elements_of(b.sizes) and deviant.key not in keys:
        return _OTHER_OP
    if _is_extra(meeting, common, deviant):
        return _EXTRA
    swapped = _SWAPPED if _issued(meeting, common, b.op) or _issued(meeting, deviant, a.op) else _OTHER_OP
    ours, theirs = user_frame(a.frames, run.wrappers), user_frame(b.frames, run.wrappers)
    if ours and theirs and (ours.file, ours.function) == (theirs.file, theirs.function):
        seen = {site[:1] for _, site in before}
        if (theirs,) not in seen:
            return swapped
    return _SKIPPED if deviant.key in keys or not keys else swapped


def _issued(meeting: Meeting, side: Side, op: str) -> bool:
    """Whether a party issued an operation of that name before the meeting or after it."""
    rank, lane, run = side.ranks[0], meeting.lane, meeting.run
    rows = lane.row[lane.members.index(rank)]
    used = np.unique(run.ranks[rank].operations["op"][rows[rows >= 0]]).tolist()
    return op in {run.names.ops[number] for number in used}


def _is_extra(meeting: Meeting, common: Side, deviant: Side) -> bool:
    """The others do what they always do at this point; the deviant issues an operation that is new to it, from a new line."""
    before = history(meeting, deviant.ranks[0])
    keys, sites = [key for key, _ in before], [site[:1] for _, site in before]
    is_routine = predict(keys) == common.key or common.key in keys
    site = call_site(meeting.run, deviant.operation)[:1]
    is_new_line = site not in (*sites, call_site(meeting.run, common.operation)[:1])
    return bool(is_routine and deviant.key not in keys and is_new_line and sites)


def _is_next(meeting: Meeting, common: Side, deviant: Side) -> bool:
    """Whether the others do what they always do at this point, and the deviant what follows it, from the line that always does:
    it left one out."""
    before = history(meeting, common.ranks[0])
    mine = common.key, call_site(meeting.run, common.operation)[:1]
    theirs = deviant.key, call_site(meeting.run, deviant.operation)[:1]
    path = [(key, site[:1]) for key, site in before]
    return mine != theirs and predict(path) == mine and predict([*path, mine]) == theirs
