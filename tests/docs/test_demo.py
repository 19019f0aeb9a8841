"""The demo with smaller numbers: the printed facts confirm every act, and nothing it started is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.doc_blocks import STORY, story_words
from tools.paths import DOCS, ROOT

LIMIT_S = 900
ACTS = ("serve", "train", "kill", "resume", "reshard", "convert", "hang", "look")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The demo's folder and the facts it printed."""
    folder = tmp_path_factory.mktemp("demo")
    command = [
        sys.executable,
        "-m",
        "titan_ckpt",
        "demo",
        "--dir",
        str(folder),
        "--steps",
        "6",
        "--save-every",
        "2",
        "--json",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    (folder / "story.txt").write_text(done.stderr)
    return folder, json.loads(done.stdout)


pytestmark = [pytest.mark.e2e, pytest.mark.dist, pytest.mark.s3, pytest.mark.hf, pytest.mark.timeout(LIMIT_S + 60)]


def test_all_eight_acts_are_reported_and_recorded(demo: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = demo
    assert [facts[name]["act"] for name in ACTS] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert json.loads((folder / "facts.json").read_text()) == facts


def test_the_demo_prints_the_story_of_the_tutorial(demo: tuple[Path, dict[str, Any]]) -> None:
    shown = STORY.search((DOCS / "tutorial.md").read_text())
    assert shown is not None
    assert story_words((demo[0] / "story.txt").read_text()) == story_words(shown[1])


def test_the_loss_falls(demo: tuple[Path, dict[str, Any]]) -> None:
    assert demo[1]["train"]["last_loss"] < demo[1]["train"]["first_loss"] - 0.3


def test_a_kill_during_an_upload_keeps_the_last_commit(
    demo: tuple[Path, dict[str, Any]],
) -> None:
    kill = demo[1]["kill"]
    assert kill["killed_processes"] >= 5
    assert kill["arrived_bytes"] > 1_000_000
    assert (kill["uploading_step"], kill["newest_committed"]) == (6, 4)
    assert kill["verified_bytes"] > 70_000_000


@pytest.mark.parametrize("act", ["resume", "reshard"])
def test_losses_continue_those_of_the_killed_run(demo: tuple[Path, dict[str, Any]], act: str) -> None:
    assert demo[1][act]["compared_steps"] == 2
    assert demo[1][act]["max_relative_difference"] <= 1e-5


def test_transformers_computes_the_same_logits(demo: tuple[Path, dict[str, Any]]) -> None:
    convert = demo[1]["convert"]
    assert convert["tokens"] >= 512
    assert convert["max_logit_difference"] <= 1e-3
    assert (demo[0] / "hf" / "config.json").exists()


def test_the_culprit_rank_and_line_are_found_and_shown(demo: tuple[Path, dict[str, Any]]) -> None:
    hang = demo[1]["hang"]
    assert (hang["verdict"], hang["rank"]) == ("SKIPPED_COLLECTIVE", 1)
    assert hang["source"] in Path(hang["file"]).read_text()
    assert Path(demo[1]["look"]["screenshot"]).read_text().startswith("<svg")


def test_the_demo_leaves_no_process_behind(demo: tuple[Path, dict[str, Any]]) -> None:
    if not Path("/proc").exists():
        pytest.skip("looks at /proc")
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(demo[0]).encode() in _read(path)]
    assert left == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended during the check
        return b""
