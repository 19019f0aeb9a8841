"""From a microbatch of the loader to what the model sees: on the device, with what `prepare` adds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.resume import check_all_taken, load_weights, open_for
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.parallelize import build_frozen_model
from titan_ckpt.trainer.parallel.stage_forward import on
from titan_ckpt.trainer.seams.boundary import calling, kind_of, refuse
from titan_ckpt.trainer.seams.data import checked_fields
from titan_ckpt.trainer.seams.step import FrozenModel

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
