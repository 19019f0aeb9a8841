"""An all_to_all whose splits do not fit, and the frames of our own recorder, as the screens show them."""

from __future__ import annotations

import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import diagnose
from titan_ckpt.debug.diagnosis.align import lanes
from titan_ckpt.debug.incident.frames import program_frames
from titan_ckpt.debug.incident.records import Frame, Thread
from titan_ckpt.tui.data.grid import DIFFERS, PENDING, build_grid
from titan_ckpt.tui.data.incident import Incident, with_odd_splits
from titan_ckpt.tui.pictures.details import operation_rows

ONE_PAIR = """
0 1 2: all_reduce@1 all_to_all@5?
splits 0: world#2 4,4,4 4,4,4
splits 1: world#2 4,4,9 4,4,4
splits 2: world#2 4,4,4 4,4,4
"""
OTHER_SIZE = """
0 2: all_reduce@1 all_reduce@1 all_reduce(4)@1?
1: all_reduce@1 all_reduce@1 all_reduce(8)@1?
"""


def incident_of(text: str) -> Incident:
    run = job(text)
    verdicts = tuple(diagnose(run))
    found = tuple(with_odd_splits(run, lane, verdicts[0]) for lane in lanes(run))
    return Incident(run=run, verdicts=verdicts, lanes=found, states={})


@pytest.mark.parametrize("text", [ONE_PAIR, OTHER_SIZE])
def test_the_grid_marks_the_rank_whose_splits_do_not_fit(text: str) -> None:
    incident = incident_of(text)
    assert build_grid(incident.run, incident.lanes[0]).codes[:, -1].tolist() == [PENDING, DIFFERS, PENDING]


def test_of_two_suspects_one_differs_from_the_other() -> None:
    both = "0 1: all_to_all@5?\nsplits 0: world#1 4,4 4,4\nsplits 1: world#1 6,4 4,4"
    incident = incident_of(both)
    assert incident.top.suspects == (0, 1)
    assert build_grid(incident.run, incident.lanes[0]).codes[:, -1].tolist() == [PENDING, DIFFERS]


def test_details_of_an_operation_show_its_splits() -> None:
    incident = incident_of(ONE_PAIR)
    shown = [line.text for line in operation_rows(incident, incident.lanes[0], 2, 1, 80)]
    assert any("splits" in line and "sends [4, 4, 9], expects [4, 4, 4]" in line for line in shown)


def test_frames_of_our_recorder_are_left_out() -> None:
    own = [
        Frame(file=f"/x/titan_ckpt/debug/record/{name}.py", line=1, function=name)
        for name in ("own_stacks", "recorder")
    ]
    mine = Frame(file="/job/train.py", line=7, function="main")
    assert program_frames(Thread(name="", frames=(*own, mine))) == (mine,)
    assert program_frames(Thread(name="", frames=(mine,))) == (mine,)
