"""Really hung jobs: inject, diagnose what was left, compare with the truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.cli import main
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.blackbox import HEADER_BYTES, RECORD
from titan_ckpt.debug.fault_programs import CASES as PROGRAMS
from titan_ckpt.debug.hooks import BoxWriter
from titan_ckpt.debug.inject import CASES, _is_newest, culprit_of, inject


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
