"""The optimizer over this rank's shards: which rule updates which weight, and the learning rate as a pure function of the step.

States are DTensors placed like their weights, so checkpoints save and reshard them by the same rules. Weight decay applies to
matrices, not to norms and biases.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from titan_ckpt.errors import ConfigError, TitanError
from titan_ckpt.trainer.optim.adamw import AdamW
from titan_ckpt.trainer.optim.in_backward import EarlyUpdates
from titan_ckpt.trainer.optim.muon import Muon
from titan_ckpt.trainer.optim.own import OwnRule
from titan_ckpt.trainer.optim.rule import Rule, Trained, zeros_like
from titan_ckpt.trainer.parallel.local_weights import local_tensor
from titan_ckpt.trainer.parallel.parallel_model import Parallelized, copies, unwrap_float8
from titan_ckpt.trainer.parallel.precision import DTYPES
from titan_ckpt.trainer.seams.optimizer import OptimizerSpec
from titan_ckpt.trainer.seams.patterns import is_below, matching

OWN, AVERAGE = "own", "ema"  # the rule of a user's OptimizerSpec; the state that `ema_decay` adds


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Weights with settings of their own; where several groups match a weight, the first counts."""

    weights: tuple[str, ...]  # patterns of names: * within one name, ** across names
    lr: float | None = None  # peak learning rate, with the same schedule; default: optimizer.lr
    weight_decay: float | None = None  # also of norms and biases; default: as without a group
    name: Literal["", "adamw", "muon"] = ""  # the rule; empty: as without a group


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The rule of updates and its schedule. `decay_fraction` is the final part of training, in which `wsd` and `sqrt` decay."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: of the matrices in the blocks; adamw for all other weights
    lr: float = 3e-4  # peak learning rate
    betas: tuple[float, float] = (0.9, 0.95)  # decay of the first and the second moment
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    moments: Literal["float32", "bfloat16", "int8"] = "float32"  # of adamw; int8: codes with a scale per block of a row
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"  # torch's, of adamw with float32 moments
    in_backward: bool = False  # update each weight in the backward and drop its gradient; for adamw without grad_clip
    momentum: float = 0.95  # of muon
    nesterov: bool = True  # of muon
    muon_iterations: int = 5  # of Newton and Schulz
    muon_dtype: Literal["float32", "bfloat16"] = "float32"  # of the iterations; bfloat16 is faster, and differs by mesh
    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"  # match_rms_adamw: lr as for adamw
    ema_decay: float = 0.0  # of an average of the weights, saved with them, such as 0.999; 0: none
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


class NoGradientError(TitanError):
    """A weight that should be trained has no gradient."""


