"""Accelerate with titan-ckpt checkpoints. Kill it and restart it on any number of ranks: it resumes.

pip install accelerate 'titan-ckpt[torch]'
torchrun --nproc-per-node 2 examples/accelerate_loop.py runs/accelerate 20
"""

import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import titan_ckpt

url, steps = sys.argv[1], int(sys.argv[2])
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
flat = StateDictOptions(flatten_optimizer_state_dict=True)


def state() -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer.optimizer, options=flat)
    return {"model": weights, "optimizer": moments}


step = 0
if any(info.is_resumable for info in titan_ckpt.list_checkpoints(url)):
    checkpoint, loaded = titan_ckpt.open_checkpoint(url), state()
    titan_ckpt.load(checkpoint, loaded)
    set_state_dict(
        model, optimizer.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=flat
    )
    step = checkpoint.step
accelerator.print(f"from step {step}")

with titan_ckpt.Saver(url) as saver:
    while step < steps:
        step += 1
        x = torch.randn(8, 64)
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        saver.check()
        if step % 5 == 0:
            saver.save(state(), step=step)
accelerator.print(f"now {[info.step for info in titan_ckpt.list_checkpoints(url)]}")
accelerator.end_training()
