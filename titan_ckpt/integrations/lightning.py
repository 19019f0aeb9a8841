"""Lightning: a callback that saves in the background and resumes from the newest whole checkpoint.

    trainer = Trainer(callbacks=[TitanCheckpoint("s3://bucket/run", every_n_train_steps=500)], ...)
    trainer.fit(model)

Lightning restores a job through its strategies, from a path. This callback does it in `on_fit_start`, when model and optimizers
are on their devices, through the trainer's `_checkpoint_connector` and `fit_loop` (lightning 2.6.6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from titan_ckpt.arguments import check_whole
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.errors import UsageError
from titan_ckpt.integrations.libraries import not_importable
from titan_ckpt.integrations.random_states import random_states
from titan_ckpt.integrations.run import LoopCheckpoints, own_state, read_own, restore_random, send_buffers, this_rank
from titan_ckpt.loading.load import load
from titan_ckpt.location import StrPath
from titan_ckpt.saving.options import SaveOptions

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch import __version__ as lightning_version
    from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer import call
except ImportError as error:
    raise not_importable("lightning", error) from error

RECORD = "lightning"


class TitanCheckpoint(CheckpointCallback):  # type: ignore[misc]  # not installed where this is checked
    """Saves every `every_n_train_steps` optimizer steps, and when `fit` begins goes on from the newest whole checkpoint, if any.

    Saved are model, optimizers and schedulers, the progress of all loops, the states of callbacks, precision plugin and data
    module, what hooks add to the checkpoint (`allow` lists classes of it), and for each rank its random generators and its place
    in the data. `step` resumes from that one. To start anew, give another URL.

    A data loader without a state of its own is read again from the start of its epoch, without training, to the batch where the
    saved job was. UsageError for another number of batches in an epoch, and for strategies other than one device, DDP and
    ModelParallelStrategy.
    """

    def __init__(
        self, url: StrPath, *, every_n_train_steps: int, step: int | None = None, options: SaveOptions | None = None,
        storage_options: Mapping[str, Any] | None = None, allow: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        check_whole(every_n_train_steps, "every_n_train_steps", at_least=1)
        self._every, self._step, self._allow = every_n_train_steps, step, tuple(allow)
        self._run = LoopCheckpoints(url, "lightning", options, storage_options)
        self._own: Mapping[str, Any] = {}
        self._training: Mapping[str, Any] = {}
        self._epoch_start: dict[str, Any] = {}
        self._saved_step, self._is_due = 0, False

    # Saving: a step that is followed by a validation is saved after it, since starting its data loaders draws random numbers.

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._run.check()
        step = trainer.global_step
        self._is_due = self._is_due or (step % self._every == 0 and step > self._saved_step)
        if self._is_due and not trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
            self._save(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_due and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del trainer, pl_module
        self._run.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        del trainer, pl_module
        self._run.leave(type(exception), exception, exception.__traceback__)

    def _save(self, trainer: Trainer, module: LightningModule) -> None:
        self._saved_step, self._is_due = trainer.global_step, False
        if isinstance(trainer.strategy.model, DistributedDataParallel) and trainer.strategy.model.broadcast_buffers:
            send_buffers(module)
        record = _record(trainer)
        places = {"loaders": record["loops"]["fit_loop"]["state_dict"].pop("combined_loader", [])}
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            places["epoch_start"] = self._epoch_start
        shared = {RECORD: record} if this_rank() == 0 else {}
        training = {"batches_per_epoch": _batches_per_epoch(trainer)}
        self._run.save(
            {**_state(trainer), **shared, **own_state(**places)}, step=trainer.global_step, training=training
        )

    # Resuming

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del pl_module
        _check_supported(trainer)
        step = self._run.newest() if self._step is None else self._step
        if step is None:
            return
        if trainer._checkpoint_connector._loaded_checkpoint or trainer.ckpt_path:
            raise UsageError(
                f"fit(ckpt_path=...) and the run {self._run.url}, which has step {step}, both want to be resumed"
            )
        self._load(trainer, self._run.open(step))
        self._saved_step = trainer.global_step

    def _load(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        record = checkpoint.read_all(RECORD, allow=self._allow)
        own = read_own(checkpoint)
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", record)
        load(checkpoint, _state(trainer))
        record["loops"]["fit_loop"]["state_dict"]["combined_loader"] = own.get("loaders", [])
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = record
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        connector.restore_lr_schedulers()
        connector._loaded_checkpoint = {}  # Lightning has nothing left to restore
        self._own, self._training = own, checkpoint.manifest.training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring data and random generators to where they were; by now the data loaders have begun their epoch."""
        del pl_module
        own, self._own = self._own, {}
        if not own:
            return
        batches, saved = _batches_per_epoch(trainer), self._training["batches_per_epoch"]
        if batches != saved:
            raise UsageError(
                f"the checkpoint's job had {saved} batches in an epoch on {self._training['world_size']} ranks, and this one has "
                f"{batches}: its place in the data cannot be found. Give the loader a batch size with as many"
            )
        fetcher, done = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop.batch_progress.current.ready
        start = own.get("epoch_start", {})
        is_inside = bool(start) and done > 0
        restore_random(start if is_inside else own)
        starts_itself = trainer.fit_loop.epoch_loop.restarted_on_last and not is_inside
        if trainer.fit_loop.epoch_progress.current.processed > 0 and not starts_itself:
            iter(fetcher)  # which draws a seed, as it did when the saved job began this epoch
        if is_inside:
            self._epoch_start = start
            fetcher.iterator = _rest(fetcher.iterator, 0 if own["loaders"] else done, own)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del trainer, pl_module
        self._epoch_start = {"random": random_states()}


def _rest(batches: Iterator[Any], done: int, own: Mapping[str, Any]) -> Iterator[Any]:
    """The batches after the first `done`; the random generators are set as they were saved once the first of them is here."""
    for _ in range(done):
        next(batches)
    first = next(batches)
    restore_random(own)
    yield first
    while True:  # `yield from` would start the loaders again
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield batch


def _state(trainer: Trainer) -> dict[str, Any]:
    """What all ranks have alike, or each its shard of."""
    optimizers = {"optimizer" if i == 0 else f"optimizer_{i}": each for i, each in enumerate(trainer.optimizers)}
    return {"model": trainer.lightning_module, **optimizers}


def _record(trainer: Trainer) -> dict[str, Any]:
    """What Lightning puts into a checkpoint beside weights and optimizers."""
    record: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning_version,
        "loops": trainer._checkpoint_connector._get_loops_state_dict(),
        "callbacks": call._call_callbacks_state_dict(trainer),
        "lr_schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
    }
    plugin, data = trainer.precision_plugin, trainer.datamodule
    if state := plugin.state_dict():
        record[type(plugin).__qualname__] = state
    plugin.on_save_checkpoint(record)
    if data is not None and (state := call._call_lightning_datamodule_hook(trainer, "state_dict")):
        record[type(data).__qualname__] = state
    call._call_callbacks_on_save_checkpoint(trainer, record)
    call._call_lightning_module_hook(trainer, "on_save_checkpoint", record)
    return record


def _batches_per_epoch(trainer: Trainer) -> int | None:
    """Batches of this rank in an epoch, None if the loader does not know."""
    count = trainer.num_training_batches
    return None if count == float("inf") else int(count)


def _check_supported(trainer: Trainer) -> None:
    strategy = trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy):
        raise UsageError(
            f"TitanCheckpoint cannot save under {type(strategy).__name__}; use one device, DDPStrategy or ModelParallelStrategy "
            "(FSDP2, tensor parallel)"
        )
