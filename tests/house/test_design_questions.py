"""The twenty lines of docs/design-questions.md occur in the folders that the page names."""

from __future__ import annotations

import re

import pytest

from tools.paths import ROOT

PAGE = ROOT / "docs" / "design-questions.md"
QUESTIONS = re.findall(r"^\| \d+ \| `(.+?)` \| `([\w/]+)/` \| .+ \|$", PAGE.read_text(), re.MULTILINE)


def test_there_are_twenty_questions() -> None:
    assert len(QUESTIONS) == 20


@pytest.mark.parametrize(("line", "folder"), QUESTIONS)
def test_a_line_stands_in_its_folder(line: str, folder: str) -> None:
    assert any(line in path.read_text() for path in (ROOT / folder).rglob("*.py"))
