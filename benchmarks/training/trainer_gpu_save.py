"""For trainer_gpu.py: by `what`, the stall of a save ("save"; every second turn waits for its upload), a copy to pinned memory
("copy") or pageable memory ("copy, pageable"), or a step, a save, a step while it uploads, and the wait for it ("train")."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.training.trainer_gpu_rank import build_model, open_device, stepper, synchronise
from benchmarks.training.turns import take_turns
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.trainer.job.resume import live_state
from titan_ckpt.trainer.parallel.local_weights import local_tensor
from titan_ckpt.upkeep.retention import RetentionPolicy


def copier(tensors: list[Tensor], device: torch.device, *, is_pinned: bool) -> Callable[[], None]:
    """Copies all tensors to preallocated host buffers: the lower bound for a save, if they are pinned."""
    pin = is_pinned and device.type == "cuda"
    buffers = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin) for tensor in tensors]

    def copy() -> None:
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        synchronise(device)

    return copy


def saving(saver: Saver, state: dict[str, Any]) -> Callable[[], None]:
    """Alternates between saving and waiting for the commit."""
    turns = itertools.count()

    def save() -> None:
        turn = next(turns)
        if turn % 2:
            saver.wait()
        else:
            saver.save(state, step=turn + 1)

    return save


def training(saver: Saver, state: dict[str, Any], step: Callable[[], None]) -> Callable[[], None]:
    """Trains, saves, trains, and waits for the commit, in turn."""
    turns, save = itertools.count(), saving(saver, state)

    def act() -> None:
        if next(turns) % 2:
            save()
        else:
            step()

    return act


def main(job: dict[str, Any]) -> None:
    """Run one training step to get a realistic state, then one action per turn."""
    device = open_device(job)
    model, optimizer = build_model(job, device)
    step = stepper(model, optimizer, job, device)
    step()
    optimizer.zero_grad()
    state = live_state(model, optimizer)
    if job["what"].startswith("copy"):
        tensors = [local_tensor(tensor) for part in state.values() for tensor in part.values()]
        take_turns(copier(tensors, device, is_pinned=job["what"] == "copy"))
    else:
        options = SaveOptions(mesh=model.mesh, retention=RetentionPolicy(keep_last=1))
        with tempfile.TemporaryDirectory() as folder, Saver(folder, options) as saver:
            take_turns(saving(saver, state) if job["what"] == "save" else training(saver, state, step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
