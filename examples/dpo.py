"""Direct preference optimisation (arXiv 2305.18290): pairs as data, a loss of its own, and a frozen reference model.

    titan-ckpt train examples/dpo.toml --module examples/dpo.py --set mesh.dp_shard=2 --set mesh.tp=2

The pairs are made up: the better answer repeats the prompt, the worse one is noise. Replace `Pairs` with your own.

Shapes: B pairs, R = 2 B rows (better, worse, better, ...), S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_ckpt.trainer import FrozenModel, ModelConfig, ModelSpec, decoder

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """The table `[dpo]`."""

    beta: float = 0.1
    reference: str = ""  # URL[@STEP] of the reference model; empty: the initial weights


tables = {"dpo": DpoConfig}


def model(config: ModelConfig) -> ModelSpec:
    """The trainer's decoder, which without labels returns logits; not with cp, since the loss needs whole sequences."""
    return replace(decoder(config), inputs=("tokens", "positions"), sequence=())


def log_probabilities(logits_RSV: Tensor, labels_RS: Tensor) -> Tensor:
    """The log-probability of each row's labels, [R]."""
    scores_RSV = logits_RSV.float().log_softmax(dim=-1)
    own_RS = scores_RSV.gather(-1, labels_RS.clamp(min=0)[..., None]).squeeze(-1)
    return (own_RS * (labels_RS != IGNORED)).sum(dim=-1)


frozen = {"reference": lambda config: FrozenModel(spec=config.spec, start=config.dpo.reference)}


def prepare(batch: Mapping[str, Tensor], frozen: Mapping[str, Any]) -> dict[str, Tensor]:
    """Pairs as rows, and on the last pipeline stage what the reference thinks of them."""
    rows = {name: value.flatten(0, 1) for name, value in batch.items()}
    logits_RSV = frozen["reference"](rows)
    return rows if logits_RSV is None else rows | {"reference": log_probabilities(logits_RSV, rows["labels"])}


@dataclass(frozen=True, kw_only=True)
class DpoLoss:
    """-log sigmoid(beta x how much more than the reference the model prefers the better answer), summed over pairs."""

    beta: float

    def __call__(self, logits_RSV: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        gain_R = log_probabilities(logits_RSV, batch["labels"]) - batch["reference"]
        better_B, worse_B = gain_R.view(-1, 2).unbind(dim=1)
        is_pair_B = (batch["labels"] != IGNORED).any(dim=-1).view(-1, 2).any(dim=1)
        return -(F.logsigmoid(self.beta * (better_B - worse_B)) * is_pair_B).sum()

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Pairs, of the batch as the data source made it."""
        return int((batch["labels"] != IGNORED).flatten(1).any(dim=1).sum())


def loss(config: Any) -> DpoLoss:
    """The loss with the config's beta."""
    return DpoLoss(beta=config.dpo.beta)


class Pairs:
    """A prompt of half the sequence and two answers; only the answers have labels."""

    losses_per_sample = 1

    def __init__(self, seq_len: int, vocab_size: int, num_samples: int) -> None:
        self._seq_len, self._vocab_size, self._num_samples = seq_len, vocab_size, num_samples

    @property
    def fingerprint(self) -> str:
        return f"made-up pairs, version 1: {self._seq_len} {self._vocab_size} {self._num_samples}"

    def __len__(self) -> int:
        return self._num_samples

    def sample(self, index: int) -> dict[str, Tensor]:
        """`tokens` and `labels` [2, S], the better answer first."""
        draw, half = torch.Generator().manual_seed(index), self._seq_len // 2
        prompt, noise = torch.randint(self._vocab_size, (2, half), generator=draw)
        rows = torch.stack([torch.cat([prompt, prompt]), torch.cat([prompt, noise])])
        labels = F.pad(rows[:, 1:], (0, 1), value=IGNORED)
        labels[:, : half - 1] = IGNORED
        return {"tokens": rows, "labels": labels}


def data(config: Any) -> Pairs:
    """1024 pairs."""
    return Pairs(config.data.seq_len, config.model.vocab_size, num_samples=1024)
