"""The Python reference matches the docstrings, every public name has one, and their examples run."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from types import ModuleType

import pytest

from tools.docs.api_docs import PACKAGES, reference
from tools.paths import DOCS

DOCTESTED = (
    "titan_ckpt.sharding.mesh",
    "titan_ckpt.sharding.placement",
    "titan_ckpt.upkeep.retention",
    "titan_ckpt.console.units",
    "titan_ckpt.location",
)


def test_the_python_reference_matches_the_docstrings() -> None:
    assert (DOCS / "api.md").read_text() == reference(), "run `make docs`"


def test_every_public_name_is_described() -> None:
    entries = dict(
        re.findall(r"^### (\S+)\n\n```python\n.*?```\n\n(.*?)\n(?:\n|\Z)", reference(), re.MULTILINE | re.DOTALL)
    )
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            assert name.startswith("__") or len(entries[name].split()) >= 4, f"{package}.{name}"


@pytest.mark.parametrize("name", DOCTESTED)
def test_the_examples_in_docstrings_are_true(name: str) -> None:
    importlib.import_module(name)
    module: ModuleType = sys.modules[name]
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
