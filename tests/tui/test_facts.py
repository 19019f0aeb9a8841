"""What the screens say is so: states, counts, metrics."""

from __future__ import annotations

import json

from titan_ckpt.debug.incident.kinds import RankState
from titan_ckpt.tui.data.incident import SITUATIONS
from titan_ckpt.tui.data.metrics import parse_metric_lines


def test_every_state_of_a_rank_has_a_glyph_of_its_own() -> None:
    assert set(SITUATIONS) == set(RankState)
    assert len({glyph.char for glyph in SITUATIONS.values()}) == len(RankState)


def test_only_steps_are_counted_as_steps_and_keep_their_loss() -> None:
    lines = [
        {"event": "start", "step": 0, "launched_s": 1.0},
        *({"event": "step", "step": step, "loss": 5.0 - step} for step in (1, 2)),
        {"event": "validation", "step": 2, "loss": 9.0},
        {"event": "save", "step": 2, "stall_s": 0.5},
        {"event": "end", "step": 2, "loss": 3.0},
    ]
    found = parse_metric_lines("\n".join(map(json.dumps, lines)).encode(), "metrics.jsonl")
    assert found.steps.tolist() == [1, 2]
    assert found.columns["loss"].tolist() == [4, 3]
    assert found.columns["validation_loss"].tolist()[1] == 9
    assert found.columns["save_stall_s"].tolist()[1] == 0.5
    foreign = parse_metric_lines(b'{"event": "train", "step": 7, "loss": 1}\n{"step": 8, "loss": 2}', "m")
    assert foreign.columns["loss"].tolist() == [1, 2]
