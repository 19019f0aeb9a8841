"""The analyzer on dumps of real hung jobs; MANIFEST.json holds the expected verdicts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.debug import diagnose, open_run
from tools.paths import INCIDENTS

CASES: dict[str, dict[str, Any]] = json.loads((INCIDENTS / "MANIFEST.json").read_text())["cases"]


def assert_truth(folder: Path, truth: dict[str, Any]) -> None:
    top = diagnose(open_run(str(folder)))[0]
    assert top.verdict in (truth["verdict"], truth.get("alt"))
    assert list(top.culprits) == truth["culprits"]
    assert top.subtype == truth.get("subtype", top.subtype)
    assert top.seq == truth.get("seq", top.seq)


@pytest.mark.parametrize("case", CASES)
def test_hung_job_is_diagnosed_right(case: str) -> None:
    assert_truth(INCIDENTS / case, CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_top_verdict_is_the_first_choice_of_the_manifest(case: str) -> None:
    assert diagnose(open_run(str(INCIDENTS / case)))[0].verdict == CASES[case]["verdict"]


def test_chain_reaches_through_pipeline_and_tensor_groups() -> None:
    top = diagnose(open_run(str(INCIDENTS / "chain")))[0]
    assert {tuple(pair) for pair in CASES["chain"]["chain"]} == set(top.chain)


def test_truncated_ring_is_flagged() -> None:
    flags = [flag.flag for flag in open_run(str(INCIDENTS / "ring")).flags]
    assert "RING_TRUNCATED" in flags


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("all_ops",)])
def test_names_of_folder_and_ranks_do_not_matter(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    for source in (INCIDENTS / case).iterdir():
        name = source.name.replace("rank_", "nccl_trace_rank_")
        shutil.copy(source, folder / name)
    assert_truth(folder, CASES[case])


@pytest.mark.parametrize("case", ["skip", "order", "type", "size", "dataloader", "sigkill", "exception"])
def test_json_dumps_alone_name_the_same_rank(case: str, tmp_path: Path) -> None:
    for source in (INCIDENTS / case).iterdir():
        if source.suffix:
            shutil.copy(source, tmp_path / source.name)
    top = diagnose(open_run(str(tmp_path)))[0]
    assert list(top.culprits) == CASES[case]["culprits"]


def test_command_prints_a_verdict_of_about_twenty_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", str(INCIDENTS / "skip")]) == 1
    text = capsys.readouterr().out
    assert text.startswith("SKIPPED_COLLECTIVE: rank 2 ")
    assert "faults.py:122" in text
    assert len(text.splitlines()) <= 24


def test_command_prints_the_json_interface(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", str(INCIDENTS / "ckpt_io"), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    top = printed["verdicts"][0]
    assert {
        "verdict", "subtype", "culprits", "victims", "group", "seq", "op", "step", "confidence", "evidence", "chain",
        "next_steps",
    } <= set(top)  # fmt: skip
    assert (top["verdict"], top["culprits"]) == ("STUCK_ON_CPU", [0])
    assert isinstance(printed["flags"], list)


def test_healthy_job_exits_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", str(INCIDENTS / "ok")]) == 0
    assert capsys.readouterr().out.startswith("HEALTHY")


@pytest.mark.parametrize("words", [["debug", "PATH"], ["debug", "--json", "PATH"]])
def test_missing_folder_is_one_clear_error(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "nothing")
    assert main([path if word == "PATH" else word for word in words]) == 3
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert path in captured.err
