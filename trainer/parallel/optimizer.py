"""AdamW over this rank's shards, and the learning rate as a pure function of the step.

The moments are DTensors placed like their weights, so checkpoints save and reshard them by the same rules. The update runs on
the local shards in one fused call per group. Weight decay applies to matrices, not to norms and biases.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from titan_ckpt.errors import ConfigError, TitanError
from titan_ckpt.trainer.parallel.local_weights import local_tensor
from titan_ckpt.trainer.parallel.parallel_model import Parallelized, unwrap_float8
from titan_ckpt.trainer.seams.patterns import matching


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Weights with settings of their own; where several groups match a weight, the first counts."""

    weights: tuple[str, ...]  # patterns of names: * within one name, ** across names
    lr: float | None = None  # peak learning rate, with the same schedule; default: optimizer.lr
    weight_decay: float | None = None  # also of norms and biases; default: as without a group


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule. `decay_fraction` is the final part of training, in which `wsd` and `sqrt` decay."""

    lr: float = 3e-4  # peak learning rate
    betas: tuple[float, float] = (0.9, 0.95)  # decay of the first and the second moment
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    grad_clip: float = 1.0  # norm of the whole gradient, at most; 0: no limit
    warmup_steps: int = 0  # steps of linear warm-up
    schedule: Literal["constant", "wsd", "cosine", "linear", "sqrt"] = "cosine"  # how the rate falls after the warm-up
    decay_fraction: float = 0.2  # wsd, sqrt: share of the steps in which the rate falls
    min_lr_ratio: float = 0.1  # last rate, as a share of lr
    not_finite: Literal["stop", "skip"] = "stop"  # an infinity or NaN in the gradient: end the run, or skip the update
    max_skipped: int = 8  # consecutive skipped steps; one more ends the run
    groups: tuple[GroupConfig, ...] = ()  # weights with their own learning rate or weight decay


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of the update after `step` finished steps; warms up for `warmup_steps`, ends at `min_lr_ratio`.

    wsd is constant, then falls linearly over the last `decay_fraction`; sqrt falls as 1 - sqrt(progress) over the same part
    (arXiv 2405.18392).

    >>> [learning_rate(OptimizerConfig(lr=1.0, warmup_steps=2, schedule="constant"), step, 9) for step in range(3)]
    [0.5, 1.0, 1.0]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    start = config.warmup_steps
    if config.schedule in ("wsd", "sqrt"):
        start = max(start, total_steps - round(total_steps * config.decay_fraction))
    progress = min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * _remaining(config.schedule, progress))


def _remaining(schedule: str, progress: float) -> float:
    match schedule:
        case "constant":
            return 1.0
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "sqrt":
            return 1.0 - math.sqrt(progress)
        case _:
            return 1.0 - progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """AdamW's state of one weight."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class NoGradientError(TitanError):
    """A weight that should be trained has no gradient."""


class Optimizer:
    """AdamW; its state is allocated at construction, so that a checkpoint can load into it."""

    def __init__(self, parallelized: Parallelized, config: OptimizerConfig, weights: dict[str, nn.Parameter]) -> None:
        self.parallelized, self.config, self._weights = parallelized, config, weights
        self._moments = {fqn: _moments(weight) for fqn, weight in self._weights.items()}
        self._groups: dict[tuple[float, float], list[str]] = {}
        for fqn, weight in self._weights.items():
            self._groups.setdefault(own_settings(config, fqn, weight.ndim), []).append(fqn)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every weight that is trained; NoGradientError names those that the loss does not depend on."""
        self.parallelized.finish_gradients()
        trained = [fqn for fqn, weight in self._weights.items() if weight.requires_grad]
        if lost := [fqn for fqn in trained if self._weights[fqn].grad is None]:
            more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
            raise NoGradientError(
                f"no gradient has reached {', '.join(lost[:5])}{more}, so training would leave them as they are: the loss does "
                "not depend on them. Leave them out on purpose with train.freeze"
            )
        for (factor, decay), fqns in self._groups.items():
            self._update([fqn for fqn in fqns if self._weights[fqn].requires_grad], factor * lr, decay)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.parallelized.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """The live tensors by flat name: `state.<fqn>.exp_avg`, `.exp_avg_sq`, `.step`."""
        return {
            f"state.{fqn}.{name}": getattr(moments, name)
            for fqn, moments in self._moments.items()
            for name in ("exp_avg", "exp_avg_sq", "step")
        }

    def _update(self, fqns: list[str], lr: float, decay: float) -> None:
        if not fqns:
            return
        moments = [self._moments[fqn] for fqn in fqns]
        adamw(
            [local_tensor(unwrap_float8(self._weights[fqn].detach())) for fqn in fqns],
            [local_tensor(_gradient(self._weights[fqn])) for fqn in fqns],
            [local_tensor(m.exp_avg) for m in moments],
            [local_tensor(m.exp_avg_sq) for m in moments],
            [],
            [m.step for m in moments],
            fused=True,
            amsgrad=False,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=self.config.eps,
            maximize=False,
        )


def own_settings(config: OptimizerConfig, fqn: str, ndim: int) -> tuple[float, float]:
    """(share of the learning rate, weight decay) of a weight.

    >>> groups = (GroupConfig(weights=("**.bias",), lr=1.0), GroupConfig(weights=("**",), weight_decay=0.5))
    >>> config = OptimizerConfig(lr=2.0, groups=groups)
    >>> own_settings(config, "a.bias", 1), own_settings(config, "a.weight", 2)
    ((0.5, 0.0), (1.0, 0.5))
    """
    usual = config.weight_decay if ndim > 1 else 0.0
    for group in config.groups:
        if any(matching(pattern, [fqn]) for pattern in group.weights):
            factor = 1.0 if group.lr is None else group.lr / config.lr
            return factor, usual if group.weight_decay is None else group.weight_decay
    return 1.0, usual


def check_groups(config: OptimizerConfig, names: Iterable[str]) -> None:
    """ConfigError for a group that has a pattern without a weight, or a rate or decay that cannot be."""
    known = list(names)
    for group in config.groups:
        for pattern in group.weights:
            if not matching(pattern, known):
                raise ConfigError(f"optimizer.groups: {pattern!r} matches no weight; one is called {known[0]}")
        if not group.weights or not (group.lr is None or group.lr > 0.0) or (group.weight_decay or 0.0) < 0.0:
            raise ConfigError(f"optimizer.groups: {group}: weights must be given, lr > 0 and weight_decay >= 0")


def build_optimizer(
    parallelized: Parallelized, config: OptimizerConfig, *, only: Collection[str] | None = None
) -> Optimizer:
    """The optimizer of this rank's weights, or of those in `only`; other weights have no state."""
    if not (0.0 <= config.betas[0] < 1.0 and 0.0 <= config.betas[1] < 1.0):
        raise ConfigError(f"optimizer.betas {config.betas}: both must be in [0, 1)")
    if config.lr <= 0.0 or config.eps <= 0.0 or config.weight_decay < 0.0:
        raise ConfigError(
            f"optimizer: lr {config.lr} and eps {config.eps} must be > 0, weight_decay {config.weight_decay} >= 0"
        )
    weights = {name: w for name, w in parallelized.named_parameters().items() if only is None or name in only}
    return Optimizer(parallelized, config, weights)


def _moments(weight: nn.Parameter) -> Moments:
    weights = unwrap_float8(weight.detach())
    step = torch.zeros((), dtype=torch.float32, device=local_tensor(weights).device)
    return Moments(exp_avg=torch.zeros_like(weights), exp_avg_sq=torch.zeros_like(weights), step=step)


def _gradient(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return weight.grad
