"""Folders, files, functions and test names stay small enough to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.architecture.sources import MAX_FILE_LINES, MAX_FILES, MAX_FUNCTION_LINES, MAX_TEST_NAME, oversized


def test_nothing_is_oversized() -> None:
    assert list(oversized()) == []


def _function(num_lines: int) -> str:
    return "def f() -> None:\n" + "    pass\n" * (num_lines - 1)


@pytest.mark.parametrize(
    ("file", "allowed", "refused"),
    [
        ("debug/a.py", _function(MAX_FUNCTION_LINES), _function(MAX_FUNCTION_LINES + 1)),
        ("trainer/a.py", "x = 1\n" * MAX_FILE_LINES, "x = 1\n" * (MAX_FILE_LINES + 1)),
        ("scripts/a.py", "x = 1\n" * MAX_FILE_LINES, "x = 1\n" * (MAX_FILE_LINES + 1)),
        (
            "tests/tui/a.py",
            f"def {'test_':x<{MAX_TEST_NAME}}(): ...\n",
            f"def {'test_':x<{MAX_TEST_NAME + 1}}(): ...\n",
        ),
    ],
)
def test_one_more_line_or_letter_is_refused(tmp_path: Path, file: str, allowed: str, refused: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(allowed)
    assert list(oversized(tmp_path)) == []
    path.write_text(refused)
    (found,) = oversized(tmp_path)
    assert found.startswith(f"{file}:")


def test_one_more_file_in_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tests" / "data").mkdir(parents=True)
    (tmp_path / "tui").mkdir()
    for number in range(MAX_FILES):
        (tmp_path / "tui" / f"a{number}.py").touch()
        (tmp_path / "tests" / "data" / f"b{number}.py").touch()
    (tmp_path / "tests" / "data" / "c.py").touch()
    assert list(oversized(tmp_path)) == []
    (tmp_path / "tui" / "c.py").touch()
    assert list(oversized(tmp_path)) == [f"tui: {MAX_FILES + 1} files, at most {MAX_FILES}"]
