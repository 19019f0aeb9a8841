"""Hugging Face's Trainer on one and two ranks: a job that resumes goes on as one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.integrations.fsdp2 import shard
from tests.integrations.killed import kill_while_writing
from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.demo.s3_server import Server
from titan_ckpt.errors import UsageError
from titan_ckpt.integrations.libraries import not_importable
from titan_ckpt.integrations.transformers import TrainerCheckpoints
from titan_ckpt.saving.options import SaveOptions
from titan_ckpt.saving.saver import save
from tools.rank_pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.hf, pytest.mark.filterwarnings("ignore")]


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x}


class Net(nn.Module):
    def __init__(self, dropout: float, *, is_tied: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Linear(8, 8, bias=False))
        if is_tied:
            self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) - labels).square().mean()}


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        del args, control
        if logs and "loss" in logs:
            self.by_step[state.global_step] = logs["loss"]


class Fsdp2Trainer(Trainer):
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        shard(self.accelerator)
        self.is_fsdp_enabled = True


class Job:
    """A small model with dropout under AdamW and a schedule with warm-up; saves every step unless told otherwise."""

    def __init__(
        self, folder: str, kind: str = "ddp", *, dropout: float = 0.3, batch: int = 2,
        options: SaveOptions | None = None, url: str | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        AcceleratorState._reset_state(reset_partial_state=True)
        arguments: dict[str, Any] = {
            "output_dir": f"{folder}/output", "per_device_train_batch_size": batch, "max_steps": 6, "save_steps": 1,
            "logging_steps": 1, "logging_first_step": True, "use_cpu": True, "report_to": [], "disable_tqdm": True,
            "learning_rate": 1e-2, "warmup_steps": 2, "remove_unused_columns": False, **settings,
        }  # fmt: skip
        torch.manual_seed(1)
        make = Fsdp2Trainer if kind == "fsdp2" else Trainer
        self.losses = Losses()
        self.trainer = make(
            model=Net(dropout, is_tied=kind == "ddp"),
            args=TrainingArguments(**arguments),
            train_dataset=Samples(),
            eval_dataset=Samples(),
            callbacks=[self.losses],
        )
        self.checkpoints = TrainerCheckpoints(self.trainer, url or f"{folder}/run", options=options)

    def train(self, at: Any = None) -> dict[int, float]:
        self.trainer.train(resume_from_checkpoint=at)
        return self.losses.by_step


def _stopped_and_resumed(_rank: int, folder: str, kind: str, at: int) -> tuple[dict[int, float], dict[int, float]]:
    whole = Job(folder, kind).train()
    rest = Job(folder, kind).train(f"{folder}/run@{at}")
    return {step: whole[step] for step in range(at + 1, 7)} if whole else {}, rest


@pytest.mark.parametrize(("kind", "at"), [("ddp", 2), ("ddp", 3), ("fsdp2", 2)])
def test_a_resumed_trainer_goes_on_bit_for_bit(pair: RankPool, tmp_path: Path, kind: str, at: int) -> None:
    first, second = pair.run(_stopped_and_resumed, str(tmp_path), kind, at)
    assert first[0] == first[1] != {}
    assert second[0] == second[1]
    assert not [path for path in (tmp_path / "output").glob("**/*") if path.is_file()]
    placements = open_checkpoint(tmp_path / "run").manifest.by_fqn["model.layers.0.weight"]
    assert placements.num_chunks == (2 if kind == "fsdp2" else 1)


def _trained(_rank: int, folder: str) -> dict[int, float]:
    return Job(folder, "fsdp2", dropout=0.0).train()


def test_one_rank_takes_over_from_two_sharded_ones(pair: RankPool, tmp_path: Path) -> None:
    whole = pair.run(_trained, str(tmp_path))[0]
    refused = Job(str(tmp_path), "one", dropout=0.0)
    with pytest.raises(UsageError, match="4 samples per step on 2 ranks; this job has 2"):
        refused.train(3)
    rest = Job(str(tmp_path), "one", dropout=0.0, batch=4).train(3)
    assert rest == pytest.approx({step: whole[step] for step in (4, 5, 6)}, rel=1e-5)


def test_limit_best_model_and_history_are_kept(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "save_total_limit": 1, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1,
        "metric_for_best_model": "loss", "greater_is_better": True,
    }  # fmt: skip
    job = Job(str(tmp_path), batch=4, **settings)
    job.train()
    assert [info.step for info in list_checkpoints(tmp_path / "run")] == [1, 6]
    assert job.trainer.state.best_global_step == 1
    stored = open_checkpoint(tmp_path / "run", step=1).read("model.layers.0.weight")
    assert isinstance(job.trainer.model, Net)
    assert torch.equal(job.trainer.model.state_dict()["layers.0.weight"], stored)
    resumed = Job(str(tmp_path), batch=4, **{**settings, "max_steps": 7})
    resumed.train(True)
    evaluations = [entry["step"] for entry in resumed.trainer.state.log_history if "eval_loss" in entry]
    assert evaluations == [1, 2, 3, 4, 5, 6, 7]
    assert [info.step for info in list_checkpoints(tmp_path / "run")] == [1, 7]


def _trained_on_s3(_rank: int, folder: str, url: str) -> dict[int, float]:
    job = Job(folder, url=url)
    return job.train(job.checkpoints.newest())


@pytest.mark.s3
def test_a_trainer_killed_in_a_save_goes_on(s3_server: Server, s3_url: str, tmp_path: Path) -> None:
    kill_while_writing(s3_server, r"step-0*3/.*distcp", _trained_on_s3, str(tmp_path), s3_url)
    rest, whole = [_trained_on_s3(0, str(tmp_path), url) for url in (s3_url, f"{s3_url}-whole")]
    assert rest == {step: whole[step] for step in (3, 4, 5, 6)}
    assert verify(s3_url, read_data=True) == []


def test_newest_is_none_in_a_new_run_and_true_is_refused(tmp_path: Path) -> None:
    job = Job(str(tmp_path))
    assert job.checkpoints.newest() is None
    with pytest.raises(UsageError, match="no checkpoint to resume from"):
        job.train(True)


def test_a_failed_upload_ends_the_training(tmp_path: Path) -> None:
    job = Job(str(tmp_path))
    save(tmp_path / "run", {"w": torch.zeros(1)}, step=1)
    (tmp_path / "run" / "step-00000002").symlink_to(tmp_path)
    with pytest.raises(Exception, match=r"step.0*2"):
        job.train()


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", {"model": {"w": torch.zeros(2)}}, step=1)
    with pytest.raises(UsageError, match="saved by no loop"):
        Job(str(tmp_path)).train(1)
    with pytest.raises(UsageError, match="give a step of the run"):
        Job(str(tmp_path)).train(f"{tmp_path}/elsewhere@1")
    with pytest.raises(UsageError, match="save_only_model"):
        Job(str(tmp_path), save_only_model=True)


class Fault(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step == 3:
            raise RuntimeError("a fault of the user's code")


def test_a_fault_in_training_keeps_what_was_saved(tmp_path: Path) -> None:
    job = Job(str(tmp_path))
    job.trainer.add_callback(Fault())
    with pytest.raises(RuntimeError, match="a fault of the user's code"):
        job.train()
    assert job.checkpoints.newest() == f"{tmp_path}/run@3"


def test_a_missing_library_is_named_with_its_command() -> None:
    missing = ModuleNotFoundError("No module named 'lightning'", name="lightning")
    assert "pip install lightning" in str(not_importable("lightning", missing))
    other = ImportError("cannot import name 'Trainer' from 'lightning.pytorch'")
    assert "is installed, but cannot be imported" in str(not_importable("lightning", other))
