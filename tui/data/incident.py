"""The incident as the screens show it: evidence and verdicts of `titan_ckpt.debug`, and the wait graph."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from titan_ckpt.console.ranks import ranks_text
from titan_ckpt.debug.diagnosis.align import Lane, is_uneven, lanes, with_odd_marked
from titan_ckpt.debug.diagnosis.diagnose import diagnose
from titan_ckpt.debug.diagnosis.looks_well import as_ended, went_on
from titan_ckpt.debug.diagnosis.rank_death import logged_on
from titan_ckpt.debug.diagnosis.rank_state import situations
from titan_ckpt.debug.diagnosis.stragglers import clock_offsets
from titan_ckpt.debug.diagnosis.waiting.failed import failed_rows, raised_rows
from titan_ckpt.debug.diagnosis.waiting.told_waits import told_waits
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge, wait_edges
from titan_ckpt.debug.incident.group_mesh import with_coordinates
from titan_ckpt.debug.incident.kinds import WORDS, EventKind, OperationState, RankState, VerdictKind
from titan_ckpt.debug.incident.records import Frame, LogEvent, RankRecord, Run, Situation, Verdict
from titan_ckpt.debug.incident.waits import Wait, began_ns, last_sign_ns, process_ended, stopped_s, waits
from titan_ckpt.debug.live.kernel_states import with_kernel_states
from titan_ckpt.debug.read.reader import OnRead, open_run
from titan_ckpt.debug.report.seen_situations import seen_situations
from titan_ckpt.tui.data.arrays import Floats, Ints
from titan_ckpt.tui.data.grid import DONE, ENDED, FAILED, GLYPHS, PENDING, RUNNING, in_order, newest_late
from titan_ckpt.tui.data.p2p import P2P_VERDICTS, different_halves, missing_halves, ordinal, p2p_lanes
from titan_ckpt.tui.data.timeline import last_issued_ns
from titan_ckpt.tui.rows import Glyph, Role, RowLink

NO_FAULT = (VerdictKind.HEALTHY, VerdictKind.RUNNING, VerdictKind.INSUFFICIENT_DATA)
P2P_NAME = " send/recv"
# Kinds of log events that are never caused by another rank.
OWN_ERRORS = (EventKind.EXCEPTION, EventKind.OOM, EventKind.FATAL_SIGNAL)
# Worst first.
SITUATIONS: Mapping[RankState, Glyph] = {
    RankState.DEAD: Glyph(char="x", role=Role.BAD, label=WORDS[RankState.DEAD]),
    RankState.FROZEN: Glyph(char="z", role=Role.BAD, label=WORDS[RankState.FROZEN]),
    RankState.GIL_HELD: Glyph(char="g", role=Role.BAD, label=WORDS[RankState.GIL_HELD]),
    RankState.ON_CPU: Glyph(char="c", role=Role.WARN, label=WORDS[RankState.ON_CPU]),
    RankState.IN_TORCH: Glyph(char="b", role=Role.NOTE, label=WORDS[RankState.IN_TORCH]),
    RankState.SILENT: Glyph(char="?", role=Role.WARN, label=WORDS[RankState.SILENT]),
    RankState.IN_INIT: Glyph(char="i", role=Role.NOTE, label=WORDS[RankState.IN_INIT]),
    RankState.IN_P2P: Glyph(char="p", role=Role.GOOD, label=WORDS[RankState.IN_P2P]),
    RankState.IN_COLLECTIVE: Glyph(char="w", role=Role.GOOD, label=WORDS[RankState.IN_COLLECTIVE]),
    RankState.IN_TEARDOWN: Glyph(char="t", role=Role.DIM, label=WORDS[RankState.IN_TEARDOWN]),
    RankState.FINISHED: Glyph(char="f", role=Role.DIM, label=WORDS[RankState.FINISHED]),
    RankState.UNKNOWN: Glyph(char="-", role=Role.DIM, label=WORDS[RankState.UNKNOWN]),
}
HALTED = (RankState.FROZEN, RankState.DEAD)  # what they were in, they do not wait in
_NO_ACTIVITY = (RankState.DEAD, RankState.FINISHED, RankState.SILENT, RankState.UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A diagnosed incident. `edges`: who waits for whom, as the top verdict explains it.

    `lanes` are the groups' collectives, then `num_p2p_lanes` of sends and receives. `is_unconfirmed`: one look at a live job,
    which the next look may contradict. `began_ns` and `last_sign_ns`: when the job stopped going on, and its last recorded
    sign of life, as `debug.incident.waits` finds them; 0 if unknown.
    """

    run: Run
    verdicts: tuple[Verdict, ...]
    lanes: tuple[Lane, ...]
    states: Mapping[int, Situation]
    edges: tuple[Edge, ...] = field(default=())
    num_p2p_lanes: int = 0
    is_unconfirmed: bool = False
    began_ns: int = 0
    last_sign_ns: int = 0

    @cached_property
    def top(self) -> Verdict:
        """The most likely verdict; one that a second look has to confirm names nobody."""
        top = self.verdicts[0]
        return replace(top, culprits=(), suspects=()) if self.is_unconfirmed else top

    @property
    def awaits_confirmation(self) -> bool:
        """Whether one look at a live job shows a fault, which the next look has to show too."""
        return self.is_unconfirmed and self.top.verdict not in NO_FAULT

    @property
    def is_slow(self) -> bool:
        """Whether the verdict is that the job went on, held up again and again: nothing hung."""
        return self.top.verdict == VerdictKind.STRAGGLER

    @property
    def is_running(self) -> bool:
        """Whether the verdict is that the job goes on: what a rank has not issued it will."""
        return self.top.verdict == VerdictKind.RUNNING

    @cached_property
    def is_over(self) -> bool:
        """Whether the job ended well: what its records leave open has ended since."""
        return went_on(self.run)

    @cached_property
    def stop_s(self) -> float:
        """When the job stopped going on, in seconds since the epoch; 0 if unknown."""
        return stopped_s(self.run, self.top, self.began_ns)

    @cached_property
    def failed(self) -> dict[int, int]:
        """The operation at which a rank failed, as the row among its operations, by rank."""
        collectives = self.lanes[: len(self.lanes) - self.num_p2p_lanes]
        return raised_rows(self.run) | {
            r: row for lane in collectives for r, row in failed_rows(self.run, lane).items()
        }

    def word_of(self, rank: int, row: int) -> str:
        """What became of an operation of a rank, in the words of the grid's legend."""
        if self.failed.get(rank) == row:
            return GLYPHS[FAILED].label
        op = self.run.operation(rank, row)
        if op.retired or op.state == OperationState.COMPLETED:
            return GLYPHS[DONE].label
        if self.is_over:
            return GLYPHS[ENDED].label
        return GLYPHS[RUNNING if op.state == OperationState.STARTED else PENDING].label

    def is_p2p(self, lane: Lane) -> bool:
        """Whether a lane holds sends and receives."""
        return any(lane is other for other in self.lanes[len(self.lanes) - self.num_p2p_lanes :])

    @cached_property
    def _bare_names(self) -> tuple[str, ...]:
        """Names of the lanes' groups, marked where a lane holds sends and receives; several may have one name."""
        return tuple(f"{self.run.groups[lane.group]}{P2P_NAME if self.is_p2p(lane) else ''}" for lane in self.lanes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the lanes: with the ranks where several groups, such as those of one axis of a mesh, have one name."""
        counts = Counter(self._bare_names)
        found = (
            name if counts[name] == 1 else f"{name} of {ranks_text(lane.members, 4)}"
            for name, lane in zip(self._bare_names, self.lanes, strict=True)
        )  # fmt: skip
        seen: Counter[str] = Counter()
        names = []
        for name in found:
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
        return tuple(names)

    def name_of(self, lane: Lane) -> str:
        """Name of a lane, which no other one has."""
        return next(name for name, other in zip(self.names, self.lanes, strict=True) if other is lane)

    def logged_step(self, step: int) -> tuple[int, float] | None:
        """The rank whose log names a training step, and when, in seconds since the epoch: a rank at fault, else the first."""
        order = (rank for rank in (*self.top.culprits, *self.run.ranks) if rank in self.run.ranks)
        logs = ((rank, self.run.ranks[rank].log) for rank in order)
        return next(((rank, log.step_times[step]) for rank, log in logs if log and step in log.step_times), None)

    def is_past(self, ranks: Iterable[int]) -> bool:
        """Whether what these ranks wait for is over: their processes have ended, or the job went on."""
        return self.is_slow or all(rank in self.run.ranks and process_ended(self.run, rank, self.top) for rank in ranks)

    def doing(self, rank: int) -> str:
        """What a rank does, or did before its process ended: `in a collective`, `was in a collective`."""
        state = self.states.get(rank)
        if state is None:
            return "unknown"
        if rank in self.failed and state.kind.is_waiting:
            return f"failed {SITUATIONS[state.kind].label}"
        beat = self.run.ranks[rank].heartbeat
        if state.kind == RankState.UNKNOWN and beat is not None and not beat.is_stopped and beat.step >= 0:
            return f"seen in step {beat.step}"
        was = "was " if state.kind not in _NO_ACTIVITY and not self.is_slow and self.is_past((rank,)) else ""
        return f"{was}{SITUATIONS[state.kind].label}"

    def held_up_by(self, ranks: Iterable[int]) -> set[int]:
        """The ranks that wait for one of these, directly or through others."""
        waiters: defaultdict[int, set[int]] = defaultdict(set)
        for edge in self.edges:
            waiters[edge.awaited].add(edge.waiter)
        found, left = set[int](), list(ranks)
        while left:
            new = waiters[left.pop()] - found
            found |= new
            left += new
        return found

    def number_of(self, lane: Lane, seq: int) -> str:
        """A column of a lane in words: `#7`, or `3rd` of the sends and receives of each rank."""
        return ordinal(seq) if self.is_p2p(lane) else f"#{seq}"

    def group_name(self, group: int, *, is_p2p: bool = False) -> str:
        """Name of the lane of a group (an index into the run's); the group's own if it has none."""
        return self._name_of.get((group, is_p2p)) or str(self.run.groups[group])

    @cached_property
    def _name_of(self) -> dict[tuple[int, bool], str]:
        named = zip(self.lanes, self.names, strict=True)
        return {(lane.group, self.is_p2p(lane)): name for lane, name in reversed([*named])}

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """What the ranks wait in, equal waits together."""
        return tuple(waits(self.run))

    @cached_property
    def wait_of(self) -> dict[int, Wait]:
        """What each rank waits in."""
        return {rank: wait for wait in self.waits for rank in wait.ranks}

    @cached_property
    def last_issued_ns(self) -> dict[int, Ints]:
        """When the last member issued each operation, by the group of a lane of collectives; {} unless the job was slow."""
        collectives = self.lanes[: len(self.lanes) - self.num_p2p_lanes] if self.is_slow else ()
        return {lane.group: last_issued_ns(self.run, lane, self.clock_offsets(lane)) for lane in collectives}

    def clock_offsets(self, lane: Lane) -> Floats:
        """How far the clock of each member of a lane is ahead, in ns; computed once, as a lane may have thousands."""
        place = next(i for i, other in enumerate(self.lanes) if other is lane)
        if place not in self._offsets:
            self._offsets[place] = clock_offsets(self.run, lane)
        return self._offsets[place]

    @cached_property
    def clocks_ahead(self) -> dict[int, int]:
        """How far clocks are ahead, in ns, by rank: of the members of the largest group."""
        lanes = self.lanes[: len(self.lanes) - self.num_p2p_lanes]
        lane = max(lanes, key=lambda lane: len(lane.members), default=None)
        return (
            {} if lane is None else dict(zip(lane.members, self.clock_offsets(lane).astype(int).tolist(), strict=True))
        )

    @cached_property
    def _late_at(self) -> dict[int, int | None]:
        """The newest late operation of the ranks at fault, by group."""
        collectives = self.lanes[: len(self.lanes) - self.num_p2p_lanes]
        return {
            lane.group: newest_late(self.run, lane, self.top.culprits, self.clock_offsets(lane)) for lane in collectives
        }

    def is_late_in(self, lane: Lane) -> bool:
        """Whether the ranks at fault of a slow job came late to operations of a lane of collectives."""
        return self.is_slow and self._late_at.get(lane.group) is not None

    @cached_property
    def _offsets(self) -> dict[int, Floats]:
        return {}

    def lane_of(self, group: str | None) -> int:
        """Index of a lane by its name; 0 if there is none."""
        return self.names.index(group) if group in self.names else 0

    def lane_of_verdict(self, verdict: Verdict) -> int | None:
        """Index of the lane that a verdict is about; of several of its name, one of the ranks at fault."""
        name = f"{verdict.group}{P2P_NAME if verdict.verdict in P2P_VERDICTS else ''}"
        places = [i for i, other in enumerate(self._bare_names) if verdict.group and other == name]
        named = set(verdict.culprits or verdict.suspects or verdict.victims)
        return next((i for i in places if named & set(self.lanes[i].members)), places[0] if places else None)

    def left_out(self, lane: Lane) -> dict[int, int]:
        """The column of the send or receive that a rank left out, by its place. In a cycle nobody left one out."""
        return {} if self.top.verdict == VerdictKind.P2P_CYCLE else missing_halves(lane, self.edges)

    def stands_at(self, lane: Lane) -> int:
        """The number at which a lane stands: the verdict's, of a slow job the newest late one that all issued, else the first
        that a rank waits in, else the last."""
        top, last = self.top, int(lane.last.max())
        if self.is_p2p(lane):
            missing = self.left_out(lane) or different_halves(self.run, lane, top)
            places = [place for place in missing if lane.members[place] in top.culprits] or list(missing)
            column = missing[places[0]] if places else last - 1
            return lane.first_seq + (column if (lane.row[:, column] >= 0).any() else last - 1)
        place = self.lane_of_verdict(top)
        if top.seq is not None and place is not None and self.lanes[place] is lane:
            return top.seq
        if self.is_slow and (late := self._late_at[lane.group]) is not None:
            return late
        seqs = [e.seq for e in self.edges if e.group == lane.group and not (e.is_p2p or e.is_after) and e.seq >= 0]
        return min(seqs or lane.pending[lane.pending >= 0].tolist(), default=last)

    @property
    def foremost(self) -> int | None:
        """The rank to look at first: the first at fault, else the first suspect, or of all that died."""
        died = self.top.victims if self.top.verdict == VerdictKind.RANK_DIED else ()
        return next(iter(self.top.culprits or self.top.suspects or died), None)

    def link_of(self, verdict: Verdict, rank: int | None = None) -> RowLink | None:
        """What a verdict is about: a collective, a send or receive (whose number counts per pair), else its rank's waits."""
        rank = rank if rank is not None else verdict.culprits[0] if verdict.culprits else None
        place = self.lane_of_verdict(verdict)
        group = None if place is None else self.names[place]
        if verdict.verdict in P2P_VERDICTS:
            return RowLink(screen=2, group=group, rank=rank)
        if verdict.seq is not None:
            return RowLink(screen=3, group=group, seq=verdict.seq, rank=rank)
        return RowLink(screen=6, group=group, rank=rank) if rank is not None else None

    def confirmed_by(self, former: Incident | None) -> Incident:
        """This look at a live job, after an earlier one: its verdict holds if both name the same fault and ranks."""
        now, before = self.verdicts[0], None if former is None else former.verdicts[0]
        is_same = before is not None and (before.verdict, before.culprits) == (now.verdict, now.culprits)
        return replace(self, is_unconfirmed=not is_same)


def has_ended(record: RankRecord) -> bool:
    """Whether a rank's process has ended, by its exit code or by the kernel."""
    return record.exit is not None or record.is_gone


def load_incident(url: str, incident: str | None = None, *, on_read: OnRead | None = None) -> Incident:
    """Read and diagnose the newest incident, or the one of that name; raises TitanError if there is no evidence."""
    return diagnosed(with_kernel_states(open_run(url, incident=incident, on_read=on_read), url, time.time()))


def diagnosed(run: Run) -> Incident:
    """The incident of a run: its verdicts, waits and lanes."""
    states = situations(run)
    found, p2p = in_order(run, lanes(run)), in_order(run, p2p_lanes(run))
    verdicts = tuple(diagnose(run))
    edges = tuple(told_waits(run, wait_edges(run, found, states), verdicts[0]))
    return Incident(
        run=with_coordinates(run),
        verdicts=verdicts,
        lanes=(*(with_odd_splits(run, with_odd_marked(run, lane, verdicts[0]), verdicts[0]) for lane in found), *p2p),
        num_p2p_lanes=len(p2p),
        states=as_ended(run, seen_situations(run, states, verdicts[0], {edge.waiter for edge in edges})),
        edges=edges,
        began_ns=began_ns(run),
        last_sign_ns=last_sign_ns(run),
    )


def with_odd_splits(run: Run, lane: Lane, top: Verdict) -> Lane:
    """The lane with the operation at which the splits of the ranks at fault do not fit as another one: nothing else tells it from
    that of the others, as ranks may pass any sizes to it."""
    blamed = top.culprits or top.suspects
    if top.verdict != VerdictKind.SIZE_MISMATCH or top.seq is None or str(run.groups[lane.group]) != top.group:
        return lane
    odd = [
        i for i, rank in enumerate(lane.members) if rank in blamed and (lane.group, top.seq) in run.ranks[rank].splits
    ]
    if not odd or not is_uneven(top.op):
        return lane
    signature = lane.signature.astype(np.int32)
    signature[odd, top.seq - lane.first_seq] = len(lane.codes) + np.arange(len(odd))
    return replace(lane, signature=signature, codes=np.append(lane.codes, np.zeros(len(odd), np.int64)))


def log_ranks(run: Run) -> dict[str, int]:
    """The rank of each log that is one rank's alone, by path."""
    shared = {log.source for log in (run.job_log, run.launcher) if log is not None}
    ranks: dict[str, list[int]] = {}
    for rank, record in run.ranks.items():
        if record.log is not None and record.log.source not in shared:
            ranks.setdefault(record.log.source, []).append(rank)
    return {source: found[0] for source, found in ranks.items() if len(found) == 1}


def first_error(incident: Incident) -> LogEvent | None:
    """The earliest primary error in any log: not a closed connection, a timeout, a signal from the launcher, or what was caught.

    Errors of the verdict's culprits take precedence, since clocks differ.
    """
    records = [record for record in incident.run.ranks.values() if record.log is not None]
    own = [event for record in records for event in _own_errors(record) if not logged_on(record, event)]
    blamed = [event for event in own if event.rank in incident.top.culprits]
    return min(blamed or own, key=lambda event: (event.time_s is None, event.time_s or 0.0, event.rank), default=None)


def _own_errors(record: RankRecord) -> list[LogEvent]:
    """Primary errors of a rank's log. An abort after a communication error is a consequence of it."""
    kinds = [event.kind for event in record.events]
    first_comm = next((i for i, kind in enumerate(kinds) if kind.is_communication), len(kinds))
    return [
        event
        for i, event in enumerate(record.events)
        if event.kind in OWN_ERRORS and not (event.kind == EventKind.FATAL_SIGNAL and i > first_comm)
    ]


def activities(incident: Incident) -> Iterator[tuple[RankState, str, list[int]]]:
    """(kind, what they do, ranks), worst first; those that have ended apart: they did it."""
    alike: dict[tuple[RankState, bool, bool], list[int]] = {}
    for rank, state in incident.states.items():
        is_over = state.kind not in _NO_ACTIVITY and incident.is_past((rank,))
        alike.setdefault((state.kind, is_over, rank in incident.failed), []).append(rank)
    for kind, is_over, has_failed in sorted(alike, key=lambda each: (list(SITUATIONS).index(each[0]), *each[1:])):
        ranks = alike[kind, is_over, has_failed]
        doing = {incident.doing(rank) for rank in ranks}
        was = "was " if is_over and not incident.is_slow else ""
        yield kind, doing.pop() if len(doing) == 1 else f"{was}{SITUATIONS[kind].label}", ranks


def frame_text(frame: Frame) -> str:
    """`file:line function`, without the folder."""
    return f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"
