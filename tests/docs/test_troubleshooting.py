"""Each error text that docs/troubleshooting.md quotes is one that the code can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.paths import DOCS, ROOT

QUOTED = re.compile(r"^### `(.+)`$", re.MULTILINE)
FOLDERS = ("titan_ckpt", "trainer", "debug", "converters")


def _texts(tree: ast.Module) -> Iterator[str]:
    """The string literals of a module, an f-string with a gap for each value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def texts_of_the_code() -> str:
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if not _is_linked(path))
    return "\n".join(text for path in files for text in _texts(ast.parse(path.read_text())))


def _is_linked(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent != ROOT)


def is_printed(quoted: str) -> bool:
    """Whether the parts of a quotation between its gaps stand in one text of the code, in order."""
    parts = [re.escape(part) for part in re.split(r"\.\.\.", quoted) if part.strip()]
    return re.search(r"[^\n]*".join(parts), texts_of_the_code()) is not None


@pytest.mark.parametrize("quoted", QUOTED.findall((DOCS / "troubleshooting.md").read_text()))
def test_a_quoted_error_is_one_that_the_code_prints(quoted: str) -> None:
    assert is_printed(quoted), f"no error has this text any more: {quoted}"


def test_an_invented_error_is_noticed() -> None:
    assert not is_printed("the moon is ... of green cheese")
    assert len(QUOTED.findall((DOCS / "troubleshooting.md").read_text())) >= 30
