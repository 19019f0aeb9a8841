"""A state on two ranks: each has a part of it, and both hear of what cannot be saved."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.dcp.storage import StorageReader, StorageWriter
from titan_ckpt.errors import UsageError
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.saving.saver import SaveError, save
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
    states: tuple[Any, Any] = ({"a": {"thing": "".join}}, {"a": {"thing": 1}})
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


def _fsdp1(seed: int, width: int) -> dict[str, Any]:
    """A model of FSDP1 and its optimizer after a step, as a sharded state dict; a layer of width 1 is on one rank alone."""
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    model = FullyShardedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, width)),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        return {"model": model.state_dict(), "optimizer": moments}


def _shards(state: Any) -> Any:
    if isinstance(state, ShardedTensor):
        return [(shard.metadata.shard_offsets, shard.tensor.tolist()) for shard in state.local_shards()]
    if isinstance(state, dict):
        return {key: _shards(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


def _through_fsdp1(_rank: int, folder: str) -> list[bool]:
    """Whether all comes back; DCP's own load fails where a rank holds nothing of a tensor (torch 2.13)."""
    equal = []
    readers: list[tuple[int, list[Any]]] = [(1, [load]), (3, [load, _load_by_dcp])]
    for width, reads in readers:
        old = _fsdp1(1, width)
        save(f"{folder}/ours", old, step=width)
        dcp.save(old, storage_writer=StorageWriter(f"{folder}/theirs@{width}"))
        for run in ("ours", "theirs"):
            for read in reads:
                new = _fsdp1(2, width)
                different = _shards(new) != _shards(old)
                read(f"{folder}/{run}@{width}", new)
                equal.append(different and _shards(new) == _shards(old))
    found = load_sharded_optimizer_state_dict(old["model"], "optimizer", StorageReader(f"{folder}/ours"))
    return [*equal, _shards(found["optimizer"]) == _shards(old["optimizer"])]


def _load_by_dcp(url: str, state: dict[str, Any]) -> None:
    dcp.load(state, checkpoint_id=url.replace("@", "/step-0000000"))


def test_shards_of_fsdp1_come_back_through_us_and_dcp(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_through_fsdp1, str(tmp_path)) == [[True] * 7] * 2
    model = open_checkpoint(f"{tmp_path}/ours@1").read_all("model")
    assert {name: tuple(value.shape) for name, value in model.items()} == {
        "0.weight": (7, 5), "0.bias": (7,), "1.weight": (1, 7), "1.bias": (1,),
    }  # fmt: skip


def _alone(rank: int, url: str) -> list[str]:
    found = []
    options: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"use_collectives": False}, {}),
        ({}, {}),
        ({}, {"overwrite": False}),
    ]
    for how, writer in options:
        try:
            dcp.save({f"rank {rank}": torch.ones(2)}, storage_writer=StorageWriter(url, **writer), **how)
            found.append("")
        except (UsageError, dcp.CheckpointException) as error:
            found.append(str(error).strip().rpartition("\n")[2])
    return found


def test_ranks_that_save_for_themselves_or_again_are_refused(pool: RankPool, tmp_path: Path) -> None:
    for alone, together, again in pool.run(_alone, f"{tmp_path}@1"):
        assert "use_collectives=False each rank saves for itself" in alone
        assert together == ""
        assert "Checkpoint already exists, and overwrite=False" in again
    assert sorted(open_checkpoint(str(tmp_path)).read_all()) == ["rank 0", "rank 1"]


@dataclasses.dataclass
class Holder:
    """Holds what each rank has a part of."""

    weight: Any


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
