"""`make bench`: its list names real benchmarks, and the table of bars agrees with the sections."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import gpu, suite
from benchmarks.bars import PROMISES, read_sections, summary
from benchmarks.suite import SUITES, Suite, main, run_suite
from tools.paths import ROOT

SECTION = """<!-- begin core-local -->
| what | measured | bar | holds | peer in the same run |
|------|----------|-----|-------|----------------------|
| stall of an async save / copy | 1.09 x (0.1 s (0.1 to 0.2)) | <= 1.25 x | {holds} | |
<!-- end core-local -->
"""


def row(table: str, what: str) -> list[str]:
    found = next(line for line in table.splitlines() if what in line)
    return [cell.strip() for cell in found.split("|")[3:-1]]


@pytest.mark.parametrize(("holds", "expected"), [("yes", "yes"), ("NO", "**no**")])
def test_a_bar_is_read_from_its_section(holds: str, expected: str) -> None:
    cells = row(summary(SECTION.format(holds=holds)), "stall of an async save")
    assert cells == ["<= 1.25 x", "1.09 x (0.1 s (0.1 to 0.2))", expected, "core-local"]


def test_a_bar_without_a_run_shows_what_it_needs() -> None:
    assert row(summary(""), "tokens/s against torchtitan on one GPU")[1:] == ["not run here", "-", "needs a GPU"]


def test_a_vertical_bar_in_the_first_cell_is_text() -> None:
    text = SECTION.format(holds="yes").replace("async save", "async |save|")
    assert read_sections(text)["core-local"][0].what == "stall of an async |save| / copy"


def test_every_bar_of_the_committed_page_is_read_from_it() -> None:
    written = set(
        re.findall(r'write_section\(\s*f?"([^"{]+)', "".join(p.read_text() for p in ROOT.glob("benchmarks/**/*.py")))
    )
    for promise in PROMISES:
        assert not promise.section or any(promise.section.startswith(name) for name in written), promise
        assert not promise.tests or (ROOT / "tests" / promise.tests).is_file(), promise
        assert not promise.file or (ROOT / promise.file).is_file(), promise


def test_suites_and_benchmark_modules_match() -> None:
    modules = {suite.module for suite in SUITES}
    assert all(find_spec(f"benchmarks.{name}") for name in modules)
    folder = ROOT / "benchmarks"
    written = (
        p.relative_to(folder).with_suffix("") for p in folder.glob("**/*.py") if "write_section(" in p.read_text()
    )
    scripts = {".".join(path.parts) for path in written}
    assert scripts <= modules, f"not in benchmarks/suite.py: {scripts - modules}"


def test_list_prints_a_line_per_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(SUITES)


def test_a_suite_that_hangs_is_ended_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "OUTPUT", tmp_path)
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    waits = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    monkeypatch.setattr(Suite, "command", lambda _: waits)
    assert "out of time" in run_suite(Suite(name="hangs", module="checkpoints.core_local", limit_s=0.5)).problem


def test_a_failed_suite_is_reported_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "OUTPUT", tmp_path)
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(Suite, "command", lambda _: [sys.executable, "-c", "raise SystemExit('no room')"])
    assert "no room" in run_suite(Suite(name="fails", module="checkpoints.core_local")).problem
    assert subprocess.run([sys.executable, "-m", "benchmarks.suite", "--only", "nothing"], cwd=ROOT, check=False,
                          capture_output=True).returncode == 2  # fmt: skip


def test_a_failed_suite_is_listed_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "performance.md"
    programs = {
        "writes": f"open({str(page)!r}, 'w').write('the same again')",
        "silent": "pass",
        "fails": "raise SystemExit('no room')",
    }
    suites = tuple(
        Suite(name=name, module="checkpoints.core_local", limit_s=60.0) for name in ("fails", "silent", "writes")
    )
    suites += (Suite(name="elsewhere", module="checkpoints.core_local", missing=lambda: "no GPU"),)
    page.write_text("the same again")
    for name, value in {"OUTPUT": tmp_path, "ROOT": tmp_path, "PERFORMANCE": page, "SUITES": suites}.items():
        monkeypatch.setattr(suite, name, value)
    monkeypatch.setattr(suite, "write_summary", lambda: None)
    monkeypatch.setattr(Suite, "command", lambda self: [sys.executable, "-c", programs[self.name]])
    assert main(["--skip", "silent"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^\[2/3\] writes \.\.\. done", printed, re.MULTILINE)
    assert "not run here: no GPU" in printed
    assert re.search(r"^2 of 3 suites ran in .*, 1 failed\n  fails: exit code 1: no room", printed, re.MULTILINE)
    assert main(["--only", "silent"]) == 1
    assert "wrote no section" in capsys.readouterr().out
    assert main(["--quick", "--only", "writes"]) == 0


def test_quick_leaves_out_long_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert "core_scale" in names
    assert "reshard_matrix" not in names


def test_what_gave_no_row_is_reported_with_why(tmp_path: Path) -> None:
    part = gpu.Part(module="not_there", promises=("a", "b"), limit_s=60.0)
    rows = gpu.run(part, is_tiny=True, titan=None, limit_s=60.0)
    assert [row.what for row in rows] == ["a", "b"]
    assert all("not run: " in row.state and "benchmarks.not_there" in row.state for row in rows)
    measured = gpu.Row(what="c", state="run", figure="1.10 x", bar=">= 1.0 x", holds=True)
    gpu.write_report(tmp_path, [*rows, measured], "a device")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["state"] == "run" for row in written["rows"]] == [False, False, True]
    assert "1.10 x" in (tmp_path / "gpu.md").read_text()
