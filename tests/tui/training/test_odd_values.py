"""Values that are NaN or infinite: recorded, and so neither absent nor a point of a curve."""

from __future__ import annotations

import json
import math

import numpy as np

from titan_ckpt.tui.data.metrics import Metrics, parse_metric_lines
from titan_ckpt.tui.pictures.curves import GUTTER, Curve, panel_rows, value_rows
from titan_ckpt.tui.rows import Role


def metrics_of(*losses: float | None) -> Metrics:
    lines = [{"event": "step", "step": n, "loss": loss, "lr": 0.1} for n, loss in enumerate(losses, 1)]
    return parse_metric_lines("\n".join(map(json.dumps, lines)).encode(), "metrics.jsonl")


def test_a_loss_of_nan_is_told_from_one_that_was_not_recorded() -> None:
    found = metrics_of(3.0, math.nan, math.inf, None, 2.0)
    shown = {
        step: next(line.text.split()[-1] for line in value_rows(found, step, 60) if "loss" in line.text)
        for step in (1.0, 2.0, 3.0, 4.0, 5.0)
    }
    assert shown == {1.0: "3", 2.0: "nan", 3.0: "inf", 4.0: "-", 5.0: "2"}
    assert np.isnan(found.columns["loss"][1:4]).all()


def test_a_step_that_is_done_again_may_become_a_number() -> None:
    lines = [
        {"step": 1, "loss": math.nan},
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.0},
        {"step": 2, "loss": math.nan},
    ]
    found = parse_metric_lines("\n".join(map(json.dumps, lines)).encode(), "m")
    assert list(found.odd["loss"]) == [2.0]
    assert found.columns["loss"].tolist()[0] == 2.0


def test_a_curve_is_broken_and_marked_where_it_is_no_number() -> None:
    found = metrics_of(1.0, 1.0, math.nan, 1.0, 1.0)
    pictures = []
    for odd in ({}, found.odd_values()["loss"]):
        curve = Curve(steps=found.steps, values=found.columns["loss"], role=Role.GOOD, odd=odd)
        pictures.append([line.text for line in panel_rows("loss", [curve], {}, None, 60, 2)])
    through, broken = pictures
    assert " " not in through[1][GUTTER:].strip()
    assert " " in broken[1][GUTTER:].strip()
    assert "nan at step 3" in broken[0]
    assert broken[-1].strip() == "n"


def test_a_curve_of_nothing_but_nan_says_so() -> None:
    found = metrics_of(math.nan, math.nan)
    [(title, values), *_] = found.panels()
    curve = Curve(steps=found.steps, values=values, role=Role.GOOD, odd=found.odd_values()[title])
    assert [line.text.strip() for line in panel_rows(title, [curve], {}, 2.0, 60, 2)] == [
        "loss   step 2: nan   nan at step 1 (and 1 more)", "no values",
    ]  # fmt: skip


def test_a_label_of_the_axis_stands_above_the_mark_of_its_step() -> None:
    for last in (6, 400):
        steps = np.arange(1.0, last + 1)
        curve = Curve(steps=steps, values=steps, role=Role.PLAIN)
        *_, axis, _ = panel_rows("loss", [curve], {"s": steps.tolist()}, None, 130, 5)
        labels = axis.text.split()
        assert labels[-1] == str(last)
        assert len(labels) in (6, 8)
        for label in labels[:-1]:  # the last one ends at the edge
            alone = [*panel_rows("loss", [curve], {"s": [float(label)]}, None, 130, 5)][-1]
            assert alone.text.index("s") == axis.text.index(f" {label}") + 1
