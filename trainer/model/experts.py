"""Mixtures of experts: a router that picks experts for each token, and dropless grouped experts.

Every token reaches all the experts that its router picks: rows are sorted by expert and multiplied group by group, so there is no
capacity and nothing is dropped. `Experts.exchange` is where parallel/experts.py sends rows to the ranks of their experts.

Shapes: B batch, S sequence, T tokens (B x S), E experts, K experts per token, N rows (T x K), D model dim, F expert width,
G groups of experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.model.by_expert import ExpertWeights, Products, through_experts

BIAS = "e_score_correction_bias"  # as Hugging Face's DeepSeek-V3 names it
ALPHA = 1.702  # GPT-OSS's
Compute: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # rows sorted by expert, and rows of each expert
Beside: TypeAlias = Callable[[], None]  # work that needs no experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward part: `[model.experts]`."""

    number: int  # experts of a layer
    per_token: int  # experts that a token is sent to
    ffn_dim: int  # inner size of an expert
    norm_topk_prob: bool = True  # divide a token's weights by their sum
    scores: Literal["softmax", "sigmoid"] = "softmax"  # from the router's outputs to scores
    correction_bias: bool = False  # a bias of each expert that counts in the choice only; [experts] bias_rate moves it
    groups: int = 1  # groups of experts, of which a token uses groups_per_token
    groups_per_token: int = 1  # those with the largest sum of their group_best best scores
    group_best: int = 2  # DeepSeek-V3: 2, DeepSeek-V2: 1
    scale: float = 1.0  # factor of the weights
    shared: int = 0  # experts that every token goes through, as one feed-forward of shared x ffn_dim
    dense_layers: int = 0  # first layers with model.ffn_dim and no experts
    limit: float | None = None  # GPT-OSS: clamped SwiGLU, with biases of experts and router; unset: SwiGLU
    alpha: float = ALPHA  # with limit: slope of the gate's sigmoid


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """How tokens are kept spread over the experts of a mixture; refused for a dense model."""

    bias_rate: float = 0.0  # step of the correction bias against the load (arXiv 2408.15664); needs correction_bias
    balance_loss: float = 0.0  # weight of the load-balancing loss of each sequence (arXiv 2412.19437, equation 17)
    z_loss: float = 0.0  # weight of the mean squared log-sum-exp of the router's outputs (arXiv 2202.08906)


class Exchange(Protocol):
    """Takes rows to the ranks of their experts and the results back."""

    def __call__(self, compute: Compute, rows_ND: Tensor, counts_E: Tensor, beside: Beside) -> Tensor:
        """`compute` of rows sorted by expert, of which expert e has counts_E[e]; calls `beside` while rows are on their way."""


def check_experts(config: ExpertsConfig) -> None:
    """ConfigError for numbers that contradict each other."""
    sizes = {name: getattr(config, name) for name in ("number", "per_token", "ffn_dim", "groups", "groups_per_token")}
    for name, value in sizes.items():
        if not 1 <= value <= 1 << 24:
            raise ConfigError(f"model.experts.{name} = {value}: must be from 1 to {1 << 24}")
    if config.number % config.groups:
        raise ConfigError(f"model.experts: {config.number} experts / {config.groups} groups is not whole")
    if config.groups > 1 and not 1 <= config.group_best <= config.number // config.groups:
        raise ConfigError(
            f"model.experts: a group of {config.number // config.groups} is chosen by its group_best = {config.group_best} "
            "best experts, so it must have as many"
        )
    if config.groups_per_token > config.groups:
        raise ConfigError(f"model.experts: groups_per_token {config.groups_per_token} of {config.groups} groups")
    most = config.number // config.groups * config.groups_per_token
    if config.per_token > most:
        raise ConfigError(f"model.experts: per_token {config.per_token}, but a token can reach {most} experts")
    if config.limit is not None and (config.shared or not (config.limit > 0.0 and 0.0 < config.alpha < 1e30)):
        raise ConfigError("model.experts: with limit there are no shared experts, and limit and alpha are more than 0")
    if config.limit is None and config.alpha != ALPHA:
        raise ConfigError(
            f"model.experts.alpha = {config.alpha} has no effect without model.experts.limit; leave it out"
        )
    if config.shared < 0 or config.dense_layers < 0 or not 0.0 < config.scale < 1e30:
        raise ConfigError("model.experts: shared and dense_layers must be at least 0, scale more than 0")


