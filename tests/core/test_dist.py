"""Save and load on real ranks: all DTensor placements, resharding between any meshes, errors that reach every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titan_ckpt.dcp.storage import StorageReader, StorageWriter
from titan_ckpt.errors import NotCommittedError, TitanError
from titan_ckpt.loading.load import LoadPolicy, load, open_checkpoint
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver, save
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import shard_box
from titan_ckpt.state.state_dict import detached_shard
from titan_ckpt.store.local import FileStore
from tools.rank_pool import RankPool

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


class Block(torch.nn.Module):
    """Two linear layers whose sizes are not divisible by any mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(7, 10)
        self.down = torch.nn.Linear(10, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


def _whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: p.detach().clone() for name, p in Block().named_parameters()}


def _fsdp_over_tp(_rank: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(1)
    block = Block()
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp_shard"])
    return dict(block.state_dict())


def _save_fsdp_tp(rank: int, url: str) -> list[Any]:
    state = _fsdp_over_tp(rank)
    with Saver(url, SaveOptions(mesh=MeshSpec.parse("dp_shard=2,tp=2"), timeout_s=60)) as saver:
        saver.save({"model": state, "lr": 0.5}, step=3).wait()
    manifest = open_checkpoint(url).manifest
    boxes = []
    for name, tensor in state.items():
        entry = manifest.by_fqn[f"model.{name}"]
        assert entry.placements is not None
        box = shard_box(entry.global_shape, entry.placements, MeshSpec.parse("dp_shard=2,tp=2"), rank)
        assert isinstance(tensor, DTensor)
        boxes.append((name, box.sizes, tuple(tensor.to_local().shape)))
    return boxes


def _load_on_other_meshes(_rank: int, url: str) -> None:
    expected = _whole()
    for shape, names, placements in (
        ((4,), ("dp_shard",), [Shard(0)]),
        ((2, 2), ("dp_replicate", "dp_shard"), [Replicate(), Shard(0)]),
        ((2, 2), ("dp_shard", "tp"), [Shard(0), Shard(0)]),
        ((4,), ("tp",), [Shard(-1)]),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        state = {name: distribute_tensor(torch.zeros_like(whole), mesh, placements) for name, whole in expected.items()}
        report = load(url, {"model": state, "lr": 0.0})
        assert report.objects == {"lr": 0.5}
        for name, whole in expected.items():
            assert torch.equal(state[name].full_tensor(), whole), (shape, name)


def test_fsdp_over_tp_records_its_cut_and_loads_on_any_mesh(pool: RankPool, tmp_path: Path) -> None:
    for boxes in pool.run(_save_fsdp_tp, str(tmp_path)):
        assert all(recorded == held for _, recorded, held in boxes), boxes
    pool.run(_load_on_other_meshes, str(tmp_path))
    plain: dict[str, Any] = {"model": {name: torch.zeros_like(t) for name, t in _whole().items()}}
    dcp.load(plain, checkpoint_id=tmp_path / "step-00000003")
    assert all(torch.equal(plain["model"][name], whole) for name, whole in _whole().items())


def _save_replicated(_rank: int, url: str) -> int:
    state = {f"w{i}": torch.full((1000 + i,), float(i)) for i in range(8)}
    with Saver(url, SaveOptions(timeout_s=60)) as saver:
        return saver.save(state, step=1).wait().written_bytes


def test_replicated_tensors_are_written_once_and_spread_evenly(pool: RankPool, tmp_path: Path) -> None:
    written = pool.run(_save_replicated, str(tmp_path))
    assert max(written) <= 1.1 * min(written)
    assert sum(written) < 8 * 1010 * 4 * 1.3


class FailingStore(FileStore):
    """Fails every write of one rank's data file, like a full disk."""

    def write(self, path: str, parts: Any) -> Any:
        if path.endswith("__2_0.distcp") and int(os.environ["RANK"]) == 2 and "step-00000002" in path:
            raise OSError(28, "No space left on device")
        return super().write(path, parts)


def _save_with_a_failing_rank(_rank: int, url: str) -> str:
    state = {"w": distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Shard(0)])}
    message = ""
    with Saver(FailingStore(url), SaveOptions(timeout_s=60)) as saver:
        saver.save(state, step=1)
        saver.save(state, step=2)
        try:
            saver.wait()
        except (SaveError, OSError) as error:
            message = str(error)
        saver.save(state, step=3).wait()
    return message


def test_a_failed_rank_raises_on_all_and_commits_nothing(pool: RankPool, tmp_path: Path) -> None:
    for rank, message in enumerate(pool.run(_save_with_a_failing_rank, str(tmp_path))):
        assert "No space left on device" in message.splitlines()[0], rank
    with pytest.raises(NotCommittedError, match="committed steps: 1, 3"):
        open_checkpoint(str(tmp_path), step=2)
    assert open_checkpoint(str(tmp_path)).step == 3


def _save_disagreeing(rank: int, url: str, what: str) -> str:
    shape = (3, rank + 1) if what == "shape" else (3,)
    state: dict[str, Any] = {"w": torch.zeros(shape), "value": rank if what == "value" else 0}
    try:
        with Saver(url, SaveOptions(timeout_s=60)) as saver:
            saver.save(state, step=1).wait()
    except SaveError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["shape", "value"])
def test_ranks_that_disagree_are_named(pool: RankPool, tmp_path: Path, what: str) -> None:
    for message in pool.run(_save_disagreeing, str(tmp_path), what):
        assert "rank 0" in message
        assert "rank 1" in message


