"""Short runs with each rule of the optimizer, comparable across meshes, and digests of their states; for tests and a campaign."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.saving.saver import SaveOptions, save
from titan_ckpt.state.state_dict import as_bytes
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.resume import Start, TrainingProgress, live_state, pipeline_record, restore, training_record
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.model.plan import plan_of
from titan_ckpt.trainer.parallel.config import ParallelConfig, mesh_spec
from titan_ckpt.trainer.parallel.optimizer import Optimizer, OptimizerConfig, build_optimizer
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from titan_ckpt.trainer.seams.optimizer import OptimizerSpec
from tools.training.curves import SMALL

MODEL = replace(SMALL, n_layers=2, ffn_dim=100)  # rows of 100: shards are uneven, blocks of 8-bit moments too
BATCH, SEQ_LEN, LR = 8, 32, 3e-3
RULES = {
    "adamw": OptimizerConfig(lr=LR),
    "ema": OptimizerConfig(lr=LR, ema_decay=0.9),
    "bfloat16": OptimizerConfig(lr=LR, moments="bfloat16"),
    "int8": OptimizerConfig(lr=LR, moments="int8"),
    "muon": OptimizerConfig(lr=LR, name="muon", ema_decay=0.9),
    "at_end": OptimizerConfig(lr=LR, ema_decay=0.9, grad_clip=0.0),
    "in_backward": OptimizerConfig(lr=LR, ema_decay=0.9, grad_clip=0.0, in_backward=True),
    "own": OptimizerConfig(lr=LR),
    "own_whole": OptimizerConfig(lr=LR),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run of some steps gives on a rank."""

    losses: list[float]
    norms: list[float]  # of the gradients
    left: int  # gradients that exist after a backward
    averaged: float  # the loss of the last batch with the averages of the weights; with the weights without `ema_decay`


def train(_rank: int, rule: str, parallel: ParallelConfig, steps: int, start: str = "", url: str = "") -> Run:
    """Train from the initial weights or from the checkpoint `start`; save at `url`."""
    model, optimizer = _built(rule, parallel)
    progress = _restored(model, optimizer, start) if start else TrainingProgress()
    done: list[tuple[float, float, int]] = []
    for step in range(progress.step, progress.step + steps):
        done.append(_step(model, optimizer, step))
        progress = progress.after(samples=BATCH, tokens=BATCH * SEQ_LEN)
    if url:
        mesh = model.mesh
        options = SaveOptions(mesh=mesh, pipeline=pipeline_record(plan_of(model.spec), parallel, mesh), timeout_s=60)
        record = training_record(progress, fingerprint="random", seed=1, lr=LR, rule=optimizer.name)
        save(url, live_state(model, optimizer), step=progress.step, options=options, training=record)
    averaged = _loss(model, progress.step)
    if optimizer.config.ema_decay:
        with optimizer.averaged():
            averaged = _loss(model, progress.step)
    losses, norms, left = zip(*done, strict=True) if done else ((), (), (0,))
    return Run(losses=list(losses), norms=list(norms), left=max(left), averaged=averaged)


def digests(url: str) -> dict[str, str]:
    """A digest of every whole tensor of a checkpoint, by name."""
    checkpoint = open_checkpoint(url)
    found = {}
    for entry in checkpoint.manifest.tensors:
        found[entry.fqn] = hashlib.sha256(as_bytes(checkpoint.read(entry.fqn).contiguous())).hexdigest()
    return found


def _built(rule: str, parallel: ParallelConfig) -> tuple[Parallelized, Optimizer]:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = mesh_spec(parallel, world_size)
    model = build_parallel_model(decoder(MODEL), parallel, mesh, device=torch.device("cpu"), seed=1)
    return model, build_optimizer(model, RULES[rule], spec=SPECS.get(rule))


def _restored(model: Parallelized, optimizer: Optimizer, url: str) -> TrainingProgress:
    start = Start(checkpoint=open_checkpoint(url), is_own=True)
    control = ControlGroup(timeout_s=60)
    return restore(start, model, optimizer, control=control, fingerprint="random", other_data=False)


def _batch(model: Parallelized, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, MODEL.vocab_size, (BATCH, SEQ_LEN + 1), generator=generator)
    tokens[:, 1::2] = tokens[:, :-1:2]  # learnable: every second token repeats the one before
    size = BATCH // model.data_degree
    mine = tokens[model.data_rank * size :][:size]
    return {"tokens": mine[:, :-1], "labels": mine[:, 1:].clone()}


def _step(model: Parallelized, optimizer: Optimizer, step: int) -> tuple[float, float, int]:
    optimizer.begin(LR)
    loss = model.forward_backward(_batch(model, step), count=BATCH * SEQ_LEN)
    left = sum(weight.grad is not None for weight in model.named_parameters().values())
    norm = model.clip_grad_norm(optimizer.config.grad_clip or math.inf, dropped=optimizer.dropped_squares)
    optimizer.step(LR)
    optimizer.zero_grad()
    return float(model.reduce_loss(loss)) / (BATCH * SEQ_LEN), float(norm), left


def _loss(model: Parallelized, step: int) -> float:
    return float(model.reduce_loss(model.forward_loss(_batch(model, step)).sum())) / (BATCH * SEQ_LEN)


def _sign_update(
    fqn: str,
    weight: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    *,
    step: int,
    lr: float,
    weight_decay: float,
) -> None:
    """Lion (arXiv 2302.06675), which treats each number by itself."""
    assert fqn
    assert step > 0
    weight.mul_(1.0 - lr * weight_decay).add_(state["momentum"].lerp(gradient, 0.1).sign(), alpha=-0.1 * lr)
    state["momentum"].lerp_(gradient, 0.01)


def _normed_update(
    fqn: str,
    weight: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    *,
    step: int,
    lr: float,
    weight_decay: float,
) -> None:
    """Steps of one length for the whole weight, which needs all of its gradient."""
    assert fqn
    state["mean"].lerp_(gradient, 1.0 / (step + 1))
    weight.mul_(1.0 - lr * weight_decay).sub_(state["mean"] / (state["mean"].norm() + 1e-8), alpha=10.0 * lr)


SPECS = {
    "own": OptimizerSpec(name="lion", state={"momentum": torch.float32}, update=_sign_update),
    "own_whole": OptimizerSpec(name="normed", state={"mean": torch.float32}, update=_normed_update, whole=True),
}
