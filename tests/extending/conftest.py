"""Fixtures shared by the tests of resuming."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.rank_pool import RankPool


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tokenised standard library, shared by all tests of this process."""
    return str(tmp_path_factory.getbasetemp() / "tokens")


@pytest.fixture(scope="package")
def ranks() -> Iterator[RankPool]:
    """Four ranks, started once for all tests of this folder."""
    with RankPool(4) as pool:
        yield pool
