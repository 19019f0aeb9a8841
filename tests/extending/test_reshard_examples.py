"""The worked examples' models: weights and moments are bit-equal after they went from one mesh to another, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples import gpt2, vit
from tests.extending.test_models import BATCH, GPT2, VIT, _images, _tokens
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.saving.saver import SaveOptions, save
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.resume import Start, TrainingProgress, live_state, pipeline_record, restore, training_record
from titan_ckpt.trainer.model.plan import plan_of
from titan_ckpt.trainer.parallel.config import ParallelConfig, mesh_spec
from titan_ckpt.trainer.parallel.optimizer import OptimizerConfig, build_optimizer
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from tools.rank_pool import RankPool
from tools.training.mesh_cases import mesh
from tools.training.optimizer_runs import digests

MODELS: dict[str, Any] = {"gpt2": (gpt2.model, GPT2, _tokens), "vit": (vit.model, VIT, _images)}


def _go_on(_rank: int, name: str, parallel: ParallelConfig, start: str, url: str) -> None:
    """Load `start`, or else train a step; save at `url`."""
    spec_of, argument, batches = MODELS[name]
    spec, placed = spec_of(argument), mesh_spec(parallel, 4)
    model = build_parallel_model(spec, parallel, placed, device=torch.device("cpu"), seed=1)
    optimizer, progress = build_optimizer(model, OptimizerConfig(lr=3e-3)), TrainingProgress()
    if start:
        opened, control = Start(checkpoint=open_checkpoint(start), is_own=True), ControlGroup(timeout_s=60)
        progress = restore(opened, model, optimizer, control=control, fingerprint="made up", other_data=False)
    else:
        size = BATCH // model.data_degree
        mine = {field: value[model.data_rank * size :][:size] for field, value in batches(0).items()}
        model.forward_backward(mine, count=batches(0)["labels"].numel())
        optimizer.step(3e-3)
        progress = progress.after(samples=BATCH, tokens=BATCH)
    options = SaveOptions(mesh=placed, pipeline=pipeline_record(plan_of(spec), parallel, placed), timeout_s=60)
    record = training_record(progress, fingerprint="made up", seed=1, lr=3e-3)
    save(url, live_state(model, optimizer), step=progress.step, options=options, training=record)


@pytest.mark.dist
@pytest.mark.parametrize("name", MODELS)
def test_states_are_bit_equal_on_every_mesh(ranks: RankPool, tmp_path: Path, name: str) -> None:
    start, expected = "", None
    for number, parallel in enumerate(
        [mesh(dp_shard=2, tp=2), mesh(pp=2, dp_shard=2), mesh(dp_shard=4), mesh(dp_shard=2, tp=2)]
    ):
        url = str(tmp_path / str(number))
        ranks.run(_go_on, name, parallel, start, url)
        found = digests(url)
        start, expected = url, expected or found
        assert found == expected, parallel
    assert expected is not None
    assert any(name.endswith("exp_avg_sq") for name in expected)
