"""What the bar above every screen says: the job's state, the rank at fault, its process and line, since when, how sure. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from signal import Signals

from titan_ckpt.console.units import format_duration
from titan_ckpt.debug.diagnosis.rank_death import signal_of
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.kinds import RankState, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Exit, Heartbeat
from titan_ckpt.debug.live.watch import Alarm, AlarmKind, alarms
from titan_ckpt.debug.report.facts import moment, step_text
from titan_ckpt.tui.data.incident import NO_FAULT, Incident, has_ended
from titan_ckpt.tui.data.runs import NO_RESUME, RunSteps
from titan_ckpt.tui.rows import Role, counted, ranks_named, truncate

SAVE_PHASES = ("ckpt_stage", "ckpt_upload", "ckpt_commit")
LIVE_S, _RECENT_S = 30.0, 3600.0
# For how long after its last tick a process may write more: one without an end, one whose recorder has stopped.
_OPEN_S, _CLOSED_S = 600.0, 20.0
_HELD_S = 600.0  # for how long after its last tick the kernel is asked about a process
_NO_STANDSTILL = (*NO_FAULT, VerdictKind.STRAGGLER)
_SURE = "confidence "
_KINDS: Mapping[Subtype, str] = {
    Subtype.CHECKPOINT_IO: "checkpoint I/O", Subtype.GIL_HELD: "GIL held", Subtype.OOM: "out of memory",
    Subtype.PYTHON_EXCEPTION: "Python exception", Subtype.PYTHON_LOCK: "Python lock", Subtype.GC: "garbage collection",
}  # fmt: skip
_WORDS = ((0.9, "recorded"), (0.7, "likely"), (0.6, "check it first"), (0.5, "one of several readings"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """`word` is the state in a word; of the `facts`, those in `minor` go first where there is no room."""

    word: str
    role: Role
    facts: tuple[str, ...]
    minor: tuple[str, ...] = ()

    def beside(self, steps: RunSteps | None) -> Standing:
        """The same job over a run that may have damaged steps: then never a calm colour."""
        damage = damage_facts(steps)
        role = Role.WARN if self.role == Role.GOOD and damage else self.role
        return replace(self, role=role, facts=(*self.facts, *damage))

    @property
    def foremost(self) -> str:
        """The state and the first fact, mostly the rank: what is never left out."""
        return " · ".join([self.word, *(_forms(fact)[-1] for fact in self.facts[:1])])

    def text(self, width: int) -> str:
        """As many facts as fit: how sure it is after those that are not minor; what comes after the confidence only if that is
        whole."""
        places = range(len(self.facts))
        sure = next((i for i in places if self.facts[i].startswith(_SURE)), len(places))
        kept: dict[int, str] = {}

        def line(more: Mapping[int, str]) -> str:
            found = {**kept, **more}
            return " · ".join([self.word, *(found[i] for i in places if i in found)])

        for some in (sorted(places[: sure + 1], key=lambda i: (self.facts[i] in self.minor, i)), places[sure + 1 :]):
            for i in some:
                short = _forms(self.facts[i])[-1]
                kept |= {i: short} if len(line({i: short})) <= width else {}
            for i in [i for i in some if i in kept]:
                kept[i] = next(form for form in _forms(self.facts[i]) if len(line({i: form})) <= width)
        for i in (i for i in places[sure + 1 :] if i not in kept and sure in kept):
            # rather a moment than the confidence in words
            whole = {i: self.facts[i], sure: _forms(self.facts[sure])[1]}
            kept |= whole if len(line(whole)) <= width else {}
        return truncate(line({}), width)


def damage_facts(steps: RunSteps | None) -> tuple[str, ...]:
    """What one who resumes has to know of damaged steps; () without any."""
    if steps is None or not steps.num_damaged:
        return ()
    return counted(steps.num_damaged, "damaged step"), *((NO_RESUME,) if steps.has_none_to_resume else ())


def _forms(fact: str) -> tuple[str, ...]:
    """What a fact can be written as, longest first.

    >>> _forms("confidence 90% (recorded)")
    ('confidence 90% (recorded)', 'confidence 90%', '90%')
    """
    bare = fact.partition(" (")[0]
    return fact, bare, bare.removeprefix(_SURE).replace("stuck for ", "stuck ")


def is_saving(incident: Incident) -> bool:
    """Whether a rank was in a save when the job stopped, by a verdict or its heartbeat."""
    phases = (record.heartbeat.phase for record in incident.run.ranks.values() if record.heartbeat is not None)
    has_verdict = any(verdict.subtype == Subtype.CHECKPOINT_IO for verdict in incident.verdicts)
    return has_verdict or any(phase in SAVE_PHASES for phase in phases)


def heartbeats(incident: Incident) -> dict[int, Heartbeat]:
    """The heartbeats of the ranks that have one and that are not known to have ended, or to be dead."""
    return {
        rank: record.heartbeat
        for rank, record in incident.run.ranks.items()
        if record.heartbeat is not None and not has_ended(record) and not _is_dead(incident, rank)
    }


def _is_dead(incident: Incident, rank: int) -> bool:
    """Whether the ranks by state show a rank as dead: its last tick may be of this second all the same."""
    state = incident.states.get(rank)
    return state is not None and state.kind == RankState.DEAD


def ticking(incident: Incident, now_s: float) -> list[Heartbeat]:
    """The heartbeats of the last seconds, and of processes that the kernel has stopped: none if the job has ended or is gone."""
    beats, stopped = heartbeats(incident), _stopped_ranks(incident)
    return [
        beat
        for rank, beat in beats.items()
        if not beat.is_stopped and abs(now_s - beat.alive_ns / 1e9) < (_HELD_S if rank in stopped else LIVE_S)
    ]


def _stopped_ranks(incident: Incident) -> tuple[int, ...]:
    """The ranks that the kernel of this machine says to be stopped now."""
    return tuple(rank for rank, record in incident.run.ranks.items() if record.process_state.startswith("T"))


def may_go_on(incident: Incident, now_s: float) -> bool:
    """Whether a job may write more: no end of it is known, and it showed life in the last hour."""
    run = incident.run
    is_over = run.launcher is not None and run.launcher.code is not None
    is_over |= all(has_ended(record) for record in run.ranks.values())
    return not is_over and now_s - incident.last_sign_ns / 1e9 < _RECENT_S


def is_unsettled(incident: Incident, now_s: float) -> bool:
    """Whether another look may tell more: a hung job writes no file, and its black boxes change where no listing shows it. Its
    launcher writes later how ranks that are gone ended, and a process its exit status after its recorder has stopped."""
    open_ends = (record.heartbeat for record in incident.run.ranks.values() if record.exit is None)
    return any(
        beat is not None
        and now_s - beat.alive_ns / 1e9 < (_CLOSED_S if beat.is_stopped and not beat.is_leaving else _OPEN_S)
        for beat in open_ends
    )


def newest_of(live: Sequence[Heartbeat]) -> Heartbeat:
    """The heartbeat of the rank that is furthest."""
    return max(live, key=lambda beat: (beat.step, beat.phase_ns))


def newest_step(incident: Incident, newest: Heartbeat) -> str:
    """`step 12`: of the newest heartbeat, else of the logs: not every program tells its recorder; "" if unknown."""
    logged = (record.log.last_step for record in incident.run.ranks.values() if record.log is not None)
    step = newest.step if newest.step >= 0 else max((each for each in logged if each is not None), default=-1)
    return step_text(incident.run, step) if step >= 0 else ""


def alarms_now(incident: Incident, now_s: float) -> list[Alarm]:
    """What the heartbeats of a job, and the kernel, show to be wrong now."""
    # else the verdict says who is dead, and why all stand still
    is_calm = incident.is_unconfirmed or incident.top.verdict in NO_FAULT
    gone = tuple(
        rank
        for rank, record in incident.run.ranks.items()
        if record.exit is None and (record.is_gone or (is_calm and _is_dead(incident, rank)))
    )
    which = (
        f"the process{' of' if len(gone) == 1 else 'es of'} {rank_list(gone)} {'is' if len(gone) == 1 else 'are'} gone"
    )
    ended = [Alarm(kind=AlarmKind.GONE, ranks=gone, text=which)] if gone else []
    stopped = _stopped_ranks(incident)
    others = {rank: beat for rank, beat in heartbeats(incident).items() if rank not in stopped}
    if stopped:
        ended.append(
            Alarm(kind=AlarmKind.STOPPED, ranks=stopped, text=f"{rank_list(stopped)} stopped by a signal (state T)")
        )
    found = alarms(others, int(now_s * 1e9), after_s=LIVE_S)
    return [*ended, *(alarm for alarm in found if is_calm or alarm.kind != AlarmKind.STALLED)]


def standing(incident: Incident, now_s: float) -> Standing:
    """The state of the job. An unconfirmed verdict on a live job names nobody."""
    live, top = ticking(incident, now_s), incident.top
    if live and (incident.is_unconfirmed or top.verdict in NO_FAULT):
        alive = f"{len(live):,} of {counted(incident.run.world_size, 'rank')} alive"
        facts = tuple(fact for fact in (newest_step(incident, newest_of(live)), alive) if fact)
        found = alarms_now(incident, now_s)
        if found:
            return Standing(word=found[0].kind, role=Role.BAD, facts=(ranks_named(found[0].ranks, 3), *facts))
        return Standing(
            word="RUNNING", role=Role.GOOD, facts=(*facts, "looking again") if incident.is_unconfirmed else facts
        )
    role: Role = (
        Role.GOOD if top.verdict in (VerdictKind.HEALTHY, VerdictKind.RUNNING)
        else Role.WARN if top.verdict in NO_FAULT or incident.is_slow else Role.BAD
    )  # fmt: skip
    minor = (_subtype_text(incident), *(process_text(incident, rank) for rank in top.culprits or top.suspects))
    return Standing(word=top.verdict, role=role, facts=_facts(incident, now_s if live else None), minor=minor)


def _facts(incident: Incident, now_s: float | None) -> tuple[str, ...]:
    top, named = incident.top, incident.top.culprits or incident.top.suspects
    facts = [ranks_named(named, 3) if top.culprits else f"suspects: {ranks_named(named, 3)}"] if named else []
    if top.verdict == VerdictKind.RANK_DIED and not named:
        named, facts = top.victims, ["all ranks"]  # of one cause: nobody is at fault alone
    stuck = "slow, not stuck" if incident.is_slow else stuck_text(incident, now_s)
    facts += [stuck, _subtype_text(incident) if top.verdict not in NO_FAULT else ""]
    lines = {line_text(incident, rank) for rank in named}
    facts += [lines.pop()] if len(lines) == 1 else []
    facts += [process_text(incident, named[0])] if len(named) == 1 else []
    facts += [f"{_SURE}{top.confidence:.0%} ({confidence_word(top.confidence)})"] if top.verdict not in NO_FAULT else []
    facts += [_undecided_text(incident), stop_text(incident)]
    return tuple(fact for fact in facts if fact)


def _undecided_text(incident: Incident) -> str:
    """How many ranks are gone or wait, where nobody is named; "" of another verdict."""
    if not incident.top.is_undecided:
        return ""
    gone = sum(record.is_gone and record.exit is None for record in incident.run.ranks.values())
    if gone and gone == incident.run.world_size:
        return f"{counted(gone, 'rank')} gone"
    waiting = len(incident.top.victims)
    return f"{counted(waiting, 'rank')} wait{'s' * (waiting == 1)}" if waiting else ""


def _subtype_text(incident: Incident) -> str:
    """The kind of the fault, of a killed process the signal."""
    top = incident.top
    dead = incident.run.ranks.get(top.culprits[0]) if top.culprits and top.subtype == Subtype.SIGNAL else None
    return exit_text(dead.exit) if dead is not None and dead.exit is not None else kind_text(top.subtype)


def kind_text(subtype: Subtype) -> str:
    """A subtype in words.

    >>> kind_text(Subtype.CHECKPOINT_IO), kind_text(Subtype.USER_CODE)
    ('checkpoint I/O', 'user code')
    """
    return _KINDS.get(subtype, subtype.replace("_", " "))


def stop_text(incident: Incident) -> str:
    """When the job stopped, or ended; "" if that is not known."""
    if incident.is_over or incident.is_slow:
        word = "ended" if incident.is_over else "last sign of life"
        return f"{word} {moment(incident.last_sign_ns / 1e9)}" if incident.last_sign_ns else ""
    if not incident.stop_s:
        return f"last sign of life {moment(incident.last_sign_ns / 1e9)}" if incident.last_sign_ns else ""
    return f"stopped {moment(incident.stop_s)}"


def exit_text(end: Exit) -> str:
    """How a process ended: `code 1`, `SIGTERM from the launcher`, `killed by SIGKILL`."""
    number = signal_of(end.code)
    if not number:
        return f"code {end.code}"
    name = Signals(number).name if number in set(Signals) else f"signal {number}"
    if end.was_told and name == "SIGTERM":
        return "SIGTERM from the launcher"
    return f"killed by {name}{', after SIGTERM from the launcher' if end.was_told else ''}"


def stuck_text(incident: Incident, now_s: float | None) -> str:
    """`stuck for 14 min`: until `now_s`, or until the last sign of life of a job that is gone; "" if no time is known, or if
    a rank of it died: that is a moment."""
    began, top = incident.stop_s, incident.top
    until = now_s if now_s is not None else incident.last_sign_ns / 1e9
    if incident.is_over or top.verdict in _NO_STANDSTILL or not began or until - began < 1:
        return ""
    if top.verdict == VerdictKind.RANK_DIED:
        return f"stopped for {format_duration(until - began)}" if now_s is not None else ""
    return f"stuck for {format_duration(until - began)}"


def process_text(incident: Incident, rank: int) -> str:
    """`host:pid`, or what of it is known."""
    record = incident.run.ranks.get(rank)
    if record is None:
        return ""
    return (
        f"{record.host}:{record.pid}"
        if record.host and record.pid
        else record.host or (f"pid {record.pid}" if record.pid else "")
    )


def line_text(incident: Incident, rank: int) -> str:
    """The line of the fault, else where the rank was."""
    state = incident.states.get(rank)
    seen = (state.frame.file, state.frame.line) if state is not None and state.frame is not None else ("", 0)
    file, line = fault_line(incident, rank) or seen
    return f"{file.rpartition('/')[2]}:{line}" if file else ""


def fault_line(incident: Incident, rank: int) -> tuple[str, int] | None:
    """File and line of the verdict, or of what it says of the rank."""
    top = incident.top
    said = ((item.file, item.line) for item in top.evidence if item.rank == rank and item.file)
    return (top.file, top.line) if top.file else next(said, None)


def fault_elsewhere(incident: Incident, rank: int) -> tuple[str, int] | None:
    """The line of the fault, if it is not where its rank was found: that went on after a wrong call."""
    found, state = fault_line(incident, rank), incident.states.get(rank)
    is_there = state is not None and state.frame is not None and (state.frame.file, state.frame.line) == found
    return None if is_there else found


def confidence_word(confidence: float) -> str:
    """The confidence in words, as docs/hangs.md explains it."""
    return next((word for least, word in _WORDS if confidence >= least), "a lead only")
