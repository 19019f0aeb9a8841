"""One rank that fails inside a save: every rank raises at once, nothing is lost, the next save works."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import StoreError, TitanError
from titan_ckpt.loading import meeting
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.saving import saver as saver_module
from titan_ckpt.saving import staging
from titan_ckpt.saving.apart import uploader as uploader_module
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver
from titan_ckpt.state import exchange
from titan_ckpt.store.local import FileStore
from tools.faults.lived_time import lived_s
from tools.faults.one_rank import OneRankCase, points_of, run_case
from tools.rank_pool import RankPool

pytestmark = pytest.mark.dist
MOST_S = 10.0  # of `lived_s`


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.parametrize(("kind", "rank"), [("sync", 0), ("async", 1), ("codec", 0), ("mirror", 1)])
def test_a_fault_in_any_function_of_a_save_leaves_none_waiting(
    pool: RankPool, tmp_path: Path, kind: str, rank: int
) -> None:
    points = points_of(pool, tmp_path / "count", kind, rank)
    assert len(points) > 50, points
    rng = random.Random(f"{kind}-{rank}")
    hits = 0
    for number, point in enumerate(rng.sample(points, 6)):
        case = OneRankCase(kind=kind, rank=rank, point=point, error=rng.randrange(4))
        found, seen, longest = run_case(pool, tmp_path / f"{number}", case)
        assert found == []
        assert longest < MOST_S
        hits += seen.is_hit
    assert hits > 3  # the others are only called once for a shape, or when a thread comes late


class LogRecords(logging.Handler):
    """The texts of what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text."""
        self.texts.append(record.getMessage())


class Unpicklable:
    """What a state must not hold."""

    def __reduce__(self) -> Any:
        raise RuntimeError("a handle of this process")


class BadMapping(dict[str, Any]):
    """A state that raises while it is read."""

    def items(self) -> Any:
        raise MemoryError("no room for the state dict")


class BadTextError(Exception):
    """An error whose own text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def _break_state(what: str, state: dict[str, Any]) -> dict[str, Any]:
    if what == "value":
        return {**state, "handle": Unpicklable()}
    if what == "mapping":
        return BadMapping(state)
    return state


def _raise(error: BaseException) -> Callable[..., Any]:
    def action(*_: Any, **__: Any) -> Any:
        raise error

    return action


PATCHES: dict[str, tuple[Any, str, BaseException]] = {
    "arena": (staging, "Arena", MemoryError("no memory for staging")),
    "interrupt": (saver_module, "prepare", KeyboardInterrupt()),
    "upload": (uploader_module, "upload", BadTextError()),
    "copies": (staging, "digest", RuntimeError("a digest that fails")),
}


def _one_bad_save(rank: int, url: str, what: str, is_async: bool) -> tuple[str, float, list[int]]:
    """Save step 1, fail step 2 on rank 1, save step 3: what step 2 raised, how long it took, the committed steps."""
    state = {"model": {"w": torch.arange(8.0)}, "note": "n"}
    with Saver(url, SaveOptions(timeout_s=60)) as saver:
        saver.save(state, step=1).wait()
        started = lived_s()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and what in PATCHES:
                owner, name, error = PATCHES[what]
                patch.setattr(owner, name, _raise(error))
                saver._staging._arena = None
            try:
                mine = _break_state(what, state) if rank == 1 else state
                if is_async:
                    saver.save(mine, step=2).wait()
                else:
                    saver.save_now(mine, step=2)
                raised = ""
            except BaseException as error:  # noqa: BLE001  (KeyboardInterrupt is one of them)
                raised = f"{type(error).__name__}: {error!r}"
        seconds = lived_s() - started
        saver.save(state, step=3).wait()
    return raised, seconds, [open_checkpoint(f"{url}@{step}").step for step in (1, 3)]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("what", ["value", "mapping", "interrupt", "upload", "copies", "arena"])
def test_one_bad_rank_raises_on_all_and_the_next_save_works(
    pool: RankPool, tmp_path: Path, what: str, is_async: bool
) -> None:
    if what == "arena" and not is_async:
        return
    answers = pool.run(_one_bad_save, f"{tmp_path}/run", what, is_async)
    for rank, (raised, seconds, steps) in enumerate(answers):
        assert raised, f"rank {rank} did not raise"
        assert seconds < MOST_S
        assert steps == [1, 3]
    assert "rank 1" in answers[0][0]
    assert answers[1][0].startswith("KeyboardInterrupt") == (what == "interrupt")


def _save_plain(rank: int, url: str, what: str, replicas: str) -> str:
    """Save a state that differs on rank 1 in one element, or not."""
    weight = torch.arange(20.0).reshape(4, 5)
    if what == "dtensor":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
        weight = distribute_tensor(weight, mesh, [Replicate()])
    state = {"w": weight, "counter": torch.tensor(7), f"rng.{rank}": torch.tensor([rank])}
    if rank == 1 and what != "equal":
        held = weight.to_local() if isinstance(weight, DTensor) else weight
        held[3, 4] += 1
    try:
        with Saver(url, SaveOptions(replicas=replicas, timeout_s=60)) as saver:
            saver.save(state, step=1).wait()
    except Exception as error:  # noqa: BLE001  (compared by the test)
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["equal", "plain", "dtensor"])
def test_a_copy_that_differs_between_ranks_is_not_saved(pool: RankPool, tmp_path: Path, what: str) -> None:
    answers = pool.run(_save_plain, f"{tmp_path}/run", what, "equal")
    if what == "equal":
        assert answers == ["", ""]
        return
    for text in answers:
        assert "w: the copy on rank 1 differs from the one on rank 0" in text


