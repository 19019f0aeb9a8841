"""Screen 8: plots of loss, throughput, stall, data wait and all other metrics."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from titan_ckpt.tui.data.metrics import Metrics
from titan_ckpt.tui.rows import Role, Row, RowList, Rows, counted, head, row
from titan_ckpt.tui.widgets.braille_plot import GUTTER, number, plot
from titan_ckpt.tui.widgets.pane import Pane

PLOT_LINES = 7
_ABSENT = "`titan-ckpt train` writes logs/metrics.jsonl: one JSON object per step, with step, loss and so on."


class TrainingPane(Pane):
    """Plots of metrics.jsonl."""

    number = 8
    label = "Training"
    keys = (("/", "choose plots"), ("f", "follow"))
    filter_hint = "plots whose name contains"

    def state(self) -> tuple[object, ...]:
        return (self.session.metrics.version, self.session.metrics.text)

    def title(self) -> str:
        metrics = self.session.metrics.value
        if metrics is None:
            return "training"
        damaged = f" · {counted(metrics.num_damaged, 'damaged line')} skipped" if metrics.num_damaged else ""
        return f"{metrics.source} · {counted(len(metrics.steps), 'step')}{damaged}"

    def make_rows(self, width: int) -> Rows:
        metrics = self.session.metrics.value
        if metrics is None:
            return RowList(self.absent_rows(self.session.metrics, _ABSENT, width))
        return RowList(plot_rows(metrics, width, self.filter_text))

    def filtered(self, rows: Rows) -> Rows:
        """The filter chooses plots, each with all its lines."""
        return rows if len(rows) else self.no_match("no plot has a name with")


def plot_rows(metrics: Metrics, width: int, wanted: str = "") -> Iterator[Row]:
    """A heading and a plot per panel whose title contains `wanted`, ignoring case."""
    for title, values in metrics.panels():
        if wanted.casefold() not in title.casefold():
            continue
        known = values[np.isfinite(values)]
        newest = f"   newest {number(float(known[-1]))}" if len(known) else ""
        yield head(f"{title}{newest}")
        for line in plot(metrics.steps, values, width, PLOT_LINES):
            yield row(line[:GUTTER], (line[GUTTER:], Role.GOOD))
        yield row()
