"""The user's parts of a step: what `prepare` adds to a microbatch on its device, the hooks, and a step of one's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.resume import HOOKS, check_all_taken, load_weights, open_for
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.parallelize import build_frozen_model
from titan_ckpt.trainer.parallel.stage_forward import on
from titan_ckpt.trainer.seams.boundary import calling, checked_numbers, kind_of, refuse
from titan_ckpt.trainer.seams.data import checked_fields
from titan_ckpt.trainer.seams.step import FrozenModel, Hooks, StepModel, TrainStep

log = logging.getLogger(__name__)


def preparation(
    config: TrainConfig, model: Parallelized, control: ControlGroup
) -> Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]:
    """The function that every microbatch goes through; builds the frozen models, so it is collective."""
    device, prepare = model.ranks.device, config.extension.prepare
    if prepare is None:
        return lambda batch: on(device, batch)
    wanted = {name: _made(name, make, config) for name, make in config.extension.frozen.items()}
    made = {name: _build(name, second, config, model, control) for name, second in wanted.items()}
    frozen = {name: second.outputs for name, second in made.items()}

    @torch.no_grad()
    def run(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with calling("prepare", prepare):
            made: object = prepare(on(device, batch), frozen)
        return checked_fields(made, "prepare", prepare)

    return run


def _made(name: str, make: Callable[[TrainConfig], FrozenModel], config: TrainConfig) -> FrozenModel:
    seam = f"frozen[{name!r}]"
    with calling(seam, make):
        found: object = make(config)
    if not isinstance(found, FrozenModel):
        refuse(seam, make, f"returned {kind_of(found)}, expected a FrozenModel")
    return found


def _build(
    name: str, frozen: FrozenModel, config: TrainConfig, model: Parallelized, control: ControlGroup
) -> Parallelized:
    second = build_frozen_model(frozen.spec, config.mesh, model.ranks, seed=config.train.seed)
    if not frozen.start:
        log.info("%s: %s, with the initial weights of train.seed", name, frozen.spec.name)
        return second
    checkpoint = open_for(frozen.spec.config, frozen.start)
    state = {"model": second.model_state()}
    check_all_taken(checkpoint, load_weights(checkpoint, state), tuple(state), control)
    log.info("%s: %s, from %s", name, frozen.spec.name, checkpoint)
    return second


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
