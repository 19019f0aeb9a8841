"""Distillation: a small decoder learns the token probabilities of a larger, frozen one (arXiv 1503.02531).

    titan-ckpt train examples/distill.toml --module examples/distill.py --set mesh.pp=2 --set mesh.dp_shard=2

The data are those of `[data]`. `[teacher]` names the checkpoint and states its shape.

Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from titan_ckpt.trainer import FrozenModel, ModelConfig, ModelSpec, decoder

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """The table `[teacher]`."""

    model: ModelConfig  # its shape, as in [model]
    start: str = ""  # URL[@STEP]; empty: the initial weights of train.seed
    temperature: float = 2.0


@dataclass(frozen=True, kw_only=True)
class DistillLoss:
    """The Kullback-Leibler divergence from the teacher's probabilities, both softened, summed over tokens."""

    temperature: float

    def __call__(self, logits_BSV: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        student_BSV = (logits_BSV.float() / self.temperature).log_softmax(dim=-1)
        teacher_BSV = (batch["teacher"].float() / self.temperature).log_softmax(dim=-1)
        distance_BS = F.kl_div(student_BSV, teacher_BSV, log_target=True, reduction="none").sum(dim=-1)
        return self.temperature**2 * (distance_BS * (batch["labels"] != IGNORED)).sum()

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Tokens."""
        return int((batch["labels"] != IGNORED).sum())


def with_logits(config: ModelConfig) -> ModelSpec:
    """The trainer's decoder without the labels, so that it returns logits."""
    return replace(decoder(config), inputs=("tokens", "positions", "documents"))


tables = {"teacher": TeacherConfig}
frozen = {
    "teacher": lambda config: FrozenModel(spec=with_logits(config.teacher.model), start=config.teacher.start),
}


def model(config: ModelConfig) -> ModelSpec:
    """The student."""
    return with_logits(config)


def loss(config: Any) -> DistillLoss:
    """The loss with the config's temperature."""
    return DistillLoss(temperature=config.teacher.temperature)


def prepare(batch: Mapping[str, Tensor], frozen: Mapping[str, Any]) -> dict[str, Tensor]:
    """The batch with the teacher's logits, where the loss is."""
    logits_BSV = frozen["teacher"](batch)
    return dict(batch) if logits_BSV is None else {**batch, "teacher": logits_BSV}
