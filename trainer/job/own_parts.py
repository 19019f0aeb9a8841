"""The user's parts of a step: what `prepare` adds to a microbatch on its device, the hooks, and a step of one's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.frozen_weights import FrozenWeights, load_model
from titan_ckpt.trainer.job.resume import HOOKS, Start
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.parallelize import build_frozen_model
from titan_ckpt.trainer.parallel.stage_forward import on
from titan_ckpt.trainer.seams.boundary import calling, checked_numbers, kind_of, refuse
from titan_ckpt.trainer.seams.data import checked_fields
from titan_ckpt.trainer.seams.step import FrozenModel, Hooks, StepModel, TrainStep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What every microbatch goes through, and where the frozen models in it were read."""

    run: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    read: Mapping[str, FrozenWeights] = field(default_factory=dict)


def preparation(config: TrainConfig, start: Start, model: Parallelized, control: ControlGroup) -> Preparation:
    """Build and load the frozen models; collective. ConfigError for one whose values are not those of the run's checkpoint."""
    device, prepare = model.ranks.device, config.extension.prepare
    if prepare is None:
        return Preparation(run=lambda batch: on(device, batch))
    wanted = {name: _made(name, make, config) for name, make in config.extension.frozen.items()}
    read: dict[str, FrozenWeights] = {}
    frozen = {}
    for name, second in wanted.items():
        built = build_frozen_model(second.spec, config.mesh, model.ranks, seed=config.train.seed)
        if second.start:
            read[name] = load_model(name, second.start, start, built, control)
        else:
            log.info("%s: %s, with the initial weights of train.seed", name, second.spec.name)
        frozen[name] = built.outputs

    @torch.no_grad()
    def run(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with calling("prepare", prepare):
            made: object = prepare(on(device, batch), frozen)
        return checked_fields(made, "prepare", prepare)

    return Preparation(run=run, read=read)


def _made(name: str, make: Callable[[TrainConfig], FrozenModel], config: TrainConfig) -> FrozenModel:
    seam = f"frozen[{name!r}]"
    with calling(seam, make):
        found: object = make(config)
    if not isinstance(found, FrozenModel):
        refuse(seam, make, f"returned {kind_of(found)}, expected a FrozenModel")
    return found


class HookCalls:
    """The hooks of a run; without any, calls do nothing."""

    def __init__(self, hooks: Hooks | None) -> None:
        self._hooks = hooks

    def kept(self) -> dict[str, HookCalls]:
        """What checkpoints keep beside the model: these hooks, if they have a state."""
        has_state = self._hooks is not None and type(self._hooks).state_dict is not Hooks.state_dict
        return {HOOKS: self} if has_state else {}

    def state_dict(self) -> dict[str, Any]:
        """Call the hook."""
        if self._hooks is None:
            return {}
        with calling("Hooks.state_dict", self._hooks):
            state: object = self._hooks.state_dict()
        if not isinstance(state, dict):
            refuse("Hooks.state_dict", self._hooks, f"returned {kind_of(state)}, expected a dict")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Call the hook."""
        if self._hooks is not None:
            with calling("Hooks.load_state_dict", self._hooks):
                self._hooks.load_state_dict(state)

    def before_step(self, step: int) -> None:
        """Call the hook."""
        if self._hooks is not None:
            with calling("Hooks.before_step", self._hooks):
                self._hooks.before_step(step)

    def after_backward(self, step: int, model: Parallelized) -> None:
        """Call the hook, with gradients that are summed over all ranks that share a weight."""
        if self._hooks is not None:
            model.finish_gradients()
            with calling("Hooks.after_backward", self._hooks):
                self._hooks.after_backward(step, model.named_parameters())

    def after_step(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
        """Call the hook; returns the numbers to record."""
        if self._hooks is None:
            return {}
        with calling("Hooks.after_step", self._hooks):
            found: object = self._hooks.after_step(step, numbers)
        return checked_numbers(found, "Hooks.after_step", self._hooks, ("event", "time_s", "step"))


def run_own_step(
    own: TrainStep, microbatches: Sequence[Mapping[str, Tensor]], model: Parallelized, *, count: int, step: int
) -> Tensor:
    """The losses' sum that a user's train step returns."""
    view = StepModel(
        forward_backward=lambda batch: model.forward_backward(batch, count=count), weights=model.named_parameters()
    )
    with calling("train_step", own):
        total: object = own(microbatches, view, step=step)
    if not isinstance(total, Tensor) or total.numel() != 1:
        refuse(
            "train_step", own, f"returned {kind_of(total)}, expected the sum of the losses as a tensor of one number"
        )
    return total.detach().sum()
