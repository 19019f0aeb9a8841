"""Accelerate's loop over torchdata's StatefulDataLoader, which finds its place alone. `make loops` installs torchdata."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import DataLoaderConfiguration

from tests.integrations.test_accelerate import Job

pytest.importorskip("torchdata", reason="torchdata is not installed: make loops")

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_resumed_job_goes_on_bit_for_bit(tmp_path: Path, at: int) -> None:
    url, whole = str(tmp_path / "run"), {}
    job = Job(url, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    with job.checkpoints:
        for step, loss in job.steps(0, 5):
            whole[step] = loss
            job.checkpoints.save_state(step)
    job = Job(url, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    torch.manual_seed(9)
    job.checkpoints.load_state(at)
    assert dict(job.steps(at, 5)) == {step: whole[step] for step in range(at + 1, 6)}
