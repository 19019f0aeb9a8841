"""Screen 1: the verdict, the available and the missing evidence, and every rank by state."""

from __future__ import annotations

from collections.abc import Iterator

from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Run, Verdict
from titan_ckpt.debug.live.watch import alarms
from titan_ckpt.location import redact
from titan_ckpt.tui.data.incident import SITUATIONS, Incident, state_counts, strip_cells
from titan_ckpt.tui.rows import (
    Role,
    Row,
    RowLink,
    RowList,
    Rows,
    TextSpan,
    counted,
    head,
    ranks_named,
    ranks_text,
    row,
    wrapped,
)
from titan_ckpt.tui.session.session import Session
from titan_ckpt.tui.widgets.pane import NO_INCIDENT, Pane

LIVE_S = 30.0
_NO_FAULT = (VerdictKind.HEALTHY, VerdictKind.RUNNING, VerdictKind.INSUFFICIENT_DATA)


class OverviewPane(Pane):
    """Verdict, rank states and available data."""

    number = 1
    label = "Overview"
    keys = (("enter", "open the item on this line"),)

    def state(self) -> tuple[object, ...]:
        s = self.session
        return tuple((part.version, part.text) for part in (s.incident, s.checkpoints, s.runs, s.logs, s.metrics))

    def title(self) -> str:
        incident = self.session.incident.value
        where = redact(self.session.content.url)
        if incident is None:
            return where
        name = f" · incident {incident.run.incident}" if incident.run.incident else ""
        return f"{where}{name} · {counted(incident.run.world_size, 'rank')}"

    def make_rows(self, width: int) -> Rows:
        return RowList(overview_rows(self.session, width))


def overview_rows(session: Session, width: int) -> Iterator[Row]:
    """All rows of the screen."""
    incident = session.incident.value
    if session.content.has_runs:
        yield from _runs_rows(session)
        return
    if incident is None:
        yield from Pane.absent_rows(session.incident, NO_INCIDENT, width)
        yield row()
        yield from _data_rows(session, width)
        return
    live = list(live_rows(incident, session.clock(), width))
    yield from live
    is_quiet = bool(live) and not any(line.is_problem for line in live) and incident.top.verdict in _NO_FAULT
    if not is_quiet:
        yield from _verdict_rows(incident.top, width)
    yield row()
    yield from _strip_rows(incident, width)
    yield row()
    if not is_quiet:
        yield from _why_rows(incident, width)
        yield from _other_rows(incident, width)
        yield row()
    yield from _data_rows(session, width)
    yield from _flag_rows(incident.run, width)


def _runs_rows(session: Session) -> Iterator[Row]:
    runs = session.runs
    count = counted(len(runs.value), "run") if runs.value is not None else runs.text
    yield row(f"a folder of runs: {count}. Press enter to list them (screen 7).", link=RowLink(screen=7))


def live_rows(incident: Incident, now_s: float, width: int) -> Iterator[Row]:
    """State of a running job from heartbeats of the last seconds; empty if the job has ended or is gone."""
    beats = {rank: record.heartbeat for rank, record in incident.run.ranks.items() if record.heartbeat is not None}
    ticking = [b for b in beats.values() if not b.is_stopped and abs(now_s - b.alive_ns / 1e9) < LIVE_S]
    if not ticking:
        return
    newest = max(ticking, key=lambda beat: (beat.step, beat.phase_ns))
    phase = f" ({newest.phase})" if newest.phase else ""
    count = f"{len(ticking)} of {counted(incident.run.world_size, 'rank')} alive"
    yield row(("RUNNING", Role.GOOD), f"   step {newest.step}{phase} · {count}", link=RowLink(screen=8))
    found = alarms(beats, int(now_s * 1e9), after_s=LIVE_S)
    for alarm in found:
        for i, line in enumerate(wrapped(f"{alarm.kind}: {alarm.text}", width, "  ")):
            yield row((line, Role.WARN), link=RowLink(screen=6, rank=alarm.ranks[0]), is_problem=i == 0)
    if found or incident.top.verdict not in _NO_FAULT:
        yield row(("diagnosis of the last snapshot (may be transient):", Role.DIM))
    else:
        yield row(("no fault so far; press f to follow the job", Role.DIM))


def _verdict_rows(top: Verdict, width: int) -> Iterator[Row]:
    role: Role = (
        Role.GOOD if top.verdict == VerdictKind.HEALTHY else Role.WARN if top.verdict in _NO_FAULT else Role.BAD
    )
    name = f"{top.verdict} ({top.subtype})" if top.subtype else top.verdict
    link = _operation(top)
    facts = [f"confidence {top.confidence:.0%}"]
    facts += [f"step {top.step}"] if top.step is not None else []
    many = "s" if len(top.culprits) > 1 else ""
    facts += [f"culprit{many}: rank{many} {ranks_text(top.culprits)}"] if top.culprits else []
    yield row((name, role), "   " + " · ".join(facts), link=link, is_problem=role != Role.GOOD)
    for line in wrapped(top.headline, width):
        yield row((line, Role.BOLD), link=link)


def _operation(top: Verdict) -> RowLink | None:
    if top.seq is None:
        rank = top.culprits[0] if top.culprits else None
        return RowLink(screen=6, rank=rank) if rank is not None else None
    return RowLink(screen=3, group=top.group, seq=top.seq, rank=top.culprits[0] if top.culprits else None)