class Optimizer:
    """The rules and their state, which is allocated at construction, so that a checkpoint can load into it."""

    def __init__(
        self,
        parallelized: Parallelized,
        config: OptimizerConfig,
        weights: dict[str, nn.Parameter],
        spec: OptimizerSpec | None = None,
    ) -> None:
        self.parallelized, self.config, self._weights = parallelized, config, weights
        self.name: str = config.name if spec is None else spec.name  # recorded in checkpoints
        experts = frozenset(parallelized.plan.experts)
        self._rules = _rules(config, spec, experts)
        self._settings: dict[str, tuple[str, float, float]] = {}  # rule, share of the learning rate, weight decay
        self._state: dict[str, dict[str, Tensor]] = {}
        self._lr = 0.0  # of the step that has begun
        blocks = frozenset(parallelized.plan.blocks)
        for fqn, weight in weights.items():
            ndim = weight.ndim - is_below(fqn, experts)  # of one expert
            name = OWN if spec is not None else rule_of(config, fqn, ndim, blocks)
            factor, decay = own_settings(config, fqn, ndim)
            self._settings[fqn] = (name, factor, decay)
            shard = unwrap_float8(weight.detach())
            self._state[fqn] = self._rules[name].state(fqn, shard) | _kept_for_all(
                shard, has_average=config.ema_decay > 0.0
            )
        self._early = self._in_backward() if config.in_backward else None

    def _in_backward(self) -> EarlyUpdates:
        """All weights but those whose gradients are still to be summed over tp."""
        whole = {fqn: w for fqn, w in self._weights.items() if fqn not in self.parallelized.partial_over_tp}
        mesh = self.parallelized.mesh
        return EarlyUpdates(
            whole, update=lambda fqn: self._update([fqn], self._lr), copies=lambda weight: copies(weight, mesh)
        )

    @property
    def dropped_squares(self) -> Tensor | None:
        """This rank's share of the squared norm of the gradients that were used in the backward; None without `in_backward`."""
        return None if self._early is None else self._early.squares

    @torch.no_grad()
    def begin(self, lr: float) -> None:
        """Before the backward of a step with `in_backward`, whose learning rate is `lr`."""
        if self._early is None:
            return
        self._lr = lr
        self._early.start()
        if self.config.ema_decay:
            self._start_averages()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every weight that is trained; NoGradientError names those that the loss does not depend on."""
        self.parallelized.finish_gradients()
        done = set[str]() if self._early is None else self._early.updated
        trained = [fqn for fqn, weight in self._weights.items() if weight.requires_grad and fqn not in done]
        if lost := [fqn for fqn in trained if self._weights[fqn].grad is None]:
            more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
            raise NoGradientError(
                f"no gradient has reached {', '.join(lost[:5])}{more}, so training would leave them as they are: the loss does "
                "not depend on them. Leave them out on purpose with train.freeze"
            )
        if self.config.ema_decay:
            self._start_averages()
        self._update(trained, lr)
        if self.config.ema_decay:
            self._average()

    def _update(self, fqns: Sequence[str], lr: float) -> None:
        """Update weights whose gradients are there."""
        if not fqns:
            return
        torch._foreach_add_([self._state[fqn]["step"] for fqn in fqns], 1.0)
        groups: dict[tuple[str, float, float], list[Trained]] = {}
        for fqn in fqns:
            groups.setdefault(self._settings[fqn], []).append(self._trained(fqn))
        for (rule, factor, decay), some in groups.items():
            self._rules[rule].update(some, lr=factor * lr, decay=decay)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.parallelized.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """The live tensors by flat name: `state.<fqn>.step`, and what the rule keeps, as `state.<fqn>.exp_avg`."""
        return {f"state.{fqn}.{name}": kept for fqn, state in self._state.items() for name, kept in state.items()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the averages of `ema_decay` in place of its weights, for as long as the context lasts."""
        self.parallelized.reshard()
        shards = {fqn: self._shard(fqn) for fqn in self._weights}
        kept = {fqn: shard.clone() for fqn, shard in shards.items()}
        with torch.no_grad():
            for fqn, shard in shards.items():
                if self._state[fqn]["step"] > 0 or not self._weights[fqn].requires_grad:
                    shard.copy_(local_tensor(self._state[fqn][AVERAGE]))
        try:
            yield
        finally:
            self.parallelized.reshard()
            with torch.no_grad():
                for fqn, shard in shards.items():
                    shard.copy_(kept[fqn])

    def _shard(self, fqn: str) -> Tensor:
        return local_tensor(unwrap_float8(self._weights[fqn].detach()))

    def _trained(self, fqn: str) -> Trained:
        weight, state = self._weights[fqn], self._state[fqn]
        assert weight.grad is not None
        own = {name: kept for name, kept in state.items() if name not in ("step", AVERAGE)}
        return Trained(
            fqn=fqn, weight=unwrap_float8(weight.detach()), gradient=weight.grad, state=own, step=state["step"]
        )

    def _start_averages(self) -> None:
        """Before the first update the averages are the weights, wherever these came from."""
        for fqn, state in self._state.items():
            if not state["step"]:
                local_tensor(state[AVERAGE]).copy_(self._shard(fqn))

    def _average(self) -> None:
        shards = [self._shard(fqn) for fqn in self._weights]
        averages = [local_tensor(self._state[fqn][AVERAGE]) for fqn in self._weights]
        torch._foreach_lerp_(averages, shards, 1.0 - self.config.ema_decay)


