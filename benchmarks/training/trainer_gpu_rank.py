"""This package's side of trainer_gpu.py: one rank, with the same model and step as torchtitan's side."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training.trainer_gpu import LARGE, TINY
from benchmarks.training.turns import take_turns
from titan_ckpt.trainer.device_mesh import BACKENDS
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.parallel.config import ParallelConfig, check_fits, mesh_spec
from titan_ckpt.trainer.parallel.optimizer import Optimizer, OptimizerConfig, build_optimizer
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model

LOSS_CHUNK_TOKENS = 2048


def open_device(job: dict[str, Any]) -> torch.device:
    """The device, with the process group of one rank on it."""
    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(BACKENDS[device.type])
    return device


def build_model(job: dict[str, Any], device: torch.device) -> tuple[Parallelized, Optimizer]:
    """The model in bf16, and its optimizer."""
    config = TINY if job["is_tiny"] else LARGE
    parallel = ParallelConfig(
        param_dtype="bfloat16",
        compile=job.get("compile", False),
        float8=job.get("float8") or "none",
        loss_chunk_tokens=LOSS_CHUNK_TOKENS,
    )
    mesh = mesh_spec(parallel, 1)
    check_fits(decoder(config), parallel, mesh, seq_len=job["seq_len"], microbatch_size=job["samples"])
    model = build_parallel_model(decoder(config), parallel, mesh, device=device, seed=0)
    return model, build_optimizer(model, OptimizerConfig())


def stepper(model: Parallelized, optimizer: Optimizer, job: dict[str, Any], device: torch.device) -> Callable[[], None]:
    """Run one training step on random tokens and wait for the device."""
    shape, vocab_size = (job["samples"], job["seq_len"] + 1), model.spec.vocab_size or 0

    def step() -> None:
        tokens = torch.randint(0, vocab_size, shape, device=device)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        optimizer.zero_grad()
        model.forward_backward({"tokens": inputs, "labels": labels}, count=labels.numel())
        model.clip_grad_norm(1.0)
        optimizer.step(1e-4)
        synchronise(device)

    return step


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(job: dict[str, Any]) -> None:
    """Run one step per turn."""
    device = open_device(job)
    take_turns(stepper(*build_model(job, device), job, device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
