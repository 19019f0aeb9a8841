"""Multi-token prediction: modules after the last layer that predict the tokens after the next one.

Module k (from 1) joins the normalised output of the module before it (of the model, for k = 1) at position i with the embedding
of token i + k, runs one more layer and predicts token i + k + 1 with the model's own head: arXiv 2412.19437, section 2.2. That
the output is taken after the final norm, and the order of the two halves of `eh_proj`, are those of DeepSeek-V3's published
weights as vLLM runs them (its deepseek_mtp).

Shapes: B batch, S sequence, D model dim, M modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import RMSNorm

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.model.linear import Linear
from titan_ckpt.trainer.seams.loss import IGNORED

AHEAD_TOKENS, AHEAD_LABELS = "ahead_tokens", "ahead_labels"  # fields of a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadConfig:
    """Prediction of tokens after the next one while training: `[model.ahead]`."""

    depth: int = 1  # how many tokens after the next one are predicted, each by a module of its own
    weight: float = 0.3  # of their mean loss beside that of the next token


def check_ahead(config: AheadConfig) -> None:
    """ConfigError for numbers out of range."""
    if not 1 <= config.depth <= 16:
        raise ConfigError(f"model.ahead.depth = {config.depth}: must be from 1 to 16")
    if not 0.0 < config.weight < 1e30:
        raise ConfigError(f"model.ahead.weight = {config.weight}: must be more than 0")


class Predictor(nn.Module):
    """One module: `layer` is a decoder layer."""

    def __init__(self, dim: int, norm_eps: float, layer: nn.Module) -> None:
        super().__init__()
        self.enorm, self.hnorm = RMSNorm(dim, norm_eps), RMSNorm(dim, norm_eps)
        self.eh_proj = Linear(2 * dim, dim, bias=False)
        self.layer = layer
        self.norm = RMSNorm(dim, norm_eps)

    def forward(self, h_BSD: Tensor, embedded_BSD: Tensor, turn: Any, mask: Any) -> Tensor:
        """The normalised hidden states from which the head predicts."""
        both_BS2D = torch.cat([self.enorm(embedded_BSD), self.hnorm(h_BSD)], dim=-1)
        out_BSD: Tensor = self.norm(self.layer(self.eh_proj(both_BS2D), turn, mask))
        return out_BSD


class Ahead(nn.Module):
    """All modules, and the model's embedding once more: they are on the last pipeline stage."""

    def __init__(self, embed_tokens: nn.Embedding, modules: list[Predictor]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(*embed_tokens.weight.shape)
        self.embed_tokens.weight = embed_tokens.weight
        self.depths = nn.ModuleDict({str(k): module for k, module in enumerate(modules)})

    def forward(self, h_BSD: Tensor, tokens_BSM: Tensor, turn: Any, mask_of: Callable[[nn.Module], Any]) -> Tensor:
        """What the head takes: the given hidden states, then those of each module, along the batch: [(1 + M) B, S, D]."""
        found = [h_BSD]
        for tokens_BS, module in zip(tokens_BSM.unbind(-1), self.depths.values(), strict=True):
            assert isinstance(module, Predictor)
            found.append(module(found[-1], self.embed_tokens(tokens_BS), turn, mask_of(module.layer)))
        return torch.cat(found)


def ahead_fields(fields: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """For each position and module the token that it joins, and its label: [B, S, M] each; nothing for a batch without labels.

    A label is IGNORED where the token is not there, or in another document.
    """
    if "labels" not in fields:
        return {}
    tokens_BS, labels_BS, documents_BS = fields["tokens"], fields["labels"], fields.get("documents")
    tokens, labels = [], []
    for k in range(1, depth + 1):
        tokens.append(_shifted(tokens_BS, k, 0))
        shifted_BS = _shifted(labels_BS, k, IGNORED)
        if documents_BS is not None:
            shifted_BS = shifted_BS.where(_shifted(documents_BS, k, -1) == documents_BS, IGNORED)
        labels.append(shifted_BS)
    return {AHEAD_TOKENS: torch.stack(tokens, dim=-1), AHEAD_LABELS: torch.stack(labels, dim=-1)}


def _shifted(x_BS: Tensor, k: int, end: int) -> Tensor:
    """What is `k` positions later; `end` beyond the sequence."""
    rest = x_BS.new_full((len(x_BS), min(k, x_BS.shape[1])), end)
    return torch.cat([x_BS[:, k:], rest], dim=1)
