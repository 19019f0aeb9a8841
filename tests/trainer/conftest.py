"""What the tests of the trainer share."""

from __future__ import annotations

import pytest


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One tokenised standard library for all tests of this process."""
    return str(tmp_path_factory.getbasetemp() / "tokens")
