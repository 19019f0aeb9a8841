"""Folders that hold several incidents, and folders of one incident that is spread over hosts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.errors import NotFoundError
from tools.paths import INCIDENTS


def several(folder: Path) -> Path:
    for case in ("skip", "sigkill", "ok"):
        shutil.copytree(INCIDENTS / case, folder / case)
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_folder_of_incidents_is_no_single_healthy_job(tmp_path: Path) -> None:
    run = open_run(str(several(tmp_path)))
    assert set(run.incidents) == {"skip", "sigkill", "ok"}
    assert run.incident == run.incidents[-1]


def test_a_folder_of_metrics_alone_is_no_incident(tmp_path: Path) -> None:
    """Nor does it keep the others from being ordered by the times in their logs."""
    for case, day in (("late", "22"), ("early", "21")):
        text = f"2026-11-{day} 10:00:00,000 [rank0] INFO step 1\n"
        write(tmp_path / case / "rank_0.log", text)
    write(tmp_path / "plain" / "logs" / "metrics.jsonl", '{"event": "step", "step": 1}\n')
    assert open_run(str(tmp_path)).incidents == ("early", "late")


def test_each_incident_can_be_chosen(tmp_path: Path) -> None:
    several(tmp_path)
    assert diagnose(open_run(str(tmp_path), incident="sigkill"))[0].verdict == "RANK_DIED"
    with pytest.raises(NotFoundError, match="there are: "):
        open_run(str(tmp_path), incident="other")


def test_all_judges_each_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", str(several(tmp_path)), "--all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in sorted(lines)] == [
        ["ok", "HEALTHY"],
        ["sigkill", "RANK_DIED"],
        ["skip", "SKIPPED_COLLECTIVE"],
    ]


def test_report_lists_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["debug", str(several(tmp_path))])
    assert "other incidents here" in capsys.readouterr().out


def test_folders_of_hosts_are_one_incident(tmp_path: Path) -> None:
    for rank in range(4):
        target = tmp_path / f"node{rank // 2}"
        target.mkdir(exist_ok=True)
        for source in (INCIDENTS / "skip").glob(f"rank_{rank}*"):
            shutil.copy(source, target)
    assert not open_run(str(tmp_path)).incidents


def test_consoles_that_name_other_ranks_are_one_incident(tmp_path: Path) -> None:
    write(tmp_path / "a" / "train.log", "[rank0]: ValueError\n")
    write(tmp_path / "b" / "train.log", "[rank1]: ValueError\n")
    assert set(open_run(str(tmp_path)).ranks) == {0, 1}


def test_consoles_that_name_the_same_rank_are_several(tmp_path: Path) -> None:
    write(tmp_path / "a" / "train.log", "[rank0]: ValueError\n")
    write(tmp_path / "b" / "train.log", "[rank0]: ValueError\n")
    assert set(open_run(str(tmp_path)).incidents) == {"a", "b"}


def test_earlier_attempt_of_torchrun_is_history(tmp_path: Path) -> None:
    died = 'Traceback (most recent call last):\n  File "/job/a.py", line 3, in f\nValueError: first\n'
    for rank in range(2):
        write(tmp_path / "tr" / "none_ab" / "attempt_0" / str(rank) / "stderr.log", f"[rank{rank}]: {died}")
        write(tmp_path / "tr" / "none_ab" / "attempt_1" / str(rank) / "stderr.log", f"[rank{rank}]: going on\n")
    assert not any(record.events for record in open_run(str(tmp_path)).ranks.values())


@pytest.mark.parametrize("given", ["", "debug"], ids=["run", "its recorder's folder"])
def test_earlier_attempt_in_a_recorders_folder_is_history(tmp_path: Path, given: str) -> None:
    shutil.copytree(INCIDENTS / "skip", tmp_path / "debug")
    shutil.copytree(INCIDENTS / "sigkill", tmp_path / "debug" / "earlier" / "0001")
    url = str(tmp_path / given)
    run = open_run(url)
    assert (run.incidents, run.incident, diagnose(run)[0].verdict) == (("earlier/0001", ""), "", "SKIPPED_COLLECTIVE")
    assert diagnose(open_run(url, incident="earlier/0001"))[0].verdict == "RANK_DIED"


def test_local_ranks_of_two_hosts_become_global(tmp_path: Path) -> None:
    for host in range(2):
        for local in range(2):
            path = tmp_path / f"run{host}" / "none_ab" / "attempt_0" / str(local) / "stderr.log"
            write(path, f"[rank{2 * host + local}]: hello\n" if local else "no prefix\n")
    assert {rank: record.log.tail for rank, record in open_run(str(tmp_path)).ranks.items() if record.log} == {
        0: ("no prefix",), 1: ("hello",), 2: ("no prefix",), 3: ("hello",),
    }  # fmt: skip


def test_the_newest_is_the_one_whose_logs_end_last(tmp_path: Path) -> None:
    """Copies have the times of the copying: the logs tell."""
    for number, case in enumerate(("straggler", "exception", "type", "skip")):
        copied = shutil.copytree(INCIDENTS / case, tmp_path / case)
        for file in copied.rglob("*"):
            os.utime(file, (1e9 + number, 1e9 + number))
    assert open_run(str(tmp_path)).incidents == ("skip", "type", "straggler", "exception")


def test_without_times_in_the_logs_the_newest_file_tells(tmp_path: Path) -> None:
    for number, job in enumerate("ba"):
        write(tmp_path / job / "rank_0.log", "[rank0]: Traceback (most recent call last):\n")
        os.utime(tmp_path / job / "rank_0.log", (1e9 + number, 1e9 + number))
    assert open_run(str(tmp_path)).incidents == ("b", "a")