def _load_partial_state(rank: int, url: str) -> list[str]:
    if rank:
        return []
    state: dict[str, Any] = {"model": {"up.weight": torch.zeros(10, 7, dtype=torch.float64), "new": torch.zeros(2)}}
    report = load(url, state, policy=LoadPolicy(missing="allow", extra="allow", cast="allow"))
    assert torch.equal(state["model"]["up.weight"].float(), _whole()["up.weight"])
    return [*report.missing, *report.cast]


def test_the_report_names_what_was_missing_and_cast(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_fsdp_tp, str(tmp_path))
    assert pool.run(_load_partial_state, str(tmp_path))[0] == ["model.new", "model.up.weight"]


def _save_through_two_tiers(rank: int, fast: str, safe: str) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    options = SaveOptions(
        mesh=MeshSpec.parse("dp_shard=4"), mirror=safe, incremental=True, codec="planes-zstd", timeout_s=60
    )
    state = {"w": distribute_tensor(torch.arange(4000.0), mesh, [Shard(0)]), "frozen": torch.ones(5000)}
    with Saver(fast, options) as saver:
        for step in (1, 2):
            saver.save(state, step=step)
            if rank == 1:
                detached_shard(state["w"]).add_(1)


def test_every_rank_mirrors_its_own_files_and_the_copy_is_whole(pool: RankPool, tmp_path: Path) -> None:
    fast, safe = str(tmp_path / "fast"), str(tmp_path / "safe")
    pool.run(_save_through_two_tiers, fast, safe)
    expected = torch.arange(4000.0)
    expected[1000:2000] += 1
    for url in (fast, safe):
        checkpoint = open_checkpoint(url)
        assert checkpoint.step == 2
        assert torch.equal(checkpoint.read("w"), expected)
        own = [file for file in checkpoint.manifest.files if not file.path.startswith("../")]
        assert [file.path.rpartition("/")[2] for file in own] == ["__1_0.distcp"]


def _load_with_broadcast(_rank: int, url: str) -> tuple[int, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    state = {
        name: distribute_tensor(torch.zeros_like(whole), mesh, [Replicate(), Shard(0)])
        for name, whole in _whole().items()
    }
    try:
        report = load(url, {"model": state, "lr": 0.0}, policy=LoadPolicy(broadcast=True))
    except TitanError as error:
        return 0, f"{type(error).__name__}: {error}"
    for name, whole in _whole().items():
        assert torch.equal(state[name].full_tensor(), whole)
    return report.fetched_bytes, ""


def test_with_broadcast_the_replicas_share_the_reading(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_fsdp_tp, str(tmp_path))
    fetched = [result[0] for result in pool.run(_load_with_broadcast, str(tmp_path))]
    assert sum(fetched) == sum(whole.nbytes for whole in _whole().values())
    assert min(fetched) > 0


def test_with_broadcast_a_readers_error_reaches_its_replicas(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_fsdp_tp, str(tmp_path))
    for path in (tmp_path / "step-00000003").glob("a-*/*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    for _, message in pool.run(_load_with_broadcast, str(tmp_path)):
        assert "not what was saved" in message


_CUTS: dict[str, tuple[tuple[int, int], list[Any]]] = {
    "rows": ((1, 4), [Replicate(), Shard(0)]),
    "columns": ((1, 4), [Replicate(), Shard(1)]),
    "rows, columns": ((2, 2), [Shard(0), Shard(1)]),
    "columns, rows": ((2, 2), [Shard(1), Shard(0)]),
    "rows twice": ((2, 2), [Shard(0), Shard(0)]),
    "columns, copies": ((2, 2), [Replicate(), Shard(1)]),
    "copies": ((2, 2), [Replicate(), Replicate()]),
}


def _cut_in_every_way(meshes: dict[tuple[int, int], Any], *, is_filled: bool) -> dict[str, DTensor]:
    """Tensors of even, uneven, small and empty shapes, cut in each way."""
    found = {}
    for name, (degrees, placements) in _CUTS.items():
        for shape in [(8, 8), (7, 5), (3, 2), (1, 9), (0, 4)]:
            count = torch.Size(shape).numel()
            whole = (torch.arange(1.0, count + 1) if is_filled else torch.zeros(count)).reshape(shape)
            found[f"{name} {shape}"] = distribute_tensor(whole, meshes[degrees], placements)
    return found


def _through_every_way(_rank: int, folder: str) -> list[str]:
    """Names that differ after a save and a load, by us and by DCP, and why partial sums are refused."""
    meshes = {sizes: init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "tp")) for sizes in ((1, 4), (2, 2))}
    old = _cut_in_every_way(meshes, is_filled=True)
    save(f"{folder}/ours", old, step=1)
    dcp.save(old, storage_writer=StorageWriter(f"{folder}/writer@1"))
    loads: dict[str, Callable[[Any], object]] = {
        "load": lambda state: load(f"{folder}/ours", state),
        "broadcast": lambda state: load(f"{folder}/ours", state, policy=LoadPolicy(broadcast=True)),
        "of DCP's planner": lambda state: load(f"{folder}/writer", state),
        "dcp.load": lambda state: dcp.load(state, checkpoint_id=f"{folder}/ours/step-00000001"),
        "our reader": lambda state: dcp.load(state, storage_reader=StorageReader(f"{folder}/ours")),
    }
    different = []
    for how, fill in loads.items():
        new = _cut_in_every_way(meshes, is_filled=False)
        fill(new)
        different += [f"{how}: {name}" for name in old if not torch.equal(old[name].to_local(), new[name].to_local())]
    sums = DTensor.from_local(torch.ones(3), meshes[1, 4], [Replicate(), Partial()])
    with pytest.raises(TitanError, match=r"m\.g: placement .*Partial.* holds partial sums"):
        save(f"{folder}/sums", {"m": {"g": sums}}, step=1)
    return different


def test_every_cut_comes_back_by_every_way(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_through_every_way, str(tmp_path)) == [[]] * 4
