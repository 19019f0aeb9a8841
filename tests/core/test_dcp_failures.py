"""DCP through our storage on two ranks: an error on one reaches both at once, and a cast that loses values is named."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.dcp import storage
from titan_ckpt.dcp.storage import StorageReader, StorageWriter
from titan_ckpt.errors import DamagedError, StoreError
from titan_ckpt.loading.policy import LoadPolicy
from titan_ckpt.loading.read_plan import ReadPlan
from titan_ckpt.saving.saver import SaveOptions, Saver, save
from tools.rank_pool import RankPool

MOST_S = 25.0


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def _raise(*_: Any, **__: Any) -> Any:
    raise StoreError("a disk that fails")


class Handle:
    """A value that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("a handle of this process")


def _sharded(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    return {"w": distribute_tensor(torch.full((8,), value), mesh, [Shard(0)])}


def _outcome(action: Callable[[], object]) -> tuple[str, float]:
    started, text = time.monotonic(), ""
    try:
        action()
    except BaseException as error:  # noqa: BLE001  (CheckpointException derives from it)
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - started


SAVE_FAULTS = {
    "open": (storage, "open_store"),
    "before": (storage, "found_before"),
    "write": (storage, "upload"),
    "value": None,
}
LOAD_FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "open": (storage, "open_checkpoint", _raise),
    "read": (ReadPlan, "run", _raise),
    "newest": (storage, "open_checkpoint", lambda url, **_: open_checkpoint(f"{url}@1")),
}


def _save_on_one_bad_rank(rank: int, url: str, fault: str, bad: int) -> list[tuple[str, float]]:
    """Save step 1 with a fault on rank `bad`, then step 2; `value` is one that DCP cannot pickle."""
    state = _sharded(1.0)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        where = SAVE_FAULTS[fault]
        if rank == bad and where is not None:
            patch.setattr(*where, _raise)
        mine = {**state, "handle": Handle()} if rank == bad and where is None else state
        found = [_outcome(lambda: dcp.save(mine, storage_writer=StorageWriter(url), checkpoint_id=f"{url}@1"))]
    return [*found, _outcome(lambda: dcp.save(state, storage_writer=StorageWriter(url), checkpoint_id=f"{url}@2"))]


@pytest.mark.dist
@pytest.mark.parametrize(("fault", "bad"), [("open", 1), ("before", 0), ("write", 1), ("value", 1)])
def test_a_dcp_save_that_fails_on_one_rank_ends_on_all(pool: RankPool, tmp_path: Path, fault: str, bad: int) -> None:
    answers = pool.run(_save_on_one_bad_rank, str(tmp_path), fault, bad)
    for (first, seconds), (second, _) in answers:
        assert first.startswith("CheckpointException")
        assert ("a handle of this process" if fault == "value" else "a disk that fails") in first
        assert seconds < MOST_S
        assert second == ""
    assert [info.step for info in list_checkpoints(str(tmp_path)) if info.state == "committed"] == [2]


def _load_on_one_bad_rank(rank: int, url: str, fault: str) -> list[tuple[str, float]]:
    """Load with a fault on rank 1, then without. `newest`: rank 1 finds an older step than rank 0."""
    with Saver(url, SaveOptions(timeout_s=60)) as saver:
        for step in (1, 2):
            saver.save(_sharded(float(step)), step=step).wait()
    state = _sharded(0.0)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(*LOAD_FAULTS[fault])
        found = [_outcome(lambda: dcp.load(state, storage_reader=StorageReader(), checkpoint_id=url))]
    found.append(_outcome(lambda: dcp.load(state, storage_reader=StorageReader(url))))
    assert state["w"].to_local().tolist() == [2.0] * 4
    return found


