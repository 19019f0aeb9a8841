"""No key ends the program: a sample of `make random-keys`, and every group of every recording, by number and over time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from titan_ckpt.errors import TitanError
from titan_ckpt.tui.data.incident import Incident, load_incident
from titan_ckpt.tui.data.timeline import build_time_grid
from titan_ckpt.tui.screens.grid_rows import grid_of
from tools.paths import DATA
from tools.random_keys import recordings, session

pytestmark = pytest.mark.repeats


@pytest.mark.parametrize("seed", range(4))
def test_random_keys_end_nothing(seed: int) -> None:
    rng = random.Random(seed)
    assert session(rng.choice(recordings()), rng, 40) is None


def incident_of(folder: Path) -> Incident | None:
    try:
        return load_incident(str(folder))
    except TitanError:
        return None  # checkpoints alone


def test_every_group_of_every_recording_is_drawn() -> None:
    found = [(path.name, incident) for path in recordings() if (incident := incident_of(path)) is not None]
    assert len(found) > 30
    for name, incident in found:
        for lane in incident.lanes:
            grid = grid_of(incident, lane)
            bars = build_time_grid(incident.run, lane, grid, None, 60, incident.clock_offsets(lane))
            assert bars is not None, name
            assert bars.codes.shape == (len(lane.members), 60)


def test_sends_and_receives_are_drawn_over_time() -> None:
    incident = load_incident(str(DATA / "injected" / "p2p_missing"))
    lane = incident.lanes[-1]
    assert incident.is_p2p(lane)
    bars = build_time_grid(incident.run, lane, grid_of(incident, lane), None, 60, incident.clock_offsets(lane))
    assert bars is not None
    assert bars.codes[1].max() > bars.codes[0].max()  # the half that rank 1 left out
