"""A short training run of a small model, comparable across meshes; used by the trainer's tests and campaign."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist

from titan_ckpt.trainer.model.decoder import ModelConfig, decoder
from titan_ckpt.trainer.model.experts import BalanceConfig, ExpertsConfig
from titan_ckpt.trainer.model.latent import LatentConfig
from titan_ckpt.trainer.model.rope import RopeScaling
from titan_ckpt.trainer.parallel.config import ParallelConfig, check_fits, mesh_spec
from titan_ckpt.trainer.parallel.optimizer import OptimizerConfig, build_optimizer
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model

SMALL = ModelConfig(vocab_size=128, dim=64, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=96, max_seq_len=512)
EVERYTHING = ModelConfig(
    vocab_size=128, dim=64, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=96, head_dim=32, max_seq_len=512,
    qkv_bias=True, o_bias=True, qk_norm=True, sliding_window=20,
)  # fmt: skip
MIXTURE = ModelConfig(
    vocab_size=128, dim=64, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=96, max_seq_len=512, family="qwen3_moe", qk_norm=True,
    experts=ExpertsConfig(number=8, per_token=2, ffn_dim=32),
)  # fmt: skip
BALANCED = replace(
    MIXTURE,
    experts=ExpertsConfig(
        number=8, per_token=3, ffn_dim=32, scores="sigmoid", correction_bias=True, groups=4, groups_per_token=2,
        scale=1.5, shared=1, dense_layers=1,
    ),
)  # fmt: skip
DEEPSEEK = ModelConfig(
    vocab_size=128, dim=64, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=96, max_seq_len=512, family="deepseek_v3",
    rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16, mscale=1.0, mscale_all_dim=0.8),
    latent=LatentConfig(q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, value_dim=10), experts=BALANCED.experts,
)  # fmt: skip
GPT_OSS = ModelConfig(
    vocab_size=128, dim=64, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=32, head_dim=16, max_seq_len=512, family="gpt_oss",
    qkv_bias=True, o_bias=True, sinks=True, sliding_window=20, full_attention_every=2,
    experts=ExpertsConfig(number=8, per_token=3, ffn_dim=32, limit=7.0),
)  # fmt: skip

BALANCING = BalanceConfig(bias_rate=0.01, balance_loss=0.05, z_loss=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveCase:
    """What to train. The global batch is `batch_size` samples on any mesh, split into `accumulate` microbatches."""

    model: ModelConfig = SMALL
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    steps: int = 4
    batch_size: int = 8
    seq_len: int = 48
    accumulate: int = 1
    has_documents: bool = False
    lr: float = 3e-3
    seed: int = 1
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    rule: Literal["adamw", "muon"] = "adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Loss per token and gradient norm of every step; one more loss after the last update. `loads`: tokens of each expert."""

    losses: list[float]
    norms: list[float]
    loads: dict[str, list[int]] = field(default_factory=dict)


def single(run: CurveCase) -> Curve:
    """The curve of a single process, computed in this one."""
    try:
        return train(0, run)
    finally:
        dist.destroy_process_group()


def train(rank: int, run: CurveCase) -> Curve:  # noqa: ARG001 - the pool passes the rank
    """The curve on this rank."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = mesh_spec(run.parallel, world_size)
    model = build_parallel_model(
        decoder(run.model), run.parallel, mesh, device=torch.device("cpu"), seed=run.seed, balance=run.balance
    )
    optimizer = build_optimizer(model, OptimizerConfig(name=run.rule, lr=run.lr))
    size = run.batch_size // run.accumulate // model.data_degree
    check_fits(decoder(run.model), run.parallel, mesh, seq_len=run.seq_len, microbatch_size=size)
    generator = torch.Generator().manual_seed(run.seed)
    losses, norms = [], []
    loads: dict[str, list[int]] = {}
    for step in range(run.steps + 1):
        tokens = torch.randint(0, run.model.vocab_size, (run.batch_size, run.seq_len + 1), generator=generator)
        tokens[:, 1::2] = tokens[:, :-1:2]  # learnable: every second token repeats the one before
        labels = tokens[:, 1:].clone()
        labels[: run.batch_size // 2, :5] = -100
        valid = int((labels != -100).sum())
        documents = (torch.arange(run.seq_len) // 17).expand(run.batch_size, -1)
        total = torch.zeros(())
        for part in range(run.accumulate):
            start = (part * model.data_degree + model.data_rank) * size
            mine = slice(start, start + size)
            batch = {"tokens": tokens[mine, :-1], "labels": labels[mine]}
            batch |= {"documents": documents[mine]} if run.has_documents else {}
            total = total + (
                model.forward_loss(batch) if step == run.steps else model.forward_backward(batch, count=valid)
            )
        losses.append(float(model.reduce_loss(total)) / valid)
        if step < run.steps:
            norms.append(float(model.clip_grad_norm(1.0)))
            for fqn, load in model.loads.items():
                loads.setdefault(fqn, []).extend(load.tolist())
            optimizer.step(run.lr)
            optimizer.zero_grad()
    return Curve(losses=losses, norms=norms, loads=loads)


def relative_error(found: list[float], expected: list[float]) -> float:
    """The largest relative error along a curve."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
