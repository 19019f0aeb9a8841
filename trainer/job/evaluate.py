"""Evaluation of a checkpoint on a mesh, without training: the mean loss and metrics of each validation set."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import count

from torch import Tensor

from titan_ckpt.arguments import OnProgress
from titan_ckpt.errors import ConfigError, LoadContractError
from titan_ckpt.loading.load import load
from titan_ckpt.loading.policy import LoadPolicy
from titan_ckpt.trainer.config.train_config import TrainConfig, resolve_mesh
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.frozen_weights import load_base
from titan_ckpt.trainer.job.own_parts import preparation
from titan_ckpt.trainer.job.rank_process import RankContext, RankProcess, pick_device, process_group
from titan_ckpt.trainer.job.resume import Start, check_all_taken, check_model, live_state, load_weights, open_for
from titan_ckpt.trainer.job.setup import build_model, open_data, open_validation
from titan_ckpt.trainer.job.validation import Validation
from titan_ckpt.trainer.model.lora import adapters_of
from titan_ckpt.trainer.parallel.optimizer import Optimizer, build_optimizer
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.report.logs import run_folder

HELD_OUT = "held out"  # the name of `validation.fraction` in the answer


def evaluate_rank(
    config: TrainConfig,
    process: RankProcess,
    url: str,
    step: int,
    *,
    averaged: bool,
    on_progress: OnProgress,
) -> dict[str, dict[str, float]]:
    """The numbers of each set, the same on every rank; `averaged` takes the averages of `optimizer.ema_decay` for weights.

    `on_progress` hears how many microbatches of how many this rank has done.
    """
    mesh = resolve_mesh(config, process.world_size)
    device = pick_device(config.train.device, process.local_rank)
    folder = run_folder(config.log.folder, "")
    context = RankContext(config=config, process=process, mesh=mesh, device=device, folder=folder)
    with process_group(context):
        control = ControlGroup(timeout_s=config.train.init_timeout_s)
        data = open_data(config, control, is_writer=process.local_rank == 0)
        url, step = control.broadcast((url, step))  # of a run that trains on, ranks may have found different steps
        start = Start(checkpoint=open_for(config.model, url, step=step), is_own=True)
        model = build_model(context)
        if config.lora.rank:
            load_base(config.resume.from_, start, model, control)
        optimizer = _load(config, start, model, control, averaged=averaged)
        prepare = preparation(config, start, model, control).run
        validation = open_validation(config, model, control, data, prepare)
        if not validation.batches():
            raise ConfigError("there is nothing to evaluate: give validation.sets, or the run's validation.fraction")

        with optimizer.averaged() if optimizer is not None else nullcontext():
            return _all_sets(validation, step, on_progress)


def _all_sets(validation: Validation, step: int, on_progress: OnProgress) -> dict[str, dict[str, float]]:
    total, number = sum(len(batch.microbatches) for batch in validation.batches().values()), count(1)

    def prepare(microbatch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        on_progress(next(number), total)
        return validation.prepare(microbatch)

    counted = replace(validation, prepare=prepare)
    return {name or HELD_OUT: numbers for name, numbers, _ in counted.run(step)}


def _load(
    config: TrainConfig, start: Start, model: Parallelized, control: ControlGroup, *, averaged: bool
) -> Optimizer | None:
    """Load the weights; with `averaged` the optimizer's state too, which has the averages."""
    checkpoint = start.checkpoint
    assert checkpoint is not None
    check_model(checkpoint, model.spec.config)
    if not averaged:
        state = live_state(model, None)
        check_all_taken(checkpoint, load_weights(checkpoint, [state]), tuple(state), control)
        return None
    if not config.optimizer.ema_decay:
        raise LoadContractError(f"{checkpoint} has no averages of the weights: its run had optimizer.ema_decay = 0")
    adapters = adapters_of(model.named_parameters())
    optimizer = build_optimizer(model, config.optimizer, only=adapters or None, spec=config.extension.optimizer)
    load(checkpoint, live_state(model, optimizer), policy=LoadPolicy(extra="allow"))
    return optimizer
