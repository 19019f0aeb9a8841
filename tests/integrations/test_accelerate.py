"""Accelerate's loop on two ranks: a job that resumes goes on as one that was never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from torch import nn

from tests.integrations.fsdp2 import fresh_accelerator, shard
from tests.integrations.killed import kill_while_writing
from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.demo.s3_server import Server
from titan_ckpt.errors import UsageError
from titan_ckpt.integrations.accelerate import AcceleratorCheckpoints
from titan_ckpt.saving.saver import save
from tools.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = 3  # of an epoch, on each rank


class Seen:
    """An object of the user's, given to `register_for_checkpointing`."""

    def __init__(self) -> None:
        self.samples, self.total = 0, torch.zeros(8)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples, self.total = state["samples"], state["total"]


class Job:
    """A model with dropout and running statistics, AdamW, a schedule that steps once a step, shuffled data."""

    def __init__(self, url: str, kind: str = "ddp", **settings: Any) -> None:
        self.accelerator = fresh_accelerator(step_scheduler_with_optimizer=False, **settings)
        if kind == "fsdp2":
            shard(self.accelerator)
        torch.manual_seed(1)
        norm = nn.LayerNorm(8) if kind == "fsdp2" else nn.BatchNorm1d(8)
        model = nn.Sequential(nn.Linear(8, 8), norm, nn.Dropout(0.3), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        ranks = self.accelerator.num_processes
        samples: Any = torch.randn(4 * BATCHES, 8)
        data: Any = torch.utils.data.DataLoader(samples, batch_size=4 // ranks, shuffle=True)
        self.model, self.optimizer, self.schedule, self.data = self.accelerator.prepare(
            model, optimizer, schedule, data
        )
        self.seen = Seen()
        self.accelerator.register_for_checkpointing(self.seen)
        self.checkpoints = AcceleratorCheckpoints(self.accelerator, url)

    def steps(self, first: int, last: int) -> Iterator[tuple[int, float]]:
        step = first
        while step < last:
            for x in self.checkpoints.rest_of_epoch(self.data, step % BATCHES):
                loss = (self.model(x) - x).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                self.seen.samples += len(x)
                self.seen.total += 1
                step += 1
                yield step, loss.item()
                if step == last:
                    break


def _stopped_and_resumed(_rank: int, url: str, kind: str, at: int) -> tuple[dict[int, float], dict[int, float], int]:
    whole, rest = {}, {}
    job = Job(url, kind)
    with job.checkpoints:
        for step, loss in job.steps(0, 5):
            whole[step] = loss
            job.checkpoints.check()
            job.checkpoints.save_state(step)
    job = Job(url, kind)
    torch.manual_seed(123)
    assert job.checkpoints.load_state(at) == at
    for step, loss in job.steps(at, 5):
        rest[step] = loss
    return {step: whole[step] for step in rest}, rest, job.seen.samples


@pytest.mark.dist
@pytest.mark.parametrize(("kind", "at"), [("ddp", 2), ("ddp", 3), ("fsdp2", 2)])
def test_a_resumed_job_goes_on_bit_for_bit(pair: RankPool, tmp_path: Path, kind: str, at: int) -> None:
    for whole, rest, samples in pair.run(_stopped_and_resumed, str(tmp_path / "run"), kind, at):
        assert whole == rest
        assert len(rest) == 5 - at
        assert samples == 5 * 2


def _trained(_rank: int, url: str) -> dict[int, float]:
    """The losses of a job of five steps that resumes if it can, and saves every step."""
    job = Job(url)
    with job.checkpoints:
        losses = {}
        for step, loss in job.steps(job.checkpoints.load_state() or 0, 5):
            losses[step] = loss
            job.checkpoints.check()
            job.checkpoints.save_state(step)
    return losses


@pytest.mark.dist
@pytest.mark.s3
@pytest.mark.parametrize(("name", "last"), [(r"step-0*3/.*distcp", 2), (r"step-0*4/COMMIT", 3)])
def test_a_job_killed_in_a_save_goes_on(s3_server: Server, s3_url: str, name: str, last: int) -> None:
    kill_while_writing(s3_server, name, _trained, s3_url)
    rest, whole = _trained(0, s3_url), _trained(0, f"{s3_url}-whole")
    assert rest == {step: whole[step] for step in range(last + 1, 6)}
    assert verify(s3_url, read_data=True) == []


def test_one_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, rest, samples = _stopped_and_resumed(0, str(tmp_path / "run"), "one", 2)
    assert whole == rest
    assert sorted(rest) == [3, 4, 5]
    assert samples == 5 * 4


@pytest.mark.dist
def test_one_rank_takes_over_from_two(pair: RankPool, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    pair.run(_stopped_and_resumed, url, "fsdp2", 2)
    job = Job(url, "fsdp2-on-one-rank")
    job.model[1] = nn.LayerNorm(8)
    job.optimizer.param_groups[0]["params"][2:4] = job.model[1].parameters()
    assert job.checkpoints.load_state() == 5
    stored = open_checkpoint(url)
    assert torch.equal(job.model[0].weight, stored.read("model.0.weight"))
    moments = job.optimizer.optimizer.state[job.model[3].weight]["exp_avg"]
    assert torch.equal(moments, stored.read("optimizer.state.4.exp_avg"))
    assert job.schedule.scheduler.last_epoch == 5


@pytest.mark.dist
def test_a_schedule_stepped_for_each_rank_stays_on_its_ranks(pair: RankPool, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    pair.run(_saved_with_a_schedule_of_ranks, url)
    job = Job(url)
    with pytest.raises(UsageError, match=r"saved by 2 ranks, and this job has 1.*step_scheduler_with_optimizer=False"):
        job.checkpoints.load_state()


def _saved_with_a_schedule_of_ranks(_rank: int, url: str) -> None:
    job = Job(url)
    job.schedule.step_with_optimizer = True
    with job.checkpoints:
        job.checkpoints.save_state(1)


def test_a_new_run_has_nothing_to_load(tmp_path: Path) -> None:
    assert Job(str(tmp_path / "run")).checkpoints.load_state() is None


def test_total_limit_and_two_models(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    job = Job(url, project_config=ProjectConfiguration(total_limit=2))
    job.accelerator.prepare(nn.Linear(2, 2))
    with job.checkpoints:
        for step in (1, 2, 3):
            job.checkpoints.save_state(step)
    assert [info.step for info in list_checkpoints(url)] == [2, 3]
    assert "model_1.weight" in open_checkpoint(url).manifest.by_fqn


def test_what_no_loop_saved_is_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    save(url, {"model": {"w": torch.zeros(2)}}, step=1)
    with pytest.raises(UsageError, match="saved by no loop"):
        Job(url).checkpoints.load_state()


def test_hooks_that_need_a_folder_are_refused(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"))

    def to_folder(models: Any, weights: Any, folder: Any) -> None: ...

    job.accelerator.register_save_state_pre_hook(to_folder)
    with pytest.raises(UsageError, match=r"to_folder.*register_for_checkpointing"):
        job.checkpoints.save_state(1)


def test_a_step_in_the_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without a step"):
        AcceleratorCheckpoints(fresh_accelerator(), f"{tmp_path}/run@5")


def _would_lose_something(_rank: int, url: str) -> list[str]:
    job = Job(url, gradient_accumulation_steps=2)
    problems = []
    with job.checkpoints:
        for x in job.data:
            with job.accelerator.accumulate(job.model):
                job.accelerator.backward(job.model(x).square().mean())
                job.optimizer.step()
            try:
                job.checkpoints.save_state(1)
            except UsageError as error:
                problems.append(str(error))
                continue
            break
    other = Job(url)
    other.accelerator._custom_objects.clear()
    with other.checkpoints:
        try:
            other.checkpoints.load_state()
        except UsageError as error:
            problems.append(str(error))
    return problems


@pytest.mark.dist
def test_what_a_resume_would_lose_is_refused(pair: RankPool, tmp_path: Path) -> None:
    for between, dropped in pair.run(_would_lose_something, str(tmp_path / "run")):
        assert "between the micro-batches of an optimizer step" in between
        assert "has registered, which this job has not prepared or registered" in dropped
