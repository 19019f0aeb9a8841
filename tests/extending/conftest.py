"""Fixtures shared by the tests of resuming."""

from __future__ import annotations

import pytest


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tokenised standard library, shared by all tests of this process."""
    return str(tmp_path_factory.getbasetemp() / "tokens")
