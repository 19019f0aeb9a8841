"""One rank of this package's trainer, for trainer_vs_torchtitan.py: the same model, batch and step as torchtitan_rank.py."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training.turns import take_turns
from titan_ckpt.trainer.model.decoder import ModelConfig, decoder
from titan_ckpt.trainer.model.experts import ExpertsConfig
from titan_ckpt.trainer.model.plan import routers_of
from titan_ckpt.trainer.parallel.config import ParallelConfig, mesh_spec
from titan_ckpt.trainer.parallel.optimizer import OptimizerConfig, build_optimizer
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from tools.training.hf_shapes import LLAMA3_SCALING

# torchtitan's "debugmodel"
MODEL = ModelConfig(
    vocab_size=2048, dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_dim=768, rope_theta=500_000.0,
    rope_scaling=LLAMA3_SCALING,
)  # fmt: skip
# its Qwen3 "debugmodel_moe"
MIXTURE = ModelConfig(
    vocab_size=2048, dim=256, n_layers=8, n_heads=16, n_kv_heads=8, head_dim=128, ffn_dim=768, rope_theta=1_000_000.0,
    norm_eps=1e-6, qk_norm=True, family="qwen3_moe", experts=ExpertsConfig(number=64, per_token=8, ffn_dim=768),
)  # fmt: skip


def in_turn(scores_TE: torch.Tensor) -> torch.Tensor:
    """The experts [T, K] of tokens that go to all in turn, as with torchtitan's debug.moe_force_load_balance."""
    assert MIXTURE.experts is not None
    (tokens, number), per_token = scores_TE.shape, MIXTURE.experts.per_token
    return torch.arange(tokens * per_token).view(tokens, per_token) % number


def main(job: dict[str, Any]) -> None:
    """Train on random tokens, a step at a time."""
    torch.set_num_threads(job["threads"])
    dist.init_process_group("gloo")
    parallel = ParallelConfig(
        pp=job["pp"], dp_shard=job["dp_shard"], tp=job["tp"], ep=job["ep"], microbatches=job["pp"],
        experts_dtype=job["experts_dtype"],
    )  # fmt: skip
    mesh = mesh_spec(parallel, dist.get_world_size())
    shape = replace(MIXTURE, n_layers=job["mixture_layers"]) if job["mixture_layers"] else MODEL
    model = build_parallel_model(decoder(shape), parallel, mesh, device=torch.device("cpu"), seed=0)
    for part in model.parts:
        for _, router in routers_of(part):
            router.__dict__["choose"] = in_turn
    optimizer = build_optimizer(model, OptimizerConfig())
    batch = job["batch_size"] // job["dp_shard"]
    valid = job["batch_size"] * job["seq_len"]

    def step() -> None:
        tokens = torch.randint(0, 2048, (batch, job["seq_len"] + 1))
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        optimizer.zero_grad()
        model.forward_backward({"tokens": inputs, "labels": labels}, count=valid)
        model.clip_grad_norm(1.0)
        optimizer.step(1e-3)

    take_turns(step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
