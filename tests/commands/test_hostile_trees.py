"""Deletion from trees of anything: a sample of `python -m scripts.hostile deletion`."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.hostile.deletion import make_template, try_once

pytestmark = pytest.mark.repeats


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("hostile"))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_nothing_that_is_not_ours_goes_from_any_tree(template: Path, seed: int) -> None:
    """Files, links, foreign folders, half saves, damage; retention or prune; any policy (`scripts.hostile deletion`)."""
    folder = template.parent / f"case-{seed}"
    try:
        assert try_once(random.Random(seed), template, folder)[0] == []
    finally:
        shutil.rmtree(folder)