def _kept_for_all(shard: Tensor, *, has_average: bool) -> dict[str, Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=local_tensor(shard).device)
    return {"step": step} | ({AVERAGE: zeros_like(shard, torch.float32)} if has_average else {})


def _rules(config: OptimizerConfig, spec: OptimizerSpec | None, experts: Collection[str]) -> dict[str, Rule]:
    adamw = AdamW(betas=config.betas, eps=config.eps, moments=config.moments, implementation=config.implementation)
    muon = Muon(
        momentum=config.momentum,
        nesterov=config.nesterov,
        iterations=config.muon_iterations,
        scale=config.muon_scale,
        dtype=DTYPES[config.muon_dtype],
        stacked=experts,
    )
    rules: dict[str, Rule] = {"adamw": adamw, "muon": muon}
    return rules if spec is None else rules | {OWN: OwnRule(spec=spec)}


def rule_of(config: OptimizerConfig, fqn: str, ndim: int, blocks: Container[str]) -> str:
    """The name of the rule that updates a weight: its group's, else muon for matrices in the blocks if it is asked for."""
    group = _group_of(config, fqn)
    if group is not None and group.name:
        return group.name
    return "muon" if config.name == "muon" and ndim == 2 and is_below(fqn, blocks) else "adamw"


def _group_of(config: OptimizerConfig, fqn: str) -> GroupConfig | None:
    """The first group with a pattern that matches."""
    return next((g for g in config.groups if any(matching(pattern, [fqn]) for pattern in g.weights)), None)


def own_settings(config: OptimizerConfig, fqn: str, ndim: int) -> tuple[float, float]:
    """(share of the learning rate, weight decay) of a weight.

    >>> groups = (GroupConfig(weights=("**.bias",), lr=1.0), GroupConfig(weights=("**",), weight_decay=0.5))
    >>> config = OptimizerConfig(lr=2.0, groups=groups)
    >>> own_settings(config, "a.bias", 1), own_settings(config, "a.weight", 2)
    ((0.5, 0.0), (1.0, 0.5))
    """
    usual, group = config.weight_decay if ndim > 1 else 0.0, _group_of(config, fqn)
    if group is None:
        return 1.0, usual
    factor = 1.0 if group.lr is None else group.lr / config.lr
    return factor, usual if group.weight_decay is None else group.weight_decay


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
    parallelized: Parallelized,
    config: OptimizerConfig,
    *,
    only: Collection[str] | None = None,
    spec: OptimizerSpec | None = None,
) -> Optimizer:
    """The optimizer of this rank's weights, or of those in `only`; other weights have no state. `spec` replaces the rules."""
    check_numbers(config)
    weights = {name: w for name, w in parallelized.named_parameters().items() if only is None or name in only}
    return Optimizer(parallelized, config, weights, spec)


def check_numbers(config: OptimizerConfig) -> None:
    """ConfigError for a number out of its range."""
    if not (0.0 <= config.betas[0] < 1.0 and 0.0 <= config.betas[1] < 1.0):
        raise ConfigError(f"optimizer.betas {config.betas}: both must be in [0, 1)")
    if config.lr <= 0.0 or config.eps <= 0.0 or config.weight_decay < 0.0:
        raise ConfigError(
            f"optimizer: lr {config.lr} and eps {config.eps} must be > 0, weight_decay {config.weight_decay} >= 0"
        )
    if not (0.0 <= config.momentum < 1.0 and 0.0 <= config.ema_decay < 1.0):
        raise ConfigError(f"optimizer: momentum {config.momentum} and ema_decay {config.ema_decay} must be in [0, 1)")
    if not 1 <= config.muon_iterations < 100:
        raise ConfigError(f"optimizer.muon_iterations = {config.muon_iterations}: must be in [1, 100)")
