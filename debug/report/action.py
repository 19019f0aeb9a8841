"""What a launcher should do about a verdict: restart, exclude hosts, stop, or nothing. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from titan_ckpt.debug.incident.kinds import Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Run, Verdict

LEAST_CONFIDENCE = 0.6  # below it a verdict is a lead: then a restart is the least harmful


class ActionKind(StrEnum):
    """The closed set of actions."""

    RESTART = "RESTART"
    EXCLUDE = "EXCLUDE"
    STOP = "STOP"
    NONE = "NONE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An action, the hosts to leave out (EXCLUDE only) and the reason in words."""

    action: ActionKind
    hosts: tuple[str, ...]
    reason: str


_PROGRAM = "the program itself is wrong: it will hang or fail at the same point again"
_WHOSE = "an error of the program, which a restart repeats, but not shown whose: collect what `next_steps` names"
_HOST = "the process or its device stopped working, not the program: leave these hosts out until they are checked"
_ONCE = "the cause lies outside of the program, or may not come back"

_STOPS = frozenset(
    {
        VerdictKind.SKIPPED_COLLECTIVE, VerdictKind.ORDER_MISMATCH, VerdictKind.OP_MISMATCH, VerdictKind.SIZE_MISMATCH,
        VerdictKind.DTYPE_MISMATCH, VerdictKind.CALLSITE_DIVERGENCE, VerdictKind.WRONG_GROUP, VerdictKind.P2P_MISSING_PEER,
        VerdictKind.P2P_SIZE_MISMATCH, VerdictKind.P2P_CYCLE, VerdictKind.PG_CONFIG_CONFLICT,
    }
)  # fmt: skip
_EXCLUDES = frozenset({VerdictKind.RANK_FROZEN, VerdictKind.SCHEDULED_NOT_STARTED, VerdictKind.STARTED_NOT_COMPLETED})
_NOTHING = {
    VerdictKind.HEALTHY: "nothing is wrong",
    VerdictKind.RUNNING: "look again before you do anything: the job may well go on",
    VerdictKind.STRAGGLER: "the job goes on, only slower than it could",
    VerdictKind.INSUFFICIENT_DATA: "the evidence does not decide: collect what `next_steps` names",
    VerdictKind.WAIT_CHAIN: "the evidence does not decide: collect what `next_steps` names",
}
_FAULTY_SUBTYPES = frozenset({Subtype.PYTHON_EXCEPTION, Subtype.OOM, Subtype.NEW_GROUP, Subtype.PYTHON_LOCK})

_FAULTY_HOSTS = frozenset({Subtype.DEVICE, Subtype.HOST, Subtype.STARVED})


def action_for(run: Run, top: Verdict) -> Action:
    """The action for the first verdict."""
    if top.verdict in _NOTHING:
        return Action(action=ActionKind.NONE, hosts=(), reason=_NOTHING[top.verdict])
    if top.verdict in _STOPS and not top.culprits:
        return Action(action=ActionKind.NONE, hosts=(), reason=_WHOSE)
    if top.confidence < LEAST_CONFIDENCE:
        reason = f"the verdict is only a lead ({top.confidence:.0%}): keep the evidence and start again"
        return Action(action=ActionKind.RESTART, hosts=(), reason=reason)
    hosts = tuple(dict.fromkeys(run.ranks[rank].host for rank in top.culprits if run.ranks[rank].host))
    if (top.verdict in _EXCLUDES or top.subtype in _FAULTY_HOSTS) and hosts:
        return Action(action=ActionKind.EXCLUDE, hosts=hosts, reason=_HOST)
    if top.verdict in _STOPS or top.subtype in _FAULTY_SUBTYPES:
        return Action(action=ActionKind.STOP, hosts=(), reason=_PROGRAM)
    return Action(action=ActionKind.RESTART, hosts=(), reason=_ONCE)
