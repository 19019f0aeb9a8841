"""A seeded sample of the zoo (`make zoo` visits all of it): kinds of states through us and through DCP."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.zoo.kinds import Kind, kinds
from tools.zoo.tour import visit

ALL = kinds()
SAMPLE = random.Random(18).sample(ALL, 30)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SAMPLE, ids=lambda kind: kind.name)
def test_a_kind_comes_back_or_is_refused_at_save(kind: Kind, tmp_path: Path) -> None:
    found = visit(kind, tmp_path)
    assert found.wrong == ""
    assert found.ours in ("equal", "refused")


def test_the_zoo_has_at_least_300_kinds_of_distinct_names() -> None:
    assert len({kind.name for kind in ALL}) == len(ALL) >= 300
