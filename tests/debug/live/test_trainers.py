"""Scripts for Accelerate and for transformers' Trainer that know nothing of us but `Recorder.start`: hung and healthy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run
from titan_ckpt.debug.record.environment import environment
from titan_ckpt.demo.ports import free_port

pytestmark = pytest.mark.dist

START = """
import os, sys, time, torch
from torch import nn
from titan_ckpt.debug import Recorder
folder, rank, hangs = sys.argv[1], int(os.environ["RANK"]), sys.argv[2] == "hangs"
Recorder.start(folder, rank=rank, world_size=2, stall_s=2)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        if hangs and rank == 1 and i > 12:
            time.sleep(3600)  # the culprit
        return {"x": torch.ones(4) * i, "labels": torch.ones(1)}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).pow(2).mean()}
"""
SCRIPTS = {
    "accelerate": START
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = Model()
optimizer, data = torch.optim.SGD(model.parameters(), 0.001), torch.utils.data.DataLoader(Data(), 2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    accelerator.backward(model(**batch)["loss"])
    optimizer.step()
    optimizer.zero_grad()
accelerator.wait_for_everyone()
accelerator.end_training()
""",
    "trainer": START
    + """
from transformers import Trainer, TrainingArguments
options = TrainingArguments(
    folder + "/out", per_device_train_batch_size=2, num_train_epochs=1, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, ddp_backend="gloo",
)
Trainer(model=Model(), args=options, train_dataset=Data()).train()
torch.distributed.destroy_process_group()
""",
}


def start(kind: str, folder: Path, *, hangs: bool) -> list[subprocess.Popen[bytes]]:
    variables = {
        **os.environ,
        **environment(200),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "2",
    }
    variables |= {"MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-c", SCRIPTS[kind], str(folder), "hangs" if hangs else "ends"]
    ranks = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2))
    return [subprocess.Popen(command, env={**variables, **own}, stdout=subprocess.DEVNULL) for own in ranks]


def verdict(folder: Path) -> Verdict:
    return diagnose(open_run(str(folder)))[0]


@pytest.mark.parametrize("kind", SCRIPTS)
def test_rank_whose_data_stall_is_the_verdict(kind: str, tmp_path: Path) -> None:
    ranks = start(kind, tmp_path, hangs=True)
    stalls = [tmp_path / f"rank_{rank:05d}.stall.pickle" for rank in range(2)]
    try:
        give_up = time.monotonic() + 240
        while not all(path.exists() for path in stalls) or not verdict(tmp_path).victims:
            assert time.monotonic() < give_up, "no stall was found"
            time.sleep(0.5)
        top = verdict(tmp_path)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert (top.verdict, top.culprits, top.victims) == ("STUCK_ON_CPU", (1,), (0,))


@pytest.mark.parametrize("kind", SCRIPTS)
def test_job_that_ends_well_is_healthy(kind: str, tmp_path: Path) -> None:
    ranks = start(kind, tmp_path, hangs=False)
    assert [process.wait(timeout=240) for process in ranks] == [0, 0]
    assert verdict(tmp_path).verdict == "HEALTHY"
