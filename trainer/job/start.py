"""`titan_ckpt.trainer.run`: train from Python."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titan_ckpt.trainer.config.extension import Extension
from titan_ckpt.trainer.config.model_from import fill_from
from titan_ckpt.trainer.config.toml_records import build_record, merge_sets, resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, check_config, config_type, resolve_mesh
from titan_ckpt.trainer.job.job import Outcome
from titan_ckpt.trainer.job.rank_process import RankProcess
from titan_ckpt.trainer.job.setup import run_rank
from titan_ckpt.trainer.launch.launch import is_rank
from titan_ckpt.trainer.launch.preflight import preflight
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.seams.data import DataSource
from titan_ckpt.trainer.seams.loss import Loss
from titan_ckpt.trainer.seams.model import ModelSpec
from titan_ckpt.trainer.seams.optimizer import OptimizerSpec, Schedule
from titan_ckpt.trainer.seams.step import FrozenModel, Hooks, Prepare, TrainStep
from titan_ckpt.trainer.seams.validation import Metric, Validator


def run(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    sets: Sequence[str] = (),
    model: ModelSpec | Callable[[Any], ModelSpec] = decoder,
    loss: Loss | Callable[[Any], Loss] | None = None,
    data: Callable[[Any], DataSource] | None = None,
    validation: Mapping[str, Callable[[Any], DataSource]] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    validator: Validator | None = None,
    optimizer: OptimizerSpec | None = None,
    schedule: Schedule | None = None,
    frozen: Mapping[str, Callable[[Any], FrozenModel]] | None = None,
    prepare: Prepare | None = None,
    hooks: Hooks | None = None,
    train_step: TrainStep | None = None,
    tables: Mapping[str, type] | None = None,
) -> Outcome:
    """Train in this process: as one of the ranks that torchrun started, or as the only one.

    `config` is a TOML file or its tables; `sets` are `table.key=value` laid over it. `model` is a spec, or a function that makes
    one of the table `[model]`, whose record annotates its argument; `data`, `frozen`, the sets in `validation` and perhaps
    `loss` are functions of the whole config; `tables` are the records of own tables. ConfigError, before anything is started,
    for a config or model that cannot be; other TitanErrors as of `titan-ckpt train`.
    """
    extension = Extension(
        model=model, loss=loss, data=data, validation=validation or {}, metrics=metrics or {}, validator=validator,
        optimizer=optimizer, schedule=schedule, frozen=frozen or {}, prepare=prepare, hooks=hooks, train_step=train_step,
        tables=tables or {},
    )  # fmt: skip
    checked = _resolve(config, extension, sets)
    if is_rank():
        return run_rank(checked, RankProcess.from_environment())
    resolve_mesh(checked, 1)
    preflight(checked)
    return run_rank(checked, RankProcess())


def _resolve(
    config: str | os.PathLike[str] | Mapping[str, Any], extension: Extension, sets: Sequence[str]
) -> TrainConfig:
    kind = config_type(extension)
    if isinstance(config, Mapping):
        tree, origins = copy.deepcopy(dict(config)), dict[str, str]()
        merge_sets(tree, sets, origins)
        fill_from(tree, origins)
        checked = build_record(kind, tree, origins)
    else:
        checked = resolve(kind, os.fspath(config), sets, fill_from).config
    check_config(checked)
    return checked