class Router(nn.Module):
    """Scores every expert for every token, in float32, and picks the best.

    `load_E` counts the tokens of each expert since it was last taken. The buffers are state that all ranks have alike: the
    trainer sums the counts over ranks, moves the bias and saves both.
    """

    load_E: Tensor
    total_E: Tensor

    def __init__(self, config: ExpertsConfig, dim: int) -> None:
        super().__init__()
        self.config, self.balance = config, BalanceConfig()
        self.weight = nn.Parameter(torch.empty(config.number, dim))
        self.bias = None if config.limit is None else nn.Parameter(torch.empty(config.number))
        self.register_buffer("load_E", torch.zeros(config.number, dtype=torch.int64), persistent=False)
        self.register_buffer("total_E", torch.zeros(config.number, dtype=torch.int64), persistent=False)
        if config.correction_bias:
            self.register_buffer(BIAS, torch.zeros(config.number))
        self.loss_scale: Tensor | float = 1.0  # 1 / losses of a step, which all sums are divided by
        self.sequence_groups: tuple[dist.ProcessGroup, ...] = ()  # ranks with other parts of the same sequences

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, K] in float32 and the experts they belong to."""
        bias_E = None if self.bias is None else self.bias.float()
        logits_TE = F.linear(x_BSD.flatten(0, 1).float(), self.weight.float(), bias_E)
        is_softmax = self.config.scores == "softmax"
        scores_TE = logits_TE.softmax(dim=-1) if is_softmax else logits_TE.sigmoid()
        experts_TK = self.choose(scores_TE.detach())
        weights_TK = scores_TE.gather(1, experts_TK)
        if self.config.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + (0.0 if is_softmax else 1e-20))
        if torch.is_grad_enabled():
            weights_TK = self._with_losses(weights_TK, logits_TE, scores_TE, experts_TK, len(x_BSD))
            if torch._C._current_graph_task_id() == -1:  # not when a block is computed again in the backward
                self.load_E += _count(experts_TK, self.config.number)
        return weights_TK * self.config.scale, experts_TK

    @property
    def correction(self) -> Tensor | None:
        """The correction bias, if the router has one."""
        return self._buffers.get(BIAS)

    def choose(self, scores_TE: Tensor) -> Tensor:
        """The experts [T, K] with the best scores, the correction bias added, in the best groups."""
        return self.open_scores(scores_TE).topk(self.config.per_token, dim=-1).indices

    def open_scores(self, scores_TE: Tensor) -> Tensor:
        """The scores with the correction bias; -inf outside the best groups."""
        if self.correction is not None:
            scores_TE = scores_TE + self.correction
        if self.config.groups > 1:
            by_group_TGE = scores_TE.view(len(scores_TE), self.config.groups, -1)
            groups_TG = by_group_TGE.topk(self.config.group_best, dim=-1).values.sum(dim=-1)
            best_T = groups_TG.topk(self.config.groups_per_token, dim=-1).indices
            is_open_TG = torch.zeros_like(groups_TG, dtype=torch.bool).scatter_(1, best_T, True)
            scores_TE = by_group_TGE.masked_fill(~is_open_TG[..., None], -torch.inf).flatten(1)
        return scores_TE

    def reset_state(self, device: torch.device) -> None:
        """Zeros for all counts and the bias."""
        for name, buffer in list(self.named_buffers()):
            setattr(self, name, torch.zeros_like(buffer, device=device))

    @torch.no_grad()
    def take_load(self) -> Tensor:
        """The counts of this rank since the last call; starts anew."""
        load_E = self.load_E.clone()
        self.load_E.zero_()
        return load_E

    @torch.no_grad()
    def add_load(self, load_E: Tensor) -> None:
        """Count a step's tokens of all ranks, and move the bias towards experts with fewer than the mean."""
        self.total_E += load_E
        if self.correction is not None and self.balance.bias_rate:
            load = load_E.double()
            self.correction.add_((load.mean() - load).sign().to(self.correction), alpha=self.balance.bias_rate)

    def _with_losses(
        self, weights_TK: Tensor, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor, batch: int
    ) -> Tensor:
        """The weights, whose backward also gives the gradients of the balancing losses, as sums over tokens."""
        loss: Tensor | None = None
        if self.balance.z_loss:
            loss = self.balance.z_loss * logits_TE.logsumexp(dim=-1).square().sum()
        if self.balance.balance_loss:
            share_BE = self._shares(experts_TK, batch)
            parts_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
            parts_BE = parts_TE.view(batch, -1, self.config.number).sum(dim=1)
            more = self.balance.balance_loss * (share_BE * parts_BE).sum()
            loss = more if loss is None else loss + more
        if loss is None:
            return weights_TK
        out_TK: Tensor = _AddLoss.apply(weights_TK, loss, self.loss_scale)  # type: ignore[no-untyped-call]
        return out_TK

    @torch.no_grad()
    def _shares(self, experts_TK: Tensor, batch: int) -> Tensor:
        """Tokens of each whole sequence that an expert gets, relative to an even spread: [B, E]."""
        number = self.config.number
        rows_BN = experts_TK.reshape(batch, -1)
        at_BN = rows_BN + number * torch.arange(batch, device=rows_BN.device)[:, None]
        counts_BE = _count(at_BN, batch * number).view(batch, number).float()
        for group in self.sequence_groups:
            dist.all_reduce(counts_BE, group=group)
        return counts_BE * number / counts_BE.sum(dim=1, keepdim=True)


