"""Screen 1: the verdict, the available and the missing evidence, and every rank by state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from textual.binding import Binding, BindingType

from titan_ckpt.console.ranks import ranks_text
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Evidence
from titan_ckpt.debug.report.facts import commands, ended, step_text, stopped
from titan_ckpt.location import redact
from titan_ckpt.tui.data.incident import NO_FAULT, SITUATIONS, Incident, activities
from titan_ckpt.tui.data.runs import NO_RESUME, UNUSABLE, StepState
from titan_ckpt.tui.data.standing import alarms_now, exit_text, may_go_on, newest_of, newest_step, ticking
from titan_ckpt.tui.pictures.available import data_rows, flag_rows
from titan_ckpt.tui.pictures.details import link_rows
from titan_ckpt.tui.pictures.mesh import MOST_NUMBERED, mesh_axes, mesh_rows, numbered, strip_cells
from titan_ckpt.tui.pictures.timeline import bars_rows, step_rows
from titan_ckpt.tui.rows import (
    CULPRIT,
    Role,
    Row,
    RowLink,
    RowList,
    Rows,
    counted,
    head,
    ranks_begun,
    ranks_named,
    row,
    wrapped,
)
from titan_ckpt.tui.screens.incidents import IncidentsScreen
from titan_ckpt.tui.session.session import Session
from titan_ckpt.tui.widgets.pane import NO_INCIDENT, Pane
from titan_ckpt.tui.widgets.part import Part, Space

_MOST_AWAITED, _MOST_EXITS = 12, 4


class OverviewPane(Pane):
    """Verdict, rank states and available data."""

    number = 1
    label = "Overview"
    purpose = "what went wrong, at which rank, and what to do"
    keys = (
        ("enter", "open"),
        ("n", "next problem"),
        (":", "go to"),
        ("i", "incidents"),
        ("f", "follow"),
        ("w", "panes"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [Binding("i", "incidents", show=False)]
    parts = (
        Part(name="ranks", is_of_line=False),
        Part(name="time", is_of_line=False),
        Part(name="details", is_below=True),
    )

    def part_rows(self, space: Space) -> Iterable[Row]:
        incident = self.session.incident.value
        if incident is None:
            return [row(("nothing is known yet", Role.DIM))]
        if space.name == "ranks":
            return ranks_rows(incident, space.width)
        if space.name == "time":
            return [*bars_rows(incident, space.width, space.height), row(), *step_rows(incident, space.width)]
        current = self.body.current
        return link_rows(incident, current.link if current else None, self.session.logs.value, space.width)

    def useful_keys(self) -> Iterable[tuple[str, str]]:
        useless = {"i"} if len(self.session.content.incidents) < 2 else set()
        incident = self.session.incident.value
        if incident is not None and not self.session.is_following and not may_go_on(incident, self.session.clock()):
            useless.add("f")
        return [key for key in super().useful_keys() if key[0] not in useless]

    def action_incidents(self) -> None:
        """Choose another of several incidents."""
        content = self.session.content
        if len(content.incidents) < 2:
            self.post_message(self.ShowStatus("there is no other incident here"))
            return

        def take(chosen: str | None) -> None:
            if chosen is not None and chosen != content.incident:
                self.post_message(self.Open(content.url, chosen))

        self.app.push_screen(IncidentsScreen(content), take)

    def part_title(self, name: str) -> str:
        return {"ranks": "ranks by state", "time": "ranks over time"}.get(name, name)

    def state(self) -> tuple[object, ...]:
        s = self.session
        parts = (s.incident, s.checkpoints, s.runs, s.logs, s.metrics)
        ages = _moments(s.incident.value, s.clock()) if s.incident.value is not None else ""
        return (s.is_following, ages, *((part.version, part.text) for part in parts))

    def title(self) -> str:
        incident = self.session.incident.value
        where = redact(self.session.content.shown_url)
        if incident is None:
            return where
        what = "incident " if incident.top.verdict not in NO_FAULT else ""
        name = f" · {what}{incident.run.incident}" if incident.run.incident else ""
        return f"{where}{name} · {counted(incident.run.world_size, 'rank')}"

    def begin(self) -> None:
        """The verdict is the first line."""

    def make_rows(self, width: int) -> Rows:
        return RowList(overview_rows(self.session, width, has_ranks=not self.has_parts))


def overview_rows(session: Session, width: int, *, has_ranks: bool = True) -> Iterator[Row]:
    """All rows of the screen; `has_ranks`: with the states of the ranks, which have a pane of their own where there is room."""
    incident = session.incident.value
    if session.content.has_runs:
        yield from _runs_rows(session)
        return
    if incident is None:
        yield from Pane.absent_rows(session.incident, NO_INCIDENT, width)
        yield from _checkpoint_rows(session, width)
        yield row()
        yield from data_rows(session, width)
        return
    yield from _several_rows(session, width)
    live = list(live_rows(incident, session.seen_s, width, is_following=session.is_following))
    yield from live
    is_calm = incident.is_unconfirmed or incident.top.verdict in NO_FAULT
    is_quiet = bool(live) and is_calm
    if not is_quiet:
        yield from _verdict_rows(incident, session.clock(), width)
    yield from _checkpoint_rows(session, width)
    yield row()
    if has_ranks:
        yield from _strip_rows(incident, width)
        yield row()
    if not is_quiet:
        yield from _why_rows(incident, width)
        yield from _other_rows(incident, width)
        yield row()
    yield from data_rows(session, width)
    yield from flag_rows(incident.run, width)


def _several_rows(session: Session, width: int) -> Iterator[Row]:
    """That there are other incidents."""
    content = session.content
    if len(content.incidents) > 1:
        which = "the newest" if content.incident == content.incidents[-1] else "an earlier one"
        text = f"{len(content.incidents):,} incidents here; this is {which}; press i to choose another"
        yield from (row((line, Role.NOTE)) for line in wrapped(text, width))


def _runs_rows(session: Session) -> Iterator[Row]:
    runs = session.runs
    count = runs.value.counts if runs.value is not None else runs.text
    yield row(f"a folder of runs: {count}. Press enter to list them (screen 7).", link=RowLink(screen=7))


def live_rows(incident: Incident, now_s: float, width: int, *, is_following: bool = False) -> Iterator[Row]:
    """State of a running job from heartbeats of the last seconds; empty if the job has ended or is gone."""
    live = ticking(incident, now_s)
    if not live:
        return
    newest = newest_of(live)
    phase = f" ({newest.phase})" if newest.phase else ""
    count = f"{len(live):,} of {counted(incident.run.world_size, 'rank')} alive"
    where = f"{newest_step(incident, newest)}{phase}".strip()
    found = alarms_now(incident, now_s)
    is_calm = incident.is_unconfirmed or incident.top.verdict in NO_FAULT
    word, role = ("RUNNING", Role.GOOD) if is_calm and not found else ("STUCK" if not is_calm else "ALIVE", Role.BAD)
    word, role = ("SLOW", Role.WARN) if incident.is_slow and not found else (word, role)
    yield row((word, role), f"   {where} · {count}" if where else f"   {count}", link=RowLink(screen=8))
    for alarm in found:
        for i, line in enumerate(wrapped(f"{alarm.kind}: {alarm.text}", width, "  ")):
            yield row((line, Role.BAD), link=RowLink(screen=6, rank=alarm.ranks[0]), is_problem=i == 0)
    if incident.is_unconfirmed and incident.top.verdict not in NO_FAULT:
        yield row(("ranks are waiting; a second look will show whether they go on", Role.DIM))
    elif is_calm and not found:
        yield row(("no fault so far" if is_following else "no fault so far; press f to follow the job", Role.DIM))


def _verdict_rows(incident: Incident, now_s: float, width: int) -> Iterator[Row]:
    top = incident.top
    is_mild = top.verdict in NO_FAULT or incident.is_slow
    role: Role = Role.GOOD if top.verdict == VerdictKind.HEALTHY else Role.WARN if is_mild else Role.BAD
    name = f"{top.verdict} ({top.subtype})" if top.subtype else top.verdict
    link = incident.link_of(top)
    facts = [f"confidence {top.confidence:.0%}"]
    facts += [step_text(incident.run, top.step)] if top.step is not None else []
    many = "s" if len(top.culprits) > 1 else ""
    facts += [f"culprit{many}: rank{many} {ranks_text(top.culprits)}"] if top.culprits else []
    at = (top.file, top.line) if top.file else _line_of(incident)
    text = " · ".join(facts)
    fits = len(name) + 3 + len(text) <= width
    yield row((name, role), f"   {text}" if fits else "", link=link, is_problem=role != Role.GOOD, at=at)
    yield from (
        row("  ", line, link=link, at=at) for line in wrapped(" · ".join(reversed(facts)), width - 2) if not fits
    )
    for line in wrapped(top.headline, width):
        yield row((line, Role.BOLD), link=link, at=at)
    yield from (row((line, Role.DIM)) for line in wrapped(_moments(incident, now_s), width))


def _moments(incident: Incident, now_s: float) -> str:
    last_s = incident.last_sign_ns / 1e9
    return ended(last_s, now_s) if incident.is_over else stopped(incident.stop_s, last_s, now_s)


def _line_of(incident: Incident) -> tuple[str, int] | None:
    """Where the first rank at fault was."""
    state = incident.states.get(incident.foremost) if incident.foremost is not None else None
    return (state.frame.file, state.frame.line) if state is not None and state.frame is not None else None


def _checkpoint_rows(session: Session, width: int) -> Iterator[Row]:
    """A warning about damaged checkpoints, since the verdict is on the ranks alone."""
    found = session.checkpoints.value
    steps = found.steps if found is not None else ()
    damaged = [step.step for step in steps if any(copy.state in UNUSABLE for copy in step.copies)]
    if found is not None and damaged:
        partial = [step.step for step in steps if step.best.state == StepState.PARTIAL]
        facts = [f"{counted(len(damaged), 'step')} not usable: {ranks_text(damaged, 4)}"]
        facts += [f"not committed: {ranks_text(partial, 4)}"] if partial else []
        newest = found.newest()
        facts += (
            [NO_RESUME] if found.has_none_to_resume else [f"newest committed: {newest}"] if newest is not None else []
        )
        for line in wrapped(f"CHECKPOINTS   {'; '.join(facts)}", width, "  "):
            yield row((line, Role.BAD), link=RowLink(screen=7, step=damaged[0]), is_problem=True)


def _strip_rows(incident: Incident, width: int) -> Iterator[Row]:
    yield head("ranks by state" if incident.top.verdict != VerdictKind.HEALTHY else "ranks by state, as last seen")
    yield from ranks_rows(incident, width)


def ranks_rows(incident: Incident, width: int) -> Iterator[Row]:
    """The states of all ranks: by mesh coordinate if the mesh is known, else as a strip; then how many are in each."""
    ranks = sorted(incident.states)
    digits = len(str(max(ranks, default=0)))
    if mesh_axes(incident):
        yield from mesh_rows(incident, width)
    elif len(ranks) <= MOST_NUMBERED and (digits + 2) * len(ranks) <= width:
        yield row(*numbered(incident, ranks, digits), link=RowLink(screen=2))
    else:
        cells = strip_cells(incident, width * 4)
        for start in range(0, len(cells), width):
            yield row(*cells[start : start + width], link=RowLink(screen=2))
        if len(cells) < len(ranks):
            yield row((f"  a cell is {-(-len(ranks) // len(cells)):,} ranks, and shows the worst of them", Role.DIM))
    if incident.top.culprits:
        culprits = incident.top.culprits
        yield row((f"  {CULPRIT} ", Role.BAD), "at fault: ", (ranks_named(culprits, 8), Role.BAD),
                  link=RowLink(screen=6, rank=culprits[0]))  # fmt: skip
    for kind, doing, ranks in activities(incident):
        glyph = SITUATIONS[kind]
        named = ranks_named(ranks) if len(ranks) == 1 else f"{counted(len(ranks), 'rank')} ({ranks_begun(ranks, 8)})"
        yield row((f"  {glyph.char} ", glyph.role), f"{doing}: ", (named, Role.DIM),
                  link=RowLink(screen=2, rank=ranks[0]))  # fmt: skip
    yield from _exit_rows(incident, width)


def _exit_rows(incident: Incident, width: int) -> Iterator[Row]:
    """How processes ended that did not end well, the first end on top."""
    ends = [record.exit for record in incident.run.ranks.values() if record.exit is not None and record.exit.code]
    alike: dict[str, list[int]] = {}
    for end in sorted(ends, key=lambda end: (not end.is_first, end.was_told, end.rank)):
        text = exit_text(end)
        alike.setdefault(f"exit {text}" if text.startswith("code") else text, []).append(end.rank)
    for text, ranks in list(alike.items())[:_MOST_EXITS]:
        for line in wrapped(f"  {text}: {ranks_named(ranks, 4)}", width, "    "):
            yield row((line, Role.DIM), link=RowLink(screen=6, rank=ranks[0]))


def _why_rows(incident: Incident, width: int) -> Iterator[Row]:
    top = incident.top
    if top.evidence:
        yield head("why")
    for item in top.evidence:
        yield from _evidence_rows(item, incident, width)
    if incident.edges and top.verdict not in (VerdictKind.HEALTHY, VerdictKind.RUNNING):
        yield head(
            "who waited for whom" if incident.is_past(edge.waiter for edge in incident.edges) else "who waits for whom"
        )
        yield from _chain_rows(incident, width)
    steps = (*top.next_steps, *(() if top.is_healthy else commands(incident.run, top)))
    if steps:
        yield head("what to do")
    for number, step in enumerate(steps, 1):
        for line in wrapped(f"  {number}. {step}", width, "     "):
            yield row(line)


def _chain_rows(incident: Incident, width: int) -> Iterator[Row]:
    """A line per awaited rank, with all that wait for it."""
    waiters: dict[int, dict[int, None]] = {}
    for edge in incident.edges:
        waiters.setdefault(edge.awaited, {})[edge.waiter] = None
    order = sorted(waiters, key=lambda rank: (rank not in incident.top.culprits, rank))
    for awaited, ranks in ((rank, waiters[rank]) for rank in order[:_MOST_AWAITED]):
        wait = "waited" if incident.is_past(ranks) else "waits" if len(ranks) == 1 else "wait"
        text = f"  {ranks_named(list(ranks), 8)} {wait} for rank {awaited}"
        yield from (row(line, link=RowLink(screen=6, rank=awaited)) for line in wrapped(text, width, "    "))
    if len(waiters) > _MOST_AWAITED:
        yield row((f"  and for {counted(len(waiters) - _MOST_AWAITED, 'more rank')}", Role.DIM))


def _evidence_rows(item: Evidence, incident: Incident, width: int) -> Iterator[Row]:
    rank = f"rank {item.rank}: " if item.rank is not None else ""
    place = f" at {item.file}:{item.line}" if item.file and f"{item.file}:{item.line}" not in item.text else ""
    source = f"  [{item.source}]" if item.source else ""
    link = evidence_link(item, incident)
    at = (item.file, item.line) if item.file else None
    for line in wrapped(f"  - {rank}{item.text}{place}{source}", width, "    "):
        yield row(line, link=link, at=at)


def evidence_link(item: Evidence, incident: Incident) -> RowLink | None:
    """Link to the evidence: its log line, its operation, or its rank's waits."""
    source, _, number = item.source.rpartition(":")
    if source and number.isdigit() and ".log" in source:
        return RowLink(screen=5, source=source, line=int(number), rank=item.rank)
    if ".log" in item.source:
        return RowLink(screen=5, source=item.source, rank=item.rank)
    if incident.top.seq is None and item.rank is None:
        return None
    return incident.link_of(incident.top, item.rank)


def _other_rows(incident: Incident, width: int) -> Iterator[Row]:
    if len(incident.verdicts) > 1:
        is_less = all(other.confidence < incident.top.confidence for other in incident.verdicts[1:])
        yield head("less likely" if is_less else "other readings")
    for other in incident.verdicts[1:]:
        for line in wrapped(f"  {other.confidence:.0%} {other.verdict}: {other.headline}", width, "      "):
            yield row(line, link=incident.link_of(other))