def test_the_first_ranks_copy_is_saved_on_request(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_save_plain, f"{tmp_path}/run", "plain", "first") == ["", ""]
    checkpoint = open_checkpoint(f"{tmp_path}/run")
    assert torch.equal(checkpoint.read("w"), torch.arange(20.0).reshape(4, 5))
    assert [checkpoint.read(f"rng.{rank}").item() for rank in (0, 1)] == [0, 1]


def _own_value(rank: int, url: str) -> list[int]:
    """Save and load a value of each rank's own beside one that they share."""
    with Saver(url, SaveOptions(timeout_s=60)) as saver:
        saver.save({"model": {"w": torch.ones(3)}, f"rng_{rank}": torch.tensor([rank + 7])}, step=1).wait()
    dist.barrier()
    state: dict[str, Any] = {"model": {"w": torch.zeros(3)}, f"rng_{rank}": torch.tensor([0])}
    load(url, state)
    return [int(state[f"rng_{rank}"]), int(state["model"]["w"].sum())]


def test_a_value_of_each_ranks_own_comes_back(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_own_value, f"{tmp_path}/run") == [[7, 3], [8, 3]]


def _load_on_one_bad_rank(rank: int, url: str, how: str) -> tuple[str, float, list[float]]:
    """Load a sharded state that only rank 1 has a name too many for, or whose bytes rank 1 cannot read."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    state: dict[str, Any] = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    with Saver(url, SaveOptions(timeout_s=60)) as saver:
        saver.save(state, step=1).wait()
    dist.barrier()
    target: dict[str, Any] = {"w": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
    policy = LoadPolicy(broadcast=how == "broadcast")
    started, raised = lived_s(), ""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and how == "contract":
            target["more"] = torch.zeros(2)
        if rank == 1 and how != "contract":
            patch.setattr(FileStore, "read_into", _raise(StoreError("a disk that fails")))
        try:
            load(url, target, policy=policy)
        except Exception as error:  # noqa: BLE001  (compared by the test)
            raised = f"{type(error).__name__}: {error}"
    return raised, lived_s() - started, target["w"].to_local().tolist()


@pytest.mark.parametrize("how", ["contract", "read", "broadcast"])
def test_a_rank_that_cannot_load_raises_on_all(pool: RankPool, tmp_path: Path, how: str) -> None:
    answers = pool.run(_load_on_one_bad_rank, f"{tmp_path}/run", how)
    outcome = (
        "nothing was loaded"
        if how == "contract"
        else "some tensors are not loaded: load again before you use the state"
    )
    assert answers[0][0].startswith(f"CheckpointError: {outcome}, since rank 1 failed")
    assert how != "contract" or answers[0][2] == [0.0] * 4  # no rank fills before all have checked
    assert answers[1][0].startswith("LoadContractError" if how == "contract" else "StoreError")
    assert max(seconds for _, seconds, _ in answers) < MOST_S


def _load_another_kind(rank: int, url: str, kind: str) -> list[tuple[str, float]]:
    """Rank 1 loads what has no part in the mesh that rank 0 waits for; then both load."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    with Saver(url, SaveOptions(timeout_s=60)) as saver:
        saver.save({"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}, step=1).wait()
    dist.barrier()
    state: dict[str, Any] = {"w": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
    other: Any = {"shape": {"w": torch.zeros(9)}, "none": None, "missing": {"w": torch.zeros(8), "x": 1}}[kind]
    found = []
    for given in (other if rank == 1 else state, state):
        started = lived_s()
        try:
            load(url, given)
            found.append((str(float(state["w"].to_local().sum())), lived_s() - started))
        except TitanError as error:
            found.append((f"{type(error).__name__}: {error}", lived_s() - started))
    return found


@pytest.mark.parametrize("kind", ["shape", "none", "missing"])
def test_a_rank_that_fails_before_it_meets_raises_on_all(pool: RankPool, tmp_path: Path, kind: str) -> None:
    answers = pool.run(_load_another_kind, f"{tmp_path}/run", kind)
    assert answers[0][0][0].startswith("CheckpointError: nothing was loaded, since rank 1 failed")
    assert answers[1][0][0].startswith("UsageError" if kind == "none" else "LoadContractError")
    assert [answer[1][0] for answer in answers] == ["6.0", "22.0"]
    assert max(seconds for answer in answers for _, seconds in answer) < MOST_S


def _load_alone(rank: int, url: str, how: str) -> tuple[list[float], list[str], float, float]:
    """Rank 0 loads a sharded state while rank 1 is in a collective of its own, then both load, then rank 1 alone cannot."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    with Saver(url, SaveOptions(timeout_s=60)) as saver:
        saver.save({"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}, step=1).wait()
    dist.barrier()
    state: dict[str, Any] = {"w": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
    found, total, started = [], torch.tensor([rank + 1.0]), lived_s()
    logger, handler = logging.getLogger("titan_ckpt.loading.meeting"), LogRecords()
    logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "PATIENCE_S", 0.3 if how == "waits" else 60.0)
        if rank == 0:
            load(url, state, policy=LoadPolicy(together=how == "waits"))
        dist.all_reduce(total, group=mesh.get_group())  # where the rank that does not load is meanwhile
        patch.setattr(meeting, "PATIENCE_S", 60.0)
        load(url, state)
        found.append(float(state["w"].to_local().sum()))
        if rank == 1:
            state["more"] = torch.zeros(1)
        try:
            load(url, state)
        except TitanError as error:
            handler.texts.append(f"{type(error).__name__}: {error}")
    logger.removeHandler(handler)
    return found, handler.texts, total.item(), lived_s() - started


@pytest.mark.parametrize("how", ["waits", "alone"])
def test_a_rank_may_load_alone_and_all_together_after(pool: RankPool, tmp_path: Path, how: str) -> None:
    answers = pool.run(_load_alone, f"{tmp_path}/run", how)
    assert max(answer[3] for answer in answers) < MOST_S
    assert [answer[0] for answer in answers] == [[6.0], [22.0]]
    assert [answer[2] for answer in answers] == [3.0, 3.0]
    warned = [text for text in answers[0][1] if "did not begin to load" in text]
    assert len(warned) == (how == "waits")
    assert all("1 of the 2 ranks" in text and "(1)" in text for text in warned)
    assert answers[0][1][-1].startswith("CheckpointError: nothing was loaded, since rank 1 failed")
    assert answers[1][1] == [answers[1][1][-1]]
    assert answers[1][1][-1].startswith("LoadContractError")


def _open_on_one_bad_rank(rank: int, url: str) -> tuple[str, float]:
    started = lived_s()
    try:
        Saver(url if rank == 0 else "nowhere://x", SaveOptions(timeout_s=60))
    except Exception as error:  # noqa: BLE001  (compared by the test)
        return type(error).__name__, lived_s() - started
    return "", 0.0


def test_a_store_that_one_rank_cannot_open_raises_on_all(pool: RankPool, tmp_path: Path) -> None:
    answers = pool.run(_open_on_one_bad_rank, f"{tmp_path}/run")
    assert answers[0][0] == "SaveError"
    assert answers[1][0] not in ("", "SaveError")
    assert max(seconds for _, seconds in answers) < MOST_S
    assert threading.active_count() < 50


def _one_leaves(rank: int, folder: str) -> None:
    """Ranks 0 and 1 save when rank 2 is gone, and stay where they are."""
    saver = Saver(f"{folder}/run", SaveOptions(timeout_s=60))
    saver.save({"w": torch.arange(8.0)}, step=1).wait()
    if rank == 2:
        os._exit(3)
    found = []
    for step in (2, 3):
        started = lived_s()
        with pytest.raises(SaveError) as raised:
            saver.save({"w": torch.arange(8.0)}, step=step).wait()
        found.append([str(raised.value), lived_s() - started])
    saver.close()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))


def test_ranks_do_not_wait_for_one_that_is_gone(tmp_path: Path) -> None:
    with RankPool(3) as ranks:
        with pytest.raises(EOFError):  # rank 2 cannot answer
            ranks.run(_one_leaves, str(tmp_path))
        for rank in (0, 1):
            for text, seconds in json.loads((tmp_path / f"{rank}.json").read_text()):
                assert text.startswith(f"rank {rank} has lost other ranks of the job")
                assert "restart the job" in text
                assert seconds < MOST_S
    assert open_checkpoint(f"{tmp_path}/run").step == 1


def _one_never_comes(rank: int, url: str) -> tuple[str, list[str]]:
    """Rank 0 saves alone, rank 1 does not; then both do."""
    logger, handler, text = logging.getLogger("titan_ckpt.state.exchange"), LogRecords(), ""
    logger.addHandler(handler)
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "PATIENCE_S", 0.1)
            with pytest.raises(SaveError) as raised:
                Saver(url, SaveOptions(timeout_s=0.5))
        text = str(raised.value)
    dist.barrier()
    with Saver(url, SaveOptions(timeout_s=60)) as saver:
        saver.save({"w": torch.arange(8.0)}, step=1).wait()
    logger.removeHandler(handler)
    return text, handler.texts


def test_a_rank_that_does_not_save_is_named(pool: RankPool, tmp_path: Path) -> None:
    text, logged = pool.run(_one_never_comes, f"{tmp_path}/run")[0]
    assert "1 of 2 ranks have not begun to save" in text
    assert "(rank 1)" in text
    assert any("are they slow, or gone?" in line for line in logged)
    assert open_checkpoint(f"{tmp_path}/run").step == 1
