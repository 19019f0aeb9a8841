"""Real hung jobs: inject a fault, diagnose the files left behind, compare with the injected fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.drill.catalogue import CASES as PROGRAMS
from titan_ckpt.debug.drill.inject import CASES, _end, _is_newest, _start, _wait_until_settled, culprit_of, inject
from titan_ckpt.debug.incident.black_box import HEADER_BYTES, HEARTBEAT, HEARTBEAT_AT, RECORD
from titan_ckpt.debug.incident.kinds import Subtype, VerdictKind
from titan_ckpt.debug.record.hooks import BoxWriter
from titan_ckpt.store.open import open_store


def assert_right(case: str, ranks: int, folder: Path) -> None:
    run = open_run(str(inject(case, folder, ranks=ranks)))
    top = diagnose(run)[0]
    truth = CASES[case]
    assert (top.verdict, top.culprits) == (truth.verdict, truth.culprits(ranks))
    assert truth.subtype in (None, top.subtype)


@pytest.mark.dist
@pytest.mark.parametrize("case", ["skip", "dataloader", "sigkill", "p2p_missing", "ok"])
def test_two_rank_job_is_diagnosed_right(case: str, tmp_path: Path) -> None:
    assert_right(case, 2, tmp_path / "incident")


@pytest.mark.dist
@pytest.mark.parametrize("case", ["wrong_group", "sigstop"])
def test_three_rank_job_is_diagnosed_right(case: str, tmp_path: Path) -> None:
    assert_right(case, 3, tmp_path / "incident")


@pytest.mark.dist
def test_killed_rank_leaves_its_last_operation_in_the_black_box(tmp_path: Path) -> None:
    run = open_run(str(inject("sigkill", tmp_path / "incident", ranks=2)))
    last = run.operation(culprit_of(2), -1)
    assert (last.op, last.seq) == ("broadcast", 6)


@pytest.mark.parametrize(("issued_after_ns", "is_newest"), [(-1_000_000_000, True), (1_000_000_000, False)])
def test_stall_that_a_rank_got_over_is_no_report(issued_after_ns: int, is_newest: bool, tmp_path: Path) -> None:
    dump = tmp_path / "rank_00000.stall.pickle"
    assert not _is_newest(dump, tmp_path / "rank_00000.box", 1)
    dump.write_bytes(b"x")
    box = BoxWriter(tmp_path / "rank_00000.box", rank=0, world_size=1, capacity=4)
    created = dump.stat().st_mtime_ns + issued_after_ns
    RECORD.pack_into(box.map, HEADER_BYTES, created, 0, 1, 1, 0, -1, 0, 0, 0, 0, 0, 1)
    assert _is_newest(dump, box.path, 1) == is_newest
    assert not _is_newest(dump, box.path, 2)


def test_every_case_has_a_program_and_a_truth() -> None:
    assert set(CASES) == set(PROGRAMS)


def test_unknown_case_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "inject", "nonsense", "--out", str(tmp_path / "x")]) == 2
    assert "wrong_group" in capsys.readouterr().err


def test_odd_number_of_ranks_is_refused_where_pairs_are_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["debug", "inject", "chain", "--ranks", "3", "--out", str(tmp_path / "x")]) == 2
    assert "even" in capsys.readouterr().err


def test_a_drill_writes_into_no_folder_that_holds_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "truth.json").write_text("mine")
    assert main(["debug", "inject", "skip", "--out", str(tmp_path)]) == 2
    assert "holds files already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["truth.json"]


@pytest.mark.dist
@pytest.mark.s3
def test_live_job_is_collected_to_a_store_and_diagnosed(s3_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "box"
    folder.mkdir()
    job = [_start("python_lock", rank, 2, folder, tmp_path / "store", 1.5) for rank in range(2)]
    try:
        _wait_until_settled(job, folder, CASES["python_lock"], 120.0)
        words = ["debug", "collect", str(folder), "--out", f"{s3_url}/debug/by-hand", "--logs", f"{folder}/*.log"]
        assert main(words) == 0
    finally:
        _end(job)
    run = open_run(s3_url)
    top = diagnose(run)[0]
    assert (run.incident, top.verdict, top.subtype, top.culprits) == ("by-hand", "STUCK_ON_CPU", "python_lock", (1,))
    assert {rank for rank, record in run.ranks.items() if record.process_state} == {0, 1}
    assert main(["debug", s3_url]) == 1


@pytest.mark.s3
def test_heartbeats_are_watched_in_an_object_store(
    s3_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(s3_url)
    boxes = [BoxWriter(tmp_path / f"rank_{rank:05d}.box", rank=rank, world_size=2) for rank in range(2)]

    def watched() -> int:
        for box in boxes:
            store.write(f"debug/now/{box.path.name}", [bytes(box.map)])
        return main(["debug", "watch", s3_url, "--once", "--after", "1000"])

    for box in boxes:
        box.set_phase(7, 3)
    assert watched() == 0
    assert "2 of 2 ranks run: ranks 0, 1 in step 7 forward" in capsys.readouterr().out
    HEARTBEAT.pack_into(boxes[1].map, HEARTBEAT_AT, 7, 3, 1, 1, 0)
    assert watched() == 1
    assert "SILENT: rank 1" in capsys.readouterr().out
    for box in boxes:
        box.stop()
    assert watched() == 0
    assert "all ranks ended in good order" in capsys.readouterr().out


def test_every_case_expects_a_verdict_that_exists() -> None:
    assert {truth.verdict for truth in CASES.values()} <= set(VerdictKind)
    assert {truth.subtype for truth in CASES.values() if truth.subtype} <= set(Subtype)
