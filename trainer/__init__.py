"""The parallel trainer, and what its users build on.

    run("my.toml", model=my_spec)          # or: titan-ckpt train my.toml --module my_model.py

A model of one's own is a `ModelSpec`: how to build it, and by patterns of FQNs how each kind of parallelism divides it. `Loss`,
`DataSource` and the others are protocols: any object with these methods will do. docs/extending.md leads through all of them.

Rooms, top down: job, launch, data, config, parallel and report, model; device_mesh and seams below them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if __name__ != "titan_ckpt.trainer":
    raise ImportError("import titan_ckpt.trainer: the folder trainer/ installs only as a part of titan_ckpt")

from titan_ckpt.lazy import lazy_names

if TYPE_CHECKING:
    from titan_ckpt.trainer.data.batches import preference_pairs
    from titan_ckpt.trainer.job.job import Outcome
    from titan_ckpt.trainer.job.start import run
    from titan_ckpt.trainer.model.attention import Attend, SdpaAttend
    from titan_ckpt.trainer.model.decoder import ModelConfig, decoder
    from titan_ckpt.trainer.model.experts import Experts, ExpertsConfig, MixtureOfExperts, Router
    from titan_ckpt.trainer.model.head import LmHead
    from titan_ckpt.trainer.parallel.initialize import fill_initial
    from titan_ckpt.trainer.seams.data import DataSource
    from titan_ckpt.trainer.seams.loss import CrossEntropy, Loss, LossInModel
    from titan_ckpt.trainer.seams.model import (
        Colwise,
        Constant,
        Head,
        ModelSpec,
        Normal,
        Region,
        Rowwise,
        Shared,
        Vocab,
        Whole,
    )
    from titan_ckpt.trainer.seams.optimizer import OptimizerSpec, Schedule
    from titan_ckpt.trainer.seams.step import FrozenModel, Hooks, Prepare, StepModel, TrainStep
    from titan_ckpt.trainer.seams.validation import Accuracy, Evaluation, Means, Metric, Validator

__all__ = [
    "Accuracy",
    "Attend",
    "Colwise",
    "Constant",
    "CrossEntropy",
    "DataSource",
    "Evaluation",
    "Experts",
    "ExpertsConfig",
    "FrozenModel",
    "Head",
    "Hooks",
    "LmHead",
    "Loss",
    "LossInModel",
    "Means",
    "Metric",
    "MixtureOfExperts",
    "ModelConfig",
    "ModelSpec",
    "Normal",
    "OptimizerSpec",
    "Outcome",
    "Prepare",
    "Region",
    "Router",
    "Rowwise",
    "Schedule",
    "SdpaAttend",
    "Shared",
    "StepModel",
    "TrainStep",
    "Validator",
    "Vocab",
    "Whole",
    "decoder",
    "fill_initial",
    "preference_pairs",
    "run",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Accuracy": "seams.validation",
        "Attend": "model.attention",
        "Colwise": "seams.model",
        "Constant": "seams.model",
        "CrossEntropy": "seams.loss",
        "DataSource": "seams.data",
        "Evaluation": "seams.validation",
        "Experts": "model.experts",
        "ExpertsConfig": "model.experts",
        "FrozenModel": "seams.step",
        "Head": "seams.model",
        "Hooks": "seams.step",
        "LmHead": "model.head",
        "Loss": "seams.loss",
        "LossInModel": "seams.loss",
        "Means": "seams.validation",
        "Metric": "seams.validation",
        "MixtureOfExperts": "model.experts",
        "ModelConfig": "model.decoder",
        "ModelSpec": "seams.model",
        "Normal": "seams.model",
        "OptimizerSpec": "seams.optimizer",
        "Outcome": "job.job",
        "Prepare": "seams.step",
        "Region": "seams.model",
        "Router": "model.experts",
        "Rowwise": "seams.model",
        "Schedule": "seams.optimizer",
        "SdpaAttend": "model.attention",
        "Shared": "seams.model",
        "StepModel": "seams.step",
        "TrainStep": "seams.step",
        "Validator": "seams.validation",
        "Vocab": "seams.model",
        "Whole": "seams.model",
        "decoder": "model.decoder",
        "fill_initial": "parallel.initialize",
        "preference_pairs": "data.batches",
        "run": "job.start",
    },
)
