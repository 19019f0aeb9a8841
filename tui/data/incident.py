"""The incident as the screens show it: evidence and verdicts of `titan_ckpt.debug`, and the wait graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from titan_ckpt.debug.diagnosis.align import Lane, lanes
from titan_ckpt.debug.diagnosis.diagnose import diagnose
from titan_ckpt.debug.diagnosis.rank_state import situations
from titan_ckpt.debug.diagnosis.wait_graph import Edge, wait_edges
from titan_ckpt.debug.incident.kinds import EventKind, RankState
from titan_ckpt.debug.incident.records import Frame, LogEvent, RankLog, Run, Situation, Verdict
from titan_ckpt.debug.read.reader import open_run
from titan_ckpt.tui.rows import Glyph, Role, TextSpan

# Kinds of log events that are never caused by another rank.
OWN_ERRORS = (EventKind.EXCEPTION, EventKind.OOM, EventKind.FATAL_SIGNAL)
# Worst first.
SITUATIONS: Mapping[RankState, Glyph] = {
    RankState.DEAD: Glyph(char="x", role=Role.BAD, label="dead"),
    RankState.FROZEN: Glyph(char="z", role=Role.BAD, label="frozen"),
    RankState.GIL_HELD: Glyph(char="g", role=Role.BAD, label="GIL held"),
    RankState.ON_CPU: Glyph(char="c", role=Role.WARN, label="busy on CPU"),
    RankState.IN_TORCH: Glyph(char="b", role=Role.NOTE, label="inside torch, such as backward()"),
    RankState.SILENT: Glyph(char="?", role=Role.WARN, label="no evidence"),
    RankState.IN_INIT: Glyph(char="i", role=Role.NOTE, label="in init"),
    RankState.IN_P2P: Glyph(char="p", role=Role.GOOD, label="in send/recv"),
    RankState.IN_COLLECTIVE: Glyph(char="w", role=Role.GOOD, label="waiting in a collective"),
    RankState.IN_TEARDOWN: Glyph(char="t", role=Role.DIM, label="shutting down"),
    RankState.FINISHED: Glyph(char="f", role=Role.DIM, label="finished"),
    RankState.UNKNOWN: Glyph(char="-", role=Role.DIM, label="no stack"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A diagnosed incident. `is_chain`: the evidence shows no waits, and `edges` are the chain of the top verdict."""

    run: Run
    verdicts: tuple[Verdict, ...]
    lanes: tuple[Lane, ...]
    states: Mapping[int, Situation]
    edges: tuple[Edge, ...] = field(default=())
    is_chain: bool = False

    @property
    def top(self) -> Verdict:
        """The most likely verdict."""
        return self.verdicts[0]

    def lane_of(self, group: str | None) -> int:
        """Index of the lane of a group by its name; 0 if there is none."""
        names = [str(self.run.groups[lane.group]) for lane in self.lanes]
        return names.index(group) if group in names else 0


def load_incident(url: str) -> Incident:
    """Read and diagnose; raises TitanError if there is no evidence."""
    run = open_run(url)
    states = situations(run)
    found = lanes(run)
    verdicts = tuple(diagnose(run))
    edges = tuple(wait_edges(run, found, states))
    return Incident(
        run=run,
        verdicts=verdicts,
        lanes=tuple(found),
        states=states,
        edges=edges or chain_edges(run, verdicts[0]),
        is_chain=not edges and bool(verdicts[0].chain),
    )


def chain_edges(run: Run, top: Verdict) -> tuple[Edge, ...]:
    """The chain of the verdict as waits, for a mismatch in which every rank issued something."""
    names = [str(group) for group in run.groups]
    group = names.index(top.group) if top.group in names else -1
    seq = -1 if top.seq is None else top.seq
    return tuple(
        Edge(waiter=waiter, awaited=awaited, group=group, seq=seq, is_inferred=True) for waiter, awaited in top.chain
    )


def first_error(incident: Incident) -> LogEvent | None:
    """The earliest primary error in any log: not a closed connection, a timeout or a signal from the launcher.

    Errors of the verdict's culprits take precedence, since clocks differ.
    """
    logs = [record.log for record in incident.run.ranks.values() if record.log is not None]
    own = [event for log in logs for event in _own_errors(log)]
    blamed = [event for event in own if event.rank in incident.top.culprits]
    return min(blamed or own, key=lambda event: (event.time_s is None, event.time_s or 0.0, event.rank), default=None)


def _own_errors(log: RankLog) -> list[LogEvent]:
    """Primary errors of a log. An abort after a communication error is a consequence of it."""
    kinds = [event.kind for event in log.events]
    first_comm = next((i for i, kind in enumerate(kinds) if kind.is_communication), len(kinds))
    return [
        event
        for i, event in enumerate(log.events)
        if event.kind in OWN_ERRORS and not (event.kind == EventKind.FATAL_SIGNAL and i > first_comm)
    ]


def state_counts(incident: Incident) -> list[tuple[RankState, int]]:
    """(kind, number of ranks), worst first."""
    counts = Counter(state.kind for state in incident.states.values())
    return [(kind, counts[kind]) for kind in SITUATIONS if counts[kind]]


def strip_cells(incident: Incident, num_cells: int) -> list[TextSpan]:
    """A glyph per rank; with more ranks than cells, each cell shows the worst of several ranks."""
    order = list(SITUATIONS)
    ranks = sorted(incident.states)
    per_cell = max(1, -(-len(ranks) // max(num_cells, 1)))
    cells: list[TextSpan] = []
    for start in range(0, len(ranks), per_cell):
        kinds = [incident.states[rank].kind for rank in ranks[start : start + per_cell]]
        worst = SITUATIONS[min(kinds, key=order.index)]
        cells.append((worst.char, worst.role))
    return cells


def frame_text(frame: Frame) -> str:
    """`file:line function`, without the folder."""
    return f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"
