"""A state on two ranks: each has a part of it, and both hear of what cannot be saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.loading.load import load
from titan_ckpt.saving.saver import save
from tools.rank_pool import RankPool

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def _job(steps: int) -> dict[str, Any]:
    torch.manual_seed(steps)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
    job = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    for _ in range(steps):
        _train(job)
    return job


def _train(job: dict[str, Any]) -> float:
    job["optimizer"].zero_grad()
    loss = job["model"](torch.ones(2, 5)).square().sum()
    loss.backward()
    job["optimizer"].step()
    return float(loss.detach())


def _goes_on(_rank: int, url: str) -> tuple[list[float], list[float]]:
    old = _job(3)
    save(url, old, step=3)
    new = _job(0)
    load(url, new)
    return [_train(old) for _ in range(3)], [_train(new) for _ in range(3)]


def test_a_sharded_optimizer_without_moments_gets_its_shards(pool: RankPool, tmp_path: Path) -> None:
    for old, new in pool.run(_goes_on, str(tmp_path)):
        assert old == new
    state = open_checkpoint(str(tmp_path)).read_all("optimizer")
    assert [tuple(state["state"][n]["exp_avg"].shape) for n in range(4)] == [(3, 5), (3,), (5, 3), (5,)]


def _stages(rank: int, url: str) -> Any:
    save(url, {"layers": {rank: {"w": torch.full((2,), rank)}}, "lists": [{"a": 1}, {f"r{rank}": [rank]}]}, step=1)


def test_parts_of_a_state_on_several_ranks_are_one_state(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_stages, str(tmp_path))
    found = open_checkpoint(str(tmp_path)).read_all()
    assert found["lists"] == [{"a": 1}, {"r0": [0], "r1": [1]}]
    assert {number: layer["w"].tolist() for number, layer in found["layers"].items()} == {0: [0, 0], 1: [1, 1]}


def _refused(rank: int, url: str) -> str:
    states: tuple[Any, Any] = ({"a": {"thing": print}}, {"a": {"thing": 1}})
    with pytest.raises(Exception, match=r"a\.thing: a builtin_function_or_method is not saved") as raised:
        save(url, states[rank], step=1)
    return type(raised.value).__name__


def test_every_rank_hears_what_is_refused_and_nothing_is_there(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_refused, str(tmp_path)) == ["SaveError", "SaveError"]
    assert not list(tmp_path.glob("step*/*"))


def _clash(rank: int, url: str) -> None:
    states: tuple[Any, Any] = ({"a": {"b": 1}}, {"a.b": 1})
    with pytest.raises(Exception, match=r"two entries for 'a\.b'"):
        save(url, states[rank], step=1)


def test_names_that_clash_between_ranks_are_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_clash, str(tmp_path))
    assert not list(tmp_path.glob("step*/*"))
