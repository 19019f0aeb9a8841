"""A DTensor inside of other values: its containers are taken apart, objects are refused; and values alone are loaded by all."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.saving.saver import SaveError, save
from tools.rank_pool import RankPool

pytestmark = pytest.mark.dist


@dataclasses.dataclass
class Holder:
    """Holds what each rank has a part of."""

    weight: Any


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def _sharded(rank: int, *, is_filled: bool) -> DTensor:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    rows = torch.full((2, 3), float(rank + 1)) if is_filled else torch.zeros(2, 3)
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)


def _in_containers(rank: int, *, is_filled: bool) -> dict[str, Any]:
    part = _sharded(rank, is_filled=is_filled)
    number = 5 if is_filled else 0
    return {"tuple": (part, number), "list": [(part, {"a": number}), number], "mapping": ({"a": part},)}


def _back_from_containers(rank: int, url: str) -> None:
    save(url, _in_containers(rank, is_filled=True), step=1)
    state = _in_containers(rank, is_filled=False)
    load(url, state)
    parts = (state["tuple"][0], state["list"][0][0], state["mapping"][0]["a"])
    assert [part.to_local().tolist() for part in parts] == [[[rank + 1.0] * 3] * 2] * 3
    assert (state["tuple"][1], state["list"][0][1], state["list"][1]) == (5, {"a": 5}, 5)


def test_parts_in_containers_come_back_whole(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_back_from_containers, str(tmp_path))
    whole = torch.tensor([[1.0] * 3] * 2 + [[2.0] * 3] * 2)
    found = open_checkpoint(str(tmp_path)).read_all()
    assert torch.equal(found["list"][0][0], whole)
    assert torch.equal(found["mapping"][0]["a"], whole)


def _refusals(_rank: int, url: str) -> list[str]:
    part, array = (
        _sharded(0, is_filled=True),
        np.empty(1, dtype=object),
    )  # equal parts, which no comparison would notice
    array[0] = part
    said = []
    for value in (Holder(part), collections.deque([part]), array):
        with pytest.raises(SaveError) as caught:
            save(url, {"x": value, "w": torch.ones(2)}, step=1)
        said.append(str(caught.value))
    return said


def test_parts_in_objects_are_refused_by_name(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_refusals, str(tmp_path)):
        for kind, text in zip(("Holder", "deque", "ndarray"), said, strict=True):
            assert f"x: a {kind} holds a DTensor, of which each rank has a part" in text
    assert not list(tmp_path.glob("*/COMMIT.json"))


def _sets(_rank: int, url: str) -> set[str]:
    save(url, {"names": {f"name {n}" for n in range(50)}}, step=1)
    state: dict[str, Any] = {"names": set()}
    load(url, state, policy=LoadPolicy(broadcast=True))
    names: set[str] = state["names"]
    return names


def test_a_state_of_values_alone_is_loaded_by_all(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_sets, str(tmp_path)) == [{f"name {n}" for n in range(50)}] * 2
