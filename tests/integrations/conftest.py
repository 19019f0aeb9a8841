"""Two ranks for all loops of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.rank_pool import RankPool


@pytest.fixture(scope="session")
def pair() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=240.0) as ranks:
        yield ranks
