"""Screen 8: curves of loss, throughput, stall, data wait and all other metrics, with the values under the cursor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from titan_ckpt.errors import TitanError
from titan_ckpt.location import join, redact
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import NO_FAULT
from titan_ckpt.tui.data.metrics import Metrics, load_metrics
from titan_ckpt.tui.data.standing import may_go_on
from titan_ckpt.tui.pictures.curves import (
    GUTTER,
    ODD,
    SMOOTHINGS,
    Curve,
    goodput_rows,
    panel_rows,
    plot_columns,
    smoothed,
    value_rows,
)
from titan_ckpt.tui.rows import Role, Row, RowLink, RowList, Rows, counted, row, wrapped
from titan_ckpt.tui.session.session import Session
from titan_ckpt.tui.widgets.grid_view import GridView
from titan_ckpt.tui.widgets.pane import Pane
from titan_ckpt.tui.widgets.part import Part, Space

PLOT_LINES = 7
_AROUND_PLOT, _MOST_LINES = 4, 14
_ABSENT = "`titan-ckpt train` writes logs/metrics.jsonl: one JSON object per step, with step, loss and so on."
_NO_GOODPUT = "not known: it needs `time_s` and `step_s` of the steps"
_MARKS = "s save  r resume  ! incident"


class TrainingPane(Pane):
    """Curves of metrics.jsonl; left and right choose a step."""

    number = 8
    label = "Training"
    purpose = "loss, throughput and saves over the steps"
    keys = (("h l", "step"), ("s", "smooth"), ("o", "overlay a run"), ("/", "choose curves"), ("f", "follow"))
    filter_hint = "plots whose name contains"
    parts = (Part(name="values", is_of_line=False), Part(name="goodput", is_of_line=False))
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "smooth", show=False), Binding("o", "overlay", show=False),
    ]  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._spot: float | None = None
        self._smoothing = 0
        self._other: Metrics | None = None

    def compose_list(self) -> ComposeResult:
        yield GridView()

    def state(self) -> tuple[object, ...]:
        metrics, incident = self.session.metrics, self.session.incident
        other = self._other.source if self._other is not None else ""
        shape = (self._spot, self._smoothing, other, self._lines())
        return (metrics.version, metrics.text, incident.version, *shape)

    def title(self) -> str:
        metrics = self.session.metrics.value
        if metrics is None:
            return "training"
        damaged = f" · {counted(metrics.num_damaged, 'damaged line')} skipped" if metrics.num_damaged else ""
        weight = SMOOTHINGS[self._smoothing]
        smooth = f" · smoothed by {weight}" if weight else ""
        other = f" · over {self._other.source}" if self._other is not None else ""
        return f"{metrics.source} · {counted(len(metrics.steps), 'step')}{damaged}{smooth}{other}"

    def useful_keys(self) -> Iterable[tuple[str, str]]:
        incident = self.session.incident.value
        may_come = incident is None or may_go_on(incident, self.session.clock())
        return self.keys if self.session.metrics.value is not None else self.keys[-1:] if may_come else ()

    def wants_parts(self) -> bool:
        metrics = self.session.metrics.value
        return metrics is not None and len(metrics.steps) > 0

    def part_rows(self, space: Space) -> Iterable[Row]:
        metrics = self.session.metrics.value
        if metrics is None:
            return ()
        if space.name == "values":
            return value_rows(metrics, self._spot, space.width, self._other)
        if metrics.goodput is None:
            return (row((line, Role.DIM)) for line in wrapped(_NO_GOODPUT, space.width))
        return goodput_rows(metrics.goodput, space.width)

    def make_rows(self, width: int) -> Rows:
        metrics = self.session.metrics.value
        if self.session.content.has_runs:
            text = "a folder of runs: press enter to list them (screen 7); each has its own curves"
            return RowList(row(line, link=RowLink(screen=7)) for line in wrapped(text, width))
        if metrics is None:
            return RowList(self.absent_rows(self.session.metrics, _ABSENT, width))
        if not len(metrics.steps):
            return RowList([row((f"{metrics.source} holds no step yet", Role.DIM))])
        return RowList(self._panels(metrics, width))

    def _panels(self, metrics: Metrics, width: int) -> Iterator[Row]:
        """A heading and a plot per panel whose title contains the filter's text, ignoring case."""
        marks = {"s": metrics.saves, "r": metrics.resumes, "!": self._incident_steps()}
        odd = metrics.odd_values()
        names = [_MARKS] * any(marks.values()) + [f"{ODD} nan or infinite"] * bool(odd)
        others = dict(self._other.panels()) if self._other is not None else {}
        for title, values in metrics.panels():
            if self.filter_text.casefold() not in title.casefold():
                continue
            smooth = smoothed(values, SMOOTHINGS[self._smoothing])
            is_smoothed = self._smoothing > 0
            first = Curve(
                steps=metrics.steps, values=smooth, role=Role.GOOD, is_smoothed=is_smoothed, odd=odd.get(title, {})
            )
            curves = [first]
            if is_smoothed:
                curves.append(replace(first, values=values, role=Role.DIM, is_smoothed=False))
            if self._other is not None and title in others:
                found = smoothed(others[title], SMOOTHINGS[self._smoothing])
                odd_there = self._other.odd_values().get(title, {})
                curves.append(Curve(steps=self._other.steps, values=found, role=Role.NOTE, odd=odd_there))
            yield from panel_rows(title, curves, marks, self._spot, width, self._lines())
            yield row()
            if names and title == metrics.panels()[-1][0]:
                yield row((f"marks: {'  '.join(names)}", Role.DIM))

    def _lines(self) -> int:
        """Lines of a plot: three of them fill a tall terminal."""
        return min(max(self.body.scrollable_content_region.height // 3 - _AROUND_PLOT, PLOT_LINES), _MOST_LINES)

    def _incident_steps(self) -> tuple[float, ...]:
        incident = self.session.incident.value
        top = incident.top if incident is not None else None
        return (float(top.step),) if top is not None and top.step is not None and top.verdict not in NO_FAULT else ()

    def filtered(self, rows: Rows) -> Rows:
        """The filter chooses plots, each with all its lines."""
        return rows if len(rows) else self.no_match("no plot has a name with")

    def copied_text(self) -> str:
        """All values at the chosen step, else the newest."""
        metrics = self.session.metrics.value
        return super().copied_text() if metrics is None or self.filter_text else _values_text(metrics, self._spot)

    def on_grid_view_shifted(self, message: GridView.Shifted) -> None:
        metrics = self.session.metrics.value
        if metrics is None or not len(metrics.steps):
            return
        last = len(metrics.steps) - 1
        place = last if self._spot is None else int(np.abs(metrics.steps - self._spot).argmin())
        by = max(last // max(self.body.line_width, 1), 1) * message.by
        place = last if self._spot is None else max(0, min(place + by, last))
        self._spot = float(metrics.steps[place])
        self.update_rows()

    def on_grid_view_pointed(self, message: GridView.Pointed) -> None:
        """Select the step that was clicked in a plot."""
        metrics, columns = self.session.metrics.value, plot_columns(self.body.line_width)
        at = message.at - GUTTER
        if metrics is None or not len(metrics.steps) or not 0 <= at < columns:
            return
        steps = np.concatenate([metrics.steps, *([self._other.steps] if self._other is not None else [])])
        wanted = steps.min() + (steps.max() - steps.min()) * at / max(columns - 1, 1)
        self._spot = float(metrics.steps[np.abs(metrics.steps - wanted).argmin()])
        self.update_rows()

    def select(self, link: RowLink) -> None:
        self._spot = None if link.step is None else float(link.step)
        self.update_rows()

    def go_back(self) -> bool:
        if super().go_back():
            return True
        if self._spot is None:
            return False
        self._spot = None
        self.update_rows()
        return True

    def action_smooth(self) -> None:
        self._smoothing = (self._smoothing + 1) % len(SMOOTHINGS)
        self.update_rows()

    def action_overlay(self) -> None:
        """Ask for another run, and draw its curves behind these; an empty answer takes them away."""
        self.ask("another run whose curves to draw behind these (its URL; empty: none)", "", self._overlay)

    def _overlay(self, url: str) -> None:
        if not url:
            self._other = None
            self.update_rows()
            return

        def take(found: Metrics | str) -> None:
            if isinstance(found, str):
                self.post_message(self.ShowStatus(found))
            else:
                self._other = found
                self.update_rows()

        self.work("reading the other run", _reader(_beside(url, self.session.content.url)), take)


def _beside(url: str, shown: str) -> str:
    """Where the other run is: a name alone that is no folder here is that of a run beside the one that is shown."""
    return url if "/" in url or os.path.exists(url) else join(shown.rstrip("/").rpartition("/")[0] or "/", url)


def _reader(url: str) -> Callable[[], Metrics | str]:
    def read() -> Metrics | str:
        try:
            content = find_content(url)
            if not content.metrics:
                return "no metrics.jsonl there"
            return replace(load_metrics(content.store, content.metrics), source=redact(url))
        except TitanError as error:
            return str(error)

    return read


def _values_text(metrics: Metrics, spot: float | None) -> str:
    return "  ".join(each.text.strip() for each in value_rows(metrics, spot, 200))
