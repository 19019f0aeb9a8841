"""The tools behind `make coverage`, `mutants`, `matrix` and `release`, and the files that services read."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tools.matrix import debian
from tools.matrix.__main__ import supported_torch, table
from tools.matrix.cells import Cell, State
from tools.mutants.__main__ import Mutant, sample
from tools.mutants.mutations import Mutation, find_mutations
from tools.mutants.trees import mutated
from tools.paths import ROOT
from tools.quick_tests import QUICK, source_files
from tools.release.checks import project_problems

SOURCE = '''
LIMIT = 3

def clip(value: int, *, strict: bool = False) -> int:
    """The value, not above 3."""
    if strict and value > LIMIT:
        raise ValueError(f"{value + 1} > 3")
    return min(value, 3)
'''


def _lines(mutations: list[Mutation]) -> set[str]:
    """The changed line of each mutant, without its indent."""
    return {mutation.apply(SOURCE).splitlines()[mutation.line - 1].strip() for mutation in mutations}


def test_each_mutation_changes_one_place_in_a_function() -> None:
    assert _lines(find_mutations(SOURCE)) == {
        "if (strict or value > LIMIT):",
        "if strict and value >= LIMIT:",
        "pass",
        "return None",
        "return min(value, 4)",
    }


def test_columns_of_a_mutation_count_bytes() -> None:
    source = "def f(x): return 'ä' if x == 1 else 2"
    assert source.replace("==", "!=") in {mutation.apply(source) for mutation in find_mutations(source)}


def test_a_mutated_file_is_put_back(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("before")
    with mutated(file, "after"):
        assert file.read_text() == "after"
    assert file.read_text() == "before"


def test_a_sample_is_seeded_and_visits_every_room() -> None:
    mutation = find_mutations(SOURCE)[0]
    files = [f"titan_ckpt/{room}/{number}.py" for room in ("store", "check", "state") for number in range(9)]
    mutants = [Mutant(file=file, mutation=mutation, tests=()) for file in files]
    assert sample(mutants, 6, seed=1) == sample(mutants, 6, seed=1) != sample(mutants, 6, seed=2)
    assert {mutant.room for mutant in sample(mutants, 3, seed=1)} == {"store", "check", "state"}


def test_the_matrix_is_a_markdown_table() -> None:
    cell = Cell(python="3.11.7", torch="2.13.0", state=State.PASSED, detail="2055 passed")
    assert table([cell]).splitlines()[-1] == "| 3.11.7 | 2.13.0 | passed | 2055 passed |"
    assert supported_torch()[0] == "2.11"


def _programs(folder: Path, **scripts: str) -> str:
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@pytest.mark.parametrize(
    ("fails", "state", "detail"),
    [
        ("", State.PASSED, "import"),
        ("echo E: no python3.14; exit 1", State.LEFT_OUT, "did not install it: E: no python3.14"),
    ],
)
def test_a_missing_python_is_fetched(
    fails: str, state: State, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    row = json.dumps([{"python": "3.14.0", "torch": "none", "state": "passed", "detail": "import", "duration_s": 1.0}])
    make = 'for last; do :; done; mkdir -p "$last/usr/bin"; touch "$last/usr/bin/python3.14"'
    programs = {"debootstrap": fails or make, "chroot": f"echo '{row}' > \"$1/cells.json\""}
    monkeypatch.setenv("PATH", _programs(tmp_path / "bin", **programs))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(debian, "CERTIFICATES", tmp_path / "none.crt")
    cells = debian.cells_of("3.14", tmp_path, ["--laptop"])
    assert [(cell.state, detail in cell.detail) for cell in cells] == [(state, True)]


def test_cells_of_an_earlier_run_are_not_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "debian-3.14"
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "usr" / "bin" / "python3.14").touch()
    (root / "cells.json").write_text("[]")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", _programs(tmp_path / "bin", debootstrap="", chroot="exit 1"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(debian, "CERTIFICATES", tmp_path / "none.crt")
    assert [cell.state for cell in debian.cells_of("3.14", tmp_path, [])] == [State.FAILED]


def test_a_python_that_nobody_can_fetch_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [cell.state for cell in debian.cells_of("3.14", tmp_path, [])] == [State.LEFT_OUT]


def test_a_release_needs_a_date_and_real_addresses(tmp_path: Path) -> None:
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.0.0\n")
    (tmp_path / "CHANGELOG.md").write_text("## 1.0.0 - unreleased\n")
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nSource = "https://me.example/x"\n')
    assert len(list(project_problems(tmp_path, "1.0.0"))) == 2
    (tmp_path / "CHANGELOG.md").write_text("## 1.0.0 - 2026-12-01\n")
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nSource = "https://me.org/x"\n')
    assert not list(project_problems(tmp_path, "1.0.0"))
    assert len(list(project_problems(tmp_path, "1.0.1"))) == 2


def test_sources_are_listed_alike_with_and_without_git(tmp_path: Path) -> None:
    listed = {path for path in source_files(ROOT) if path.parts[0] in ("tools", "configs")}
    for path in listed:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "tools" / "__pycache__").mkdir()
    (tmp_path / "tools" / "__pycache__" / "old.pyc").touch()
    assert set(source_files(tmp_path)) == listed


def test_the_makefile_and_the_tools_agree_on_the_quick_tests() -> None:
    assert f"\nQUICK := {QUICK}\n" in (ROOT / "Makefile").read_text()


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(phony.split()) == set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))


def test_the_coverage_in_the_readme_is_the_floor() -> None:
    floor = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["report"]["fail_under"]
    assert f"at least {floor} % of the lines" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", [".pre-commit-config.yaml", "CITATION.cff", *ROOT.glob(".github/**/*.yml")], ids=str)
def test_files_for_services_are_yaml(name: str | Path) -> None:
    assert isinstance(yaml.safe_load((ROOT / name).read_text()), dict)


def test_ci_calls_targets_that_exist() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text() + (ROOT / ".ci/run").read_text()
    targets = set(re.findall(r"\bmake (?:--no-print-directory )?([a-z-]+)", text))
    assert targets == {"setup", "check", "coverage", "test", "matrix"}
    assert ".ci/run" in text