def _strip_rows(incident: Incident, width: int) -> Iterator[Row]:
    cells = strip_cells(incident, width * 4)
    yield head("ranks by state")
    for start in range(0, len(cells), width):
        yield row(*cells[start : start + width], link=RowLink(screen=2))
    for kind, count in state_counts(incident):
        glyph = SITUATIONS[kind]
        ranks = [rank for rank, state in incident.states.items() if state.kind == kind]
        yield row((f"  {glyph.char} ", glyph.role), f"{glyph.label}: {count}  ", (ranks_text(ranks, 8), Role.DIM),
                  link=RowLink(screen=2, rank=ranks[0]))  # fmt: skip


def _why_rows(incident: Incident, width: int) -> Iterator[Row]:
    top = incident.top
    if top.evidence:
        yield head("why")
    for item in top.evidence:
        yield from _evidence_rows(item, top, width)
    if top.chain:
        yield head("who waits for whom")
        pairs = [f"{waiter} -> {awaited}" for waiter, awaited in top.chain[:24]]
        more = [f"and {len(top.chain) - 24} more"] if len(top.chain) > 24 else []
        for line in wrapped("  " + ", ".join(pairs + more), width, "  "):
            yield row(line, link=RowLink(screen=6, rank=top.chain[0][1]))
    if top.next_steps:
        yield head("what to do")
    for number, step in enumerate(top.next_steps, 1):
        for line in wrapped(f"  {number}. {step}", width, "     "):
            yield row(line)


def _evidence_rows(item: Evidence, top: Verdict, width: int) -> Iterator[Row]:
    rank = f"rank {item.rank}: " if item.rank is not None else ""
    place = f" at {item.file}:{item.line}" if item.file and f"{item.file}:{item.line}" not in item.text else ""
    source = f"  [{item.source}]" if item.source else ""
    link = evidence_link(item, top)
    for line in wrapped(f"  - {rank}{item.text}{place}{source}", width, "    "):
        yield row(line, link=link)


def evidence_link(item: Evidence, top: Verdict) -> RowLink | None:
    """Link to the evidence: its log line, its operation, or its rank's waits."""
    source, _, number = item.source.rpartition(":")
    if source and number.isdigit() and ".log" in source:
        return RowLink(screen=5, source=source, line=int(number), rank=item.rank)
    if ".log" in item.source:
        return RowLink(screen=5, source=item.source, rank=item.rank)
    if top.seq is not None:
        return RowLink(screen=3, group=top.group, seq=top.seq, rank=item.rank)
    return RowLink(screen=6, rank=item.rank) if item.rank is not None else None


def _other_rows(incident: Incident, width: int) -> Iterator[Row]:
    if len(incident.verdicts) > 1:
        yield head("less likely")
    for other in incident.verdicts[1:]:
        for line in wrapped(f"  {other.confidence:.0%} {other.verdict}: {other.headline}", width, "      "):
            yield row(line, link=_operation(other))


def _data_rows(session: Session, width: int) -> Iterator[Row]:
    yield head("available data")
    incident = session.incident.value
    if incident is not None:
        yield from _evidence_counts(incident.run)
    checkpoints, logs, metrics = session.checkpoints, session.logs, session.metrics
    if checkpoints.value is not None:
        committed = checkpoints.value.newest()
        newest = f"; newest committed: step {committed}" if committed is not None else ""
        text = checkpoints.value.counts(", ")
        yield row(f"  checkpoints: {text or 'none'}{newest}", link=RowLink(screen=7))
    else:
        yield row(("  checkpoints: " + checkpoints.text, Role.DIM))
    if logs.value is not None:
        more = " so far" if logs.value.is_head else ""
        yield row(
            f"  log lines: {counted(len(logs.value.files.files), 'file')}, {counted(len(logs.value), 'line')}{more}",
            link=RowLink(screen=5),
        )
        for path, problem in logs.value.problems:
            for i, line in enumerate(wrapped(problem if path in problem else f"{path}: {problem}", width - 6, "  ")):
                yield row(("    ! " if i == 0 else "      ", Role.BAD), line, is_problem=i == 0, link=RowLink(screen=5))
    else:
        yield row(("  log lines: " + logs.text, Role.DIM))
    if metrics.value is not None:
        yield row(f"  metrics: {counted(len(metrics.value.steps), 'step')}", link=RowLink(screen=8))
    else:
        yield row(("  metrics: " + metrics.text, Role.DIM))


def _evidence_counts(run: Run) -> Iterator[Row]:
    world = run.world_size
    kinds = {
        "dumps": [r for r, record in run.ranks.items() if record.dumps],
        "stacks": [r for r, record in run.ranks.items() if record.stacks],
        "logs": [r for r, record in run.ranks.items() if record.log],
        "heartbeats": [r for r, record in run.ranks.items() if record.heartbeat],
        "exit codes": [r for r, record in run.ranks.items() if record.exit],
    }
    for name, ranks in kinds.items():
        missing = sorted(set(run.ranks) - set(ranks))
        parts: list[TextSpan] = [
            (f"  {name}: {len(ranks)} of {counted(world, 'rank')}", Role.PLAIN if ranks else Role.DIM)
        ]
        if ranks and missing:
            parts.append((f"  missing: {ranks_text(missing, 6)}", Role.WARN))
        yield row(*parts)


def _flag_rows(run: Run, width: int) -> Iterator[Row]:
    if run.flags:
        yield head("limits of the evidence")
    for flag in run.flags:
        ranks = f" ({ranks_named(flag.ranks, 6)})" if flag.ranks else ""
        source = f" [{flag.source}]" if flag.source else ""
        is_damage = flag.flag in ("DUMP_CORRUPT", "DUMP_MISSING")
        for i, line in enumerate(wrapped(f"{flag.flag}: {flag.text}{ranks}{source}", width - 4, "  ")):
            yield row(
                ("  ! " if i == 0 else "    ", Role.BAD if is_damage else Role.WARN),
                line,
                is_problem=is_damage and i == 0,
            )
