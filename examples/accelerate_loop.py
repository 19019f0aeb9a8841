"""Accelerate with titan-ckpt checkpoints. Kill it and start it again: it goes on bit for bit, on as many ranks as before.

pip install accelerate 'titan-ckpt[torch]'
torchrun --nproc-per-node 2 examples/accelerate_loop.py runs/accelerate 20
"""

import sys

import torch
from accelerate import Accelerator

from titan_ckpt.integrations.accelerate import AcceleratorCheckpoints

url, steps = sys.argv[1], int(sys.argv[2])
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(96, 64))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with AcceleratorCheckpoints(accelerator, url) as checkpoints:
    step = checkpoints.load_state() or 0
    accelerator.print(f"from step {step}")
    while step < steps:
        for (x,) in checkpoints.rest_of_epoch(loader, step % len(loader)):
            loss = (model(x) - x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            checkpoints.check()
            if step % 5 == 0:
                checkpoints.save_state(step)
            if step == steps:
                break
    accelerator.print(f"step {step} loss {loss.item()!r}")
accelerator.end_training()
