"""Models and tokens of the torchtitan runs in tests/data/torchtitan, which scripts/golden_torchtitan.py writes."""

from __future__ import annotations

import torch
from torch import Tensor

from titan_ckpt.trainer.model.decoder import ModelConfig
from titan_ckpt.trainer.model.rope import RopeScaling
from titan_ckpt.trainer.parallel.optimizer import OptimizerConfig
from tools.paths import DATA

TORCHTITAN_RUNS = DATA / "torchtitan"
RANKS, BATCH, LENGTH = 2, 4, 16
BEFORE, AFTER = 3, 3  # steps before and after the save
OPTIMIZER = OptimizerConfig(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
LLAMA = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, rope_theta=500_000.0, max_seq_len=128,
    rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=8192),
)  # fmt: skip
QWEN3 = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, head_dim=16, norm_eps=1e-6,
    rope_theta=1_000_000.0, max_seq_len=128, tied_embeddings=True, qk_norm=True, family="qwen3",
)  # fmt: skip
MODELS = {"llama": LLAMA, "qwen3": QWEN3}


def tokens(step: int) -> Tensor:
    """The batch of the step after `step`, [BATCH, LENGTH + 1]; computed, so equal under any torch version."""
    numbers = torch.arange(BATCH * (LENGTH + 1)).reshape(BATCH, -1)
    return (numbers * numbers * (step + 3) + numbers * 7 + step) % 61