class _Experts(nn.Module, ABC):
    """Feed-forwards, one for each expert, in weights that transformers' modules have too: [E, ...].

    A rank may have only some of the experts, or a part of each: then `exchange` is set.
    """

    def __init__(self, number: int, divided: Mapping[str, int | None]) -> None:
        super().__init__()
        self.number = number
        # With `etp`, tp cuts each weight along this dimension; None is a bias of the outputs, which is whole.
        self.divided = divided
        self.exchange: Exchange | None = None
        self.products = Products()

    def forward(self, x_TD: Tensor, experts_TK: Tensor, beside: Beside) -> Tensor:
        """The outputs of each token's experts: [N, D], not a view, which FSDP refuses. Calls `beside` once."""
        order_N = experts_TK.flatten().argsort(stable=True)
        counts_E = _count(experts_TK, self.number)
        rows_ND: Tensor = _Rows.apply(x_TD, order_N, experts_TK.shape[1])  # type: ignore[no-untyped-call]
        if self.exchange is not None:
            y_ND = self.exchange(self.compute, rows_ND, counts_E, beside)
        else:
            beside()
            y_ND = self.compute(rows_ND, counts_E)
        return permuted(y_ND, inverse(order_N))

    def compute(self, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert, through their experts."""
        return through_experts(self.activation, rows_ND, self.weights(), counts_E, self.products)

    @abstractmethod
    def weights(self) -> ExpertWeights:
        """Those of all experts."""

    @abstractmethod
    def activation(self, both_NF: Tensor) -> Tensor:
        """From gate and up [N, 2 F] to what `down` takes [N, F]."""


class Experts(_Experts):
    """Experts that are SwiGLU feed-forwards without biases.

    Where tp cuts each expert, a rank has consecutive rows of `gate_up_proj`, all of gates or all of ups but for one rank in the
    middle. `pair` exchanges their columns for gate and up of the same features.
    """

    def __init__(self, config: ExpertsConfig, dim: int) -> None:
        super().__init__(config.number, {"gate_up_proj": 1, "down_proj": 2})
        self.pair: Callable[[Tensor], Tensor] | None = None
        self.gate_up_proj = nn.Parameter(torch.empty(config.number, 2 * config.ffn_dim, dim))
        self.down_proj = nn.Parameter(torch.empty(config.number, dim, config.ffn_dim))

    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.gate_up_proj, None, self.down_proj, None)

    def activation(self, both_NF: Tensor) -> Tensor:
        if self.pair is not None:
            both_NF = self.pair(both_NF)
        gate_NF, up_NF = both_NF.chunk(2, dim=-1)
        return F.silu(gate_NF) * up_NF


class ClampedExperts(_Experts):
    """GPT-OSS's: gate and up are clamped, their columns alternate, and all weights are [E, inputs, outputs] with biases."""

    def __init__(self, config: ExpertsConfig, dim: int) -> None:
        cuts = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1, "down_proj_bias": None}
        super().__init__(config.number, cuts)
        assert config.limit is not None
        self.limit, self.alpha = config.limit, config.alpha
        self.gate_up_proj = nn.Parameter(torch.empty(config.number, dim, 2 * config.ffn_dim))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(config.number, 2 * config.ffn_dim))
        self.down_proj = nn.Parameter(torch.empty(config.number, config.ffn_dim, dim))
        self.down_proj_bias = nn.Parameter(torch.empty(config.number, dim))

    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.gate_up_proj.mT, self.gate_up_proj_bias, self.down_proj.mT, self.down_proj_bias)

    def activation(self, both_NF: Tensor) -> Tensor:
        gate_NF, up_NF = both_NF[:, 0::2].clamp(max=self.limit), both_NF[:, 1::2].clamp(-self.limit, self.limit)
        return (up_NF + 1.0) * gate_NF * torch.sigmoid(self.alpha * gate_NF)


