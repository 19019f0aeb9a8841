"""Lightning's loop, saved and resumed by our callback: one process, DDP, FSDP2. `make loops` installs lightning."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.killed import kill_while_writing
from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.demo.s3_server import Server
from titan_ckpt.errors import UsageError
from titan_ckpt.saving.saver import save
from tools.rank_pool import RankPool

lightning = pytest.importorskip("lightning", reason="lightning is not installed: make loops")

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]
BATCHES, LAST = 4, 9  # of an epoch; steps


class Net(lightning.LightningModule):  # type: ignore[name-defined,misc]
    """Dropout, a schedule, an own entry in the checkpoint; notes the loss and the sum of each batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        norm = nn.LayerNorm(8) if kind == "fsdp2" else nn.BatchNorm1d(8)
        self.net = nn.Sequential(nn.Linear(8, 8), norm, nn.Dropout(0.3), nn.Linear(8, 8))
        self.kind, self.seen, self.own = kind, dict[int, tuple[float, float]](), 0

    def configure_model(self) -> None:
        if self.kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, x: torch.Tensor, _number: int) -> Any:
        loss = (self.net(x) - x).square().mean()
        self.own += 1
        self.seen[self.global_step + 1] = (loss.item(), x.sum().item())
        return loss

    def validation_step(self, x: torch.Tensor, _number: int) -> None:
        self.net(x)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = self.own

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.own = checkpoint["own"]


def _fit(url: str, kind: str, *, ranks: int, step: int | None = None, batch: int = 4, **settings: Any) -> Net:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from titan_ckpt.integrations.lightning import TitanCheckpoint

    strategies: dict[str, Any] = {
        "one": "auto",
        "ddp": DDPStrategy(process_group_backend="gloo"),
        "fsdp2": ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
    }
    torch.manual_seed(1)
    samples: Any = torch.randn(4 * BATCHES, 8)
    train: Any = torch.utils.data.DataLoader(samples, batch_size=batch // ranks, shuffle=True)
    check: Any = torch.utils.data.DataLoader(samples[:4], batch_size=2)
    callback = TitanCheckpoint(url, every_n_train_steps=1, step=step)
    net = Net(kind)
    trainer = lightning.Trainer(
        max_steps=LAST, accelerator="cpu", devices=ranks, logger=False, callbacks=[callback], enable_progress_bar=False,
        enable_model_summary=False, strategy=strategies[kind], num_sanity_val_steps=0,
        plugins=[TorchElasticEnvironment()] if ranks > 1 else [], **settings,
    )  # fmt: skip
    trainer.fit(net, train, check if settings else None)
    return net


def _whole_and_rest(rank: int, folder: str, kind: str, at: int) -> tuple[dict[int, Any], dict[int, Any]]:
    whole = _fit(f"{folder}/run", kind, ranks=2).seen
    if rank == 0:
        shutil.copytree(f"{folder}/run", f"{folder}/copy")
    torch.distributed.barrier()
    rest = _fit(f"{folder}/copy", kind, ranks=2, step=at)
    assert rest.own == LAST
    return {step: whole[step] for step in rest.seen}, rest.seen


@pytest.mark.parametrize(("kind", "at"), [("ddp", 2), ("ddp", 4), ("fsdp2", 2)])
def test_ranks_go_on_bit_for_bit(pair: RankPool, tmp_path: Path, kind: str, at: int) -> None:
    for whole, rest in pair.run(_whole_and_rest, str(tmp_path), kind, at):
        assert whole == rest
        assert sorted(rest) == list(range(at + 1, LAST + 1))


def _trained_on_s3(_rank: int, url: str, environment: dict[str, str]) -> dict[int, Any]:
    os.environ.update(environment)
    return _fit(url, "ddp", ranks=2).seen


@pytest.mark.s3
def test_a_job_killed_in_a_save_goes_on(pair: RankPool, s3_server: Server, s3_url: str) -> None:
    kill_while_writing(s3_server, r"step-0*3/.*distcp", _trained_on_s3, s3_url, {}, num_ranks=2)
    rest = pair.run(_trained_on_s3, s3_url, s3_server.environment)
    whole = pair.run(_trained_on_s3, f"{s3_url}-whole", s3_server.environment)
    assert rest == [{step: each[step] for step in range(3, LAST + 1)} for each in whole]
    assert verify(s3_url, read_data=True) == []


@pytest.mark.parametrize("validation", [{}, {"val_check_interval": 2}], ids=["plain", "validated"])
def test_one_process_goes_on_from_any_step(tmp_path: Path, validation: dict[str, Any]) -> None:
    whole = _fit(str(tmp_path / "run"), "one", ranks=1, **validation).seen
    for at in range(1, LAST):
        shutil.copytree(tmp_path / "run", tmp_path / str(at))
        rest = _fit(str(tmp_path / str(at)), "one", ranks=1, step=at, **validation).seen
        assert rest == {step: whole[step] for step in range(at + 1, LAST + 1)}, at


def _ddp(_rank: int, url: str) -> None:
    _fit(url, "ddp", ranks=2)


def test_one_rank_takes_over_from_two(pair: RankPool, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    pair.run(_ddp, url)
    stored = open_checkpoint(url, step=3).read("model.net.0.weight")
    with pytest.raises(UsageError, match="4 batches in an epoch on 2 ranks, and this one has 8"):
        _fit(url, "one", ranks=1, step=3, batch=2)
    rest = _fit(url, "one", ranks=1, step=3)
    assert sorted(rest.seen) == list(range(4, LAST + 1))
    assert not torch.equal(rest.state_dict()["net.0.weight"], stored)


def test_a_new_job_resumes_from_the_newest_step(tmp_path: Path) -> None:
    _fit(str(tmp_path / "run"), "one", ranks=1)
    assert [info.step for info in list_checkpoints(tmp_path / "run")][-1] == LAST
    assert _fit(str(tmp_path / "run"), "one", ranks=1).seen == {}


def test_what_no_loop_saved_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", {"model": {"w": torch.zeros(2)}}, step=1)
    with pytest.raises(UsageError, match="saved by no loop"):
        _fit(str(tmp_path / "run"), "one", ranks=1)
