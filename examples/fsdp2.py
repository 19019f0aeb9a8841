"""Plain PyTorch FSDP2 with titan-ckpt checkpoints. Kill it and restart it on any number of ranks: it resumes.

torchrun --nproc-per-node 2 examples/fsdp2.py runs/fsdp2 --steps 100
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import titan_ckpt

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--every", type=int, default=5)
options = parser.parse_args()

dist.init_process_group("gloo")  # "nccl" on GPUs, and "cuda" below
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
flat = StateDictOptions(flatten_optimizer_state_dict=True)


def state() -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=flat)
    return {"model": weights, "optimizer": moments}


step = 0
if any(info.is_resumable for info in titan_ckpt.list_checkpoints(options.url)):
    checkpoint = titan_ckpt.open_checkpoint(options.url)  # the newest complete one
    loaded = state()
    titan_ckpt.load(checkpoint, loaded)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=flat
    )
    step = checkpoint.step

with titan_ckpt.Saver(
    options.url, titan_ckpt.SaveOptions(mesh=titan_ckpt.MeshSpec.of({"dp_shard": world_size}))
) as saver:
    while step < options.steps:
        step += 1
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step * world_size + rank))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        saver.check()  # raises if an upload failed on any rank
        if rank == 0:
            print(f"step {step} loss {loss.item():.9f} committed {saver.metrics().last_committed_step}", flush=True)  # noqa: T201
        if step % options.every == 0:
            saver.save(state(), step=step)  # returns once the tensors may change again
dist.destroy_process_group()