class MixtureOfExperts(nn.Module):
    """A feed-forward part: the weighted sum of a token's experts, and what `shared` gives for all tokens.

    With `Experts.exchange` the shared experts compute while rows travel, and so does their backward.
    """

    def __init__(self, config: ExpertsConfig, dim: int, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = Router(config, dim)
        self.experts = Experts(config, dim)
        self.shared_experts = shared

    def forward(self, x_BSD: Tensor) -> Tensor:
        shared: list[Tensor] = []

        def beside() -> None:
            if self.shared_experts is not None:
                shared.append(self.shared_experts(x_BSD))

        y_BSD = _mixed(self.gate, self.experts, x_BSD, beside)
        return y_BSD + shared[0] if shared else y_BSD


class ClampedMixture(nn.Module):
    """GPT-OSS's feed-forward part."""

    def __init__(self, config: ExpertsConfig, dim: int) -> None:
        super().__init__()
        self.router = Router(config, dim)
        self.experts = ClampedExperts(config, dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return _mixed(self.router, self.experts, x_BSD, lambda: None)


def _mixed(router: Router, experts: _Experts, x_BSD: Tensor, beside: Beside) -> Tensor:
    weights_TK, experts_TK = router(x_BSD)
    y_TKD = experts(x_BSD.flatten(0, 1), experts_TK, beside).unflatten(0, experts_TK.shape)
    y_BSD: Tensor = (y_TKD * weights_TK[..., None].to(y_TKD)).sum(dim=1).view_as(x_BSD)
    return y_BSD


def permuted(x_ND: Tensor, order_N: Tensor) -> Tensor:
    """`x_ND[order_N]` for a permutation; its backward is a permutation too, not a sum."""
    out: Tensor = _Permute.apply(x_ND, order_N)  # type: ignore[no-untyped-call]
    return out


def inverse(order_N: Tensor) -> Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))


def _count(experts: Tensor, number: int) -> Tensor:
    """How often each expert occurs."""
    return torch.bincount(experts.flatten(), minlength=number)


class _Rows(torch.autograd.Function):
    """Each token's row for each of its experts, sorted; its backward sums a token's rows."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.per_token = per_token
        return x_TD[order_N // per_token]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        by_token_ND = grads[0][inverse(ctx.saved_tensors[0])]
        return by_token_ND.view(-1, ctx.per_token, by_token_ND.shape[1]).sum(dim=1), None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_N: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        return x_ND[order_N]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][inverse(ctx.saved_tensors[0])], None


class _AddLoss(torch.autograd.Function):
    """The first argument; in the backward, the loss gets the gradient that the main loss has: 1 / losses of the step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor | float) -> Tensor:
        ctx.scale, ctx.like = scale, loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.like * ctx.scale, None
