"""Hugging Face's Trainer: its saves and its resumes by titan-ckpt, in any store.

    trainer = Trainer(model=model, args=args, train_dataset=data)      # or a subclass, such as TRL's
    checkpoints = TrainerCheckpoints(trainer, "s3://bucket/run")
    trainer.train(resume_from_checkpoint=checkpoints.newest())

When to save is the Trainer's business (`save_strategy`, `save_steps`); what it would write into `output_dir` goes to the run
instead, in the background. The Trainer has no hook for either half, so six methods are replaced on this one object: `train`,
`_save_checkpoint`, `_load_from_checkpoint`, `_load_optimizer_and_scheduler`, `_load_scaler`, `_load_rng_state`
(transformers 5.23, trainer.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.errors import UsageError
from titan_ckpt.integrations.libraries import not_importable
from titan_ckpt.integrations.run import LoopCheckpoints, own_state, read_own, restore_random, send_buffers
from titan_ckpt.loading.load import load
from titan_ckpt.location import StrPath, parse_location
from titan_ckpt.saving.options import SaveOptions

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise not_importable("transformers", error) from error


class TrainerCheckpoints(TrainerCallback):
    """Takes over the checkpoints of one `Trainer`: make it after the trainer, on all ranks, before `train`.

    Saved are the model, the optimizer, the schedule, the scaler, the random generators of every rank and the Trainer's own
    state (`trainer_state.json`, callbacks included). `save_total_limit` becomes `RetentionPolicy(keep_last=...)` unless `options`
    has a retention; the best step is kept if `load_best_model_at_end`, and loaded when training ends. `train` returns when the
    last save is committed; a save that failed is raised at the next step, or by `train`.

    A resume on another number of ranks needs the same number of samples per optimizer step: UsageError names both if not.
    UsageError also for DeepSpeed, FSDP1, XLA, `save_only_model`, pushing checkpoints to the Hub, and hyperparameter searches.
    """

    def __init__(
        self, trainer: Trainer, url: StrPath, *, options: SaveOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        ours = {
            "train": self._train,
            "_save_checkpoint": self._save,
            "_load_from_checkpoint": self._load_nothing,
            "_load_optimizer_and_scheduler": self._load,
            "_load_scaler": self._load_nothing,
            "_load_rng_state": self._load_random,
        }
        absent = [name for name in ours if not callable(getattr(trainer, name, None))]
        if absent:
            raise UsageError(f"this {type(trainer).__name__} has no {', '.join(absent)}: give a transformers.Trainer")
        _check_supported(trainer)
        self._trainer, self._saved_steps = trainer, set[int]()
        self._best_step: int | None = None
        self._run = LoopCheckpoints(url, "transformers", options, storage_options, trainer.args.save_total_limit)
        in_use = self._run.options.in_use
        self._run.options = replace(self._run.options, in_use=lambda: in_use() | self._best_in_use())
        self._resumed: Checkpoint | None = None
        self._own: Mapping[str, Any] = {}
        self._original_train = trainer.train
        for name, method in ours.items():
            setattr(trainer, name, method)
        trainer.add_callback(self)

    def newest(self) -> str | None:
        """`URL@STEP` of the newest whole checkpoint of the run, None if it has none. All ranks call it."""
        step = self._run.newest()
        return None if step is None else f"{self._run.url}@{step}"

    # What the Trainer calls

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, state, control
        self._run.check()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del state, control
        self._run.close()
        if args.load_best_model_at_end and self._best_step is not None:
            load(self._run.open(self._best_step), {"model": self._model()})

    def _train(self, resume_from_checkpoint: Any = None, trial: Any = None, **more: Any) -> Any:
        """`Trainer.train`; `resume_from_checkpoint` is URL@STEP of this run, its number, or True for the newest."""
        if trial is not None:
            raise UsageError("a hyperparameter search cannot save by titan-ckpt: its trials would write to one run")
        self._resumed, self._own = self._to_resume(resume_from_checkpoint), {}
        try:
            if self._resumed is None:
                return self._original_train(**more)
            with tempfile.TemporaryDirectory(
                prefix="titan-ckpt-"
            ) as folder:  # the Trainer reads its state from a folder
                with open(os.path.join(folder, TRAINER_STATE_NAME), "wb") as file:
                    file.write(self._resumed.asset(TRAINER_STATE_NAME))
                return self._original_train(resume_from_checkpoint=folder, **more)
        except BaseException as error:
            self._run.leave(type(error), error, error.__traceback__)
            raise
        finally:
            self._resumed = None

    def _save(self, model: Any, trial: Any = None, **_: Any) -> None:
        trainer = self._trainer
        if trial is not None:
            raise UsageError("a hyperparameter search cannot save by titan-ckpt: its trials would write to one run")
        trainer.store_flos()
        if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
            send_buffers(model.module)
        step = trainer.state.global_step
        self._saved_steps.add(step)
        if trainer.state.best_global_step in self._saved_steps:
            self._best_step = trainer.state.best_global_step
        self._run.save(
            {**self._state(), **own_state()},
            step=step,
            training={"samples_per_step": self._samples_per_step(), "best_step": self._best_step},
            assets={TRAINER_STATE_NAME: _state_as_json(trainer)},
        )

    def _load_nothing(self, *_: Any, **__: Any) -> None:
        """The model and the scaler are loaded with the optimizer, once all are prepared."""

    def _load(self, *_: Any, **__: Any) -> None:
        checkpoint = self._resumed
        if checkpoint is None:
            return
        self._check_samples(checkpoint)
        self._own = read_own(checkpoint)
        load(checkpoint, self._state())
        self._best_step = checkpoint.manifest.training.get("best_step")

    def _load_random(self, *_: Any, **__: Any) -> None:
        restore_random(self._own)

    # What they do

    def _to_resume(self, wanted: Any) -> Checkpoint | None:
        if wanted is None or wanted is False:
            return None
        if wanted is True:
            step = self._run.newest()
            if step is None:
                raise UsageError(
                    f"{self._run.url} has no checkpoint to resume from; train(checkpoints.newest()) starts anew"
                )
            return self._run.open(step)
        if isinstance(wanted, int):
            return self._run.open(wanted)
        location = parse_location(wanted)
        if location.url != self._run.url or location.step is None:
            raise UsageError(
                f"resume_from_checkpoint is {str(location)!r}; give a step of the run, such as {self._run.url}@1000, "
                f"or True for the newest. To start from weights elsewhere, load them into the model first"
            )
        return self._run.open(location.step)

    def _state(self) -> dict[str, Any]:
        trainer = self._trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        state = {"model": self._model(), "optimizer": optimizer, "scheduler": trainer.lr_scheduler}
        scaler = getattr(trainer.accelerator, "scaler", None)
        return state if scaler is None else {**state, "scaler": scaler}

    def _model(self) -> Any:
        return self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)

    def _samples_per_step(self) -> int:
        return int(self._trainer.get_total_train_batch_size(self._trainer.args))

    def _check_samples(self, checkpoint: Checkpoint) -> None:
        """The Trainer finds its place in the data by the number of steps, which must be steps of the same size."""
        saved, here = checkpoint.manifest.training.get("samples_per_step"), self._samples_per_step()
        if saved != here and not self._trainer.args.ignore_data_skip:
            ranks = checkpoint.manifest.training.get("world_size")
            raise UsageError(
                f"{checkpoint} was trained with {saved} samples per step on {ranks} ranks; this job has {here} "
                f"(per_device_train_batch_size * gradient_accumulation_steps * ranks), and would repeat or skip samples. Change "
                f"one of them, or set ignore_data_skip=True to start the data anew"
            )

    def _best_in_use(self) -> frozenset[int]:
        if self._best_step is None or not self._trainer.args.load_best_model_at_end:
            return frozenset()
        return frozenset({self._best_step})


def _state_as_json(trainer: Trainer) -> bytes:
    """`trainer_state.json` as the Trainer writes it, with the states of its callbacks."""
    state: Any = trainer.state
    exported: dict[str, Any] = {}
    for each in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(each, ExportableState):
            exported.setdefault(type(each).__name__, []).append(each.state())
    state.stateful_callbacks = {name: found[0] if len(found) == 1 else found for name, found in exported.items()}
    return json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True).encode()


def _check_supported(trainer: Trainer) -> None:
    args, plugin = trainer.args, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    refused = {
        "DeepSpeed keeps weights and optimizer in its own engine": trainer.is_deepspeed_enabled,
        "FSDP version 1 is not supported: use fsdp_config={'version': 2}": plugin is not None
        and plugin.fsdp_version != 2,
        "XLA is not supported": getattr(trainer, "is_fsdp_xla_enabled", False),
        "save_only_model=True leaves nothing to resume from; use trainer.save_model": args.save_only_model,
        "pushing checkpoints to the Hub needs them in a folder: use hub_strategy='end'": args.push_to_hub
        and args.hub_strategy != "end",
    }
    reasons = [reason for reason, holds in refused.items() if holds]
    if reasons:
        raise UsageError(f"TrainerCheckpoints cannot save this Trainer: {'; '.join(reasons)}")