@pytest.mark.dist
@pytest.mark.parametrize("fault", ["open", "read", "newest"])
def test_a_dcp_load_that_fails_on_one_rank_ends_on_all(pool: RankPool, tmp_path: Path, fault: str) -> None:
    answers = pool.run(_load_on_one_bad_rank, str(tmp_path), fault)
    for (first, seconds), (second, _) in answers:
        assert first.startswith("CheckpointException")
        assert ("the ranks found different checkpoints" if fault == "newest" else "a disk that fails") in first
        assert seconds < MOST_S
        assert second == ""


@pytest.mark.filterwarnings("ignore:.*torch.distributed is:UserWarning")
def test_a_cast_of_dcp_that_may_lose_values_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(
        str(tmp_path),
        {"big": torch.tensor([70001]), "same": torch.ones(2), "small": torch.tensor([7], dtype=torch.int8)},
        step=1,
    )
    state = {"big": torch.zeros(1, dtype=torch.float16), "same": torch.zeros(2), "small": torch.zeros(1)}
    reader = StorageReader(str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="titan_ckpt"):
        dcp.load(state, storage_reader=reader)
    assert len(caplog.messages) == 1
    assert "casts 1 tensors to dtypes that may not hold their values: big (int64 -> float16)" in caplog.messages[0]
    assert sorted(reader.report.cast) == ["big", "small"]
    kept = {name: torch.full_like(tensor, 3) for name, tensor in state.items() if name == "big"}
    with pytest.raises(CheckpointException, match="int64 -> float16 changes 1 of 1 values"):
        dcp.load(kept, storage_reader=StorageReader(str(tmp_path), policy=LoadPolicy(cast="allow")))
    assert kept["big"].tolist() == [3.0]


@pytest.mark.filterwarnings("ignore:.*torch.distributed is:UserWarning")
def test_a_damaged_chunk_ends_a_dcp_load(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.arange(100.0)}, step=1)
    (file,) = tmp_path.rglob("*.distcp")
    data = bytearray(file.read_bytes())
    data[-600] ^= 1
    checkpoint = open_checkpoint(str(tmp_path))
    (chunk,) = checkpoint.manifest.chunks_of(checkpoint.manifest.tensors[0])
    data[-600] ^= 1
    data[chunk.offset + chunk.payload_offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"w": torch.zeros(100)}, storage_reader=StorageReader(str(tmp_path)))
    ((error, _),) = raised.value.failures.values()
    assert isinstance(error, DamagedError)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage is deprecated")
def test_a_quantised_tensor_is_filled_in_place(tmp_path: Path) -> None:
    old, new = [torch.quantize_per_tensor(torch.full((2,), n), 0.1, 0, torch.qint8) for n in (1.0, 2.0)]
    dcp.save({"w": old, "v": torch.ones(2)}, storage_writer=StorageWriter(f"{tmp_path}@1"), no_dist=True)
    state = {"w": new, "v": torch.zeros(2)}
    dcp.load(state, storage_reader=StorageReader(str(tmp_path)))
    assert state["w"] is new
    assert torch.equal(new.int_repr(), old.int_repr())
    plain = {"w": torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), "v": torch.zeros(2)}
    dcp.load(plain, checkpoint_id=tmp_path / "step-00000001")
    assert torch.equal(plain["w"].int_repr(), old.int_repr())


@pytest.mark.parametrize("how", ["saver", "dcp"])
def test_expanded_tensors_are_named_once(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    state = {
        "wide": torch.ones(1, 4).expand(40, 4),
        "few": torch.ones(1, 4).expand(16, 4),
        "turned": torch.ones(50, 3).t(),
    }
    with caplog.at_level(logging.WARNING, logger="titan_ckpt.saving.staging"):
        if how == "saver":
            with Saver(str(tmp_path)) as saver:
                for step in (1, 2):
                    saver.save(state, step=step).wait()
        else:
            dcp.save(state, storage_writer=StorageWriter(f"{tmp_path}@1"), no_dist=True)
    assert caplog.messages == [
        "1 tensors repeat their memory and are stored with every element, as DCP does: wide (640 bytes, 16 in memory)"
    ]
    assert torch.equal(open_checkpoint(str(tmp_path)).read("wide"), torch.ones(40, 4))
