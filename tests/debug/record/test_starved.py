"""A rank that is ready to run and gets no processor: what the kernel counts, what the recorder keeps, what is said of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import diagnose
from titan_ckpt.debug.incident.records import Heartbeat, Run
from titan_ckpt.debug.read.reader import open_run
from titan_ckpt.debug.record import progress
from titan_ckpt.debug.record.recorder import Recorder
from titan_ckpt.debug.report.action import action_for

SECOND_NS = 10**9


@pytest.mark.parametrize("text", [None, "", "1 2\n", "1 2 3 4\n", "one two three\n"])
def test_kernel_that_does_not_count(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "schedstat"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(progress, "SCHEDSTAT", path)
    assert progress.main_thread_times() == (0, 0)


@pytest.mark.skipif(not progress.SCHEDSTAT.exists(), reason="this kernel does not count")
def test_kernel_counts_what_the_main_thread_ran() -> None:
    before, began = progress.main_thread_times(), time.thread_time()
    while time.thread_time() < began + 0.05:
        pass
    assert progress.main_thread_times()[0] - before[0] > 0.04 * SECOND_NS


def _beat(folder: Path, until: Callable[[Heartbeat], bool]) -> Heartbeat:
    """The first heartbeat in `folder` of which `until` is true."""
    give_up = time.monotonic() + 240
    while time.monotonic() < give_up:
        beat = open_run(str(folder)).ranks[0].heartbeat
        if beat is not None and until(beat):
            return beat
    raise AssertionError(f"not within 120 s: {beat}")


def test_recorder_counts_from_the_last_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tmp_path / "schedstat"
    kernel.write_text("1000 500 7\n")
    monkeypatch.setattr(progress, "SCHEDSTAT", kernel)
    with Recorder.start(tmp_path / "box", rank=0, world_size=1, stall_s=0) as recorder:
        with recorder.phase("data", step=1):
            _beat(recorder.folder, lambda beat: beat.moves == 1)
            kernel.write_text("1040 9500 8\n")
            beat = _beat(recorder.folder, lambda beat: beat.queued_ns > 0)
            assert (beat.ran_ns, beat.queued_ns) == (40, 9000)
        beat = _beat(recorder.folder, lambda beat: beat.moves == 2)
        assert (beat.ran_ns, beat.queued_ns) == (0, 0)


def waiting_for_rank_1(text: str, *, ran_s: float, queued_s: float) -> Run:
    """Ranks 0 and 2 wait in an operation that rank 1 has not issued."""
    run = job(f"0 2: all_reduce@1 all_reduce@2?\n1: all_reduce@1\n{text}")
    beat = Heartbeat(
        step=4, phase="", phase_ns=0, alive_ns=1, source="rank_1.box", ran_ns=int(ran_s * SECOND_NS),
        queued_ns=int(queued_s * SECOND_NS),
    )  # fmt: skip
    return replace(run, ranks={**run.ranks, 1: replace(run.ranks[1], heartbeat=beat, host="node7")})


@pytest.mark.parametrize("text", ["at 1: /job/data.py 7 load", ""])
@pytest.mark.parametrize(
    ("ran_s", "queued_s", "is_starved"),
    [(1, 40, True), (13, 40, True), (14, 40, False), (0, 4.9, False), (0, 0, False)],
)
def test_rank_without_a_processor_is_starved(text: str, ran_s: float, queued_s: float, is_starved: bool) -> None:
    run = waiting_for_rank_1(text, ran_s=ran_s, queued_s=queued_s)
    top = diagnose(run)[0]
    assert (top.verdict, top.culprits, top.subtype == "starved") == ("STUCK_ON_CPU", (1,), is_starved)
    assert any("had a processor for" in item.text for item in top.evidence) == is_starved
    assert (action_for(run, top).hosts == ("node7",)) == is_starved


def test_rank_that_waits_is_not_starved() -> None:
    """Its thread may spin on the device while it waits for its peers."""
    run = waiting_for_rank_1("at 1: /job/data.py 7 load", ran_s=0, queued_s=40)
    beat = run.ranks[1].heartbeat
    waits = {**run.ranks, 2: replace(run.ranks[2], heartbeat=beat), 1: replace(run.ranks[1], heartbeat=None)}
    assert all(verdict.subtype != "starved" for verdict in diagnose(replace(run, ranks=waits)))
