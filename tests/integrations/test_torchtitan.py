"""torchtitan's debug model under FSDP2 on two ranks, saved and resumed by our manager. `make loops` installs torchtitan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from tools.rank_pool import RankPool
from tools.training.torchtitan_model import TitanTrainState, build, debug_spec, token_loss

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make loops")
pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]
BATCH, LENGTH = 2, 16


class Tokens(torch.utils.data.IterableDataset[torch.Tensor]):
    """Samples that depend on their index alone, and a position."""

    def __init__(self, rank: int, count: int) -> None:
        self.at, self.count = rank, count

    def __iter__(self) -> Any:
        while True:
            generator = torch.Generator().manual_seed(self.at)
            self.at += self.count
            yield torch.randint(0, 2048, (LENGTH + 1,), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Job:
    """The trainer's parts, built anew as in a new process."""

    def __init__(self, rank: int, world: int, folder: str, *, is_ours: bool = True, **settings: Any) -> None:
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import default_adamw
        from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

        from titan_ckpt.integrations.torchtitan import TitanCheckpointManager

        self.world = world
        self.model = build(debug_spec(), local_batch_size=BATCH, seq_len=LENGTH)
        self.loss = token_loss()
        self.optimizers = default_adamw(lr=1e-3).build(model_parts=self.model.parts)
        self.schedules = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=10
        )
        self.data = ParallelAwareDataloader(Tokens(rank, world), rank, world, batch_size=BATCH)
        self.progress = TitanTrainState()
        owner = TitanCheckpointManager if is_ours else CheckpointManager
        self.manager = owner.Config(enable=True, interval=2, **settings).build(
            dataloader=self.data, model_parts=self.model.parts, optimizers=self.optimizers, lr_schedulers=self.schedules,
            states={"train_state": self.progress}, sd_adapter=None, base_folder=folder,
        )  # fmt: skip

    def train(self, last: int, *, stop_before: int | None = None) -> dict[int, float]:
        self.manager.load()
        losses, batches = {}, iter(self.data)
        while self.progress.step < (stop_before or last):
            tokens = next(batches)
            self.optimizers.zero_grad()
            with self.model.context():
                logits = self.model.parts[0](tokens[:, :-1].contiguous())
                labels = tokens[:, 1:].contiguous()
                loss, _ = self.loss(logits, labels, torch.tensor(BATCH * LENGTH * self.world))
                loss.backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedules.step()
            self.progress.step += 1
            losses[self.progress.step] = loss.detach().item()
            self.manager.save(self.progress.step, last_step=self.progress.step == last)
        self.manager.maybe_wait_for_saving()
        self.manager.close()
        return losses


def _resumed(rank: int, folder: str, is_first_ours: bool) -> tuple[dict[int, float], dict[int, float]]:
    Job(rank, 2, folder, is_ours=is_first_ours).train(6, stop_before=4)
    rest = Job(rank, 2, folder).train(6)
    whole = Job(rank, 2, f"{folder}/whole").train(6)
    return {step: whole[step] for step in rest}, rest


def _random_of_a_resumed_job(rank: int, folder: str) -> bool:
    first = Job(rank, 2, folder)
    first.train(6, stop_before=4)
    saved = torch.get_rng_state()
    job = Job(rank, 2, folder)
    job.manager.load()
    next(iter(job.data))
    return torch.equal(torch.get_rng_state(), saved)


def test_random_states_are_resumed(pair: RankPool, tmp_path: Path) -> None:
    assert pair.run(_random_of_a_resumed_job, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("is_first_ours", [True, False])
def test_a_resumed_job_goes_on_bit_for_bit(pair: RankPool, tmp_path: Path, is_first_ours: bool) -> None:
    for whole, rest in pair.run(_resumed, str(tmp_path), is_first_ours):
        assert whole == rest
        assert sorted(rest) == [5, 6]
    kinds = {info.step: info.commit.kind for info in list_checkpoints(tmp_path / "checkpoint") if info.commit}
    assert kinds == ({2: "full", 4: "full", 6: "model"} if is_first_ours else {6: "model"})


def _with_other_ranks(rank: int, folder: str) -> tuple[str, int]:
    Job(rank, 2, folder, keep_latest_k=2).train(6, stop_before=4)
    try:
        Job(rank, 4, folder).manager.load()
        refused = ""
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        refused = str(error)
    job = Job(rank, 4, folder, exclude_from_loading=["dataloader"])
    job.manager.load()
    return refused, job.progress.step


def test_another_number_of_data_ranks_needs_new_data(pair: RankPool, tmp_path: Path) -> None:
    for refused, step in pair.run(_with_other_ranks, str(tmp_path)):
        assert "places of 2 data-parallel ranks, and this job has 4" in refused
        assert step == 4


def _read_by_torchtitan(rank: int, folder: str) -> int:
    Job(rank, 2, folder).train(6, stop_before=4)
    path = f"{folder}/checkpoint/step-00000004"
    job = Job(rank, 2, f"{folder}/other", is_ours=False, initial_load_path=path, initial_load_model_only=False)
    job.manager.load()
    return job.progress.step


def test_torchtitan_itself_resumes_from_our_folder(pair: RankPool, tmp_path: Path) -> None:
    assert pair.run(_read_by_torchtitan, str(tmp_path)) == [4, 4]
    assert "optimizer.state.tok_embeddings.weight.exp_avg" in open_checkpoint(tmp_path / "checkpoint").manifest.by_fqn
