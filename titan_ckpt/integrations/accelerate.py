"""Accelerate: `save_state` and `load_state` by titan-ckpt, in any store.

with AcceleratorCheckpoints(accelerator, "s3://bucket/run") as checkpoints:
    step = checkpoints.load_state() or 0            # after accelerator.prepare(...); None if there is nothing
    ...
    checkpoints.save_state(step)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.errors import UsageError
from titan_ckpt.integrations.libraries import not_importable
from titan_ckpt.integrations.random_states import random_states
from titan_ckpt.integrations.run import (
    LoopCheckpoints,
    own_state,
    read_own,
    restore_random,
    send_buffers,
    world_size,
)
from titan_ckpt.loading.load import load
from titan_ckpt.location import StrPath
from titan_ckpt.saving.options import SaveHandle, SaveOptions

try:
    from accelerate import Accelerator
except ImportError as error:
    raise not_importable("accelerate", error) from error

log = logging.getLogger(__name__)


class AcceleratorCheckpoints:
    """The checkpoints of one `Accelerator`. Make, use and close it on all ranks together; a context manager.

    Saved are all that was prepared (models, optimizers, schedulers, the states and epochs of data loaders), what was given to
    `register_for_checkpointing`, the scaler, and the random generators of every rank; the first of a kind as `model`, others
    as `model_1`. `ProjectConfiguration(total_limit=...)` becomes `RetentionPolicy(keep_last=...)` unless `options` has a
    retention. UsageError for DeepSpeed, Megatron-LM, FSDP1, XLA, and for hooks on saving and loading, which need a folder.
    """

    def __init__(
        self, accelerator: Accelerator, url: StrPath, *, options: SaveOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        _check_supported(accelerator)
        self._accelerator = accelerator
        limit = accelerator.project_configuration.total_limit
        self._own: Mapping[str, Any] = {}
        self._epochs: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._is_warned = False
        self._run = LoopCheckpoints(url, "accelerate", options, storage_options, limit)

    def __enter__(self) -> AcceleratorCheckpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._run.leave(kind, error, trace)

    def save_state(self, step: int) -> SaveHandle:
        """Start to save everything as `step`; returns when tensors may change. All ranks call it.

        Raises the error of the save before, and SaveError on every rank if this one cannot start on one of them.
        """
        _check_hooks(self._accelerator._save_model_state_pre_hook, "save")
        if not self._accelerator.sync_gradients:
            raise UsageError(
                f"step {step}: between the micro-batches of an optimizer step; the gradients summed so far are not saved, so a "
                "resume would lose them. Save where accelerator.sync_gradients is True"
            )
        if _are_buffers_sent(self._accelerator):
            for model in self._accelerator._models:
                send_buffers(model)
        training = {"schedulers_per_rank": self._steps_per_rank(), "stateful_loaders": self._stateful()}
        return self._run.save({**self._shared(), **own_state(**self._places())}, step=step, training=training)

    def load_state(self, step: int | None = None) -> int | None:
        """Load `step`, or the newest whole checkpoint; returns its step, None if the run has none. After `prepare`, on all ranks.

        On another number of ranks everything is loaded but what cannot be told: UsageError for data loaders with a state of their
        own, and for schedulers that Accelerate steps once for each rank.
        """
        _check_hooks(self._accelerator._load_model_state_pre_hook, "load")
        found = self._run.newest() if step is None else step
        if found is None:
            return None
        checkpoint = self._run.open(found)
        self._check_ranks(checkpoint)
        state, own = self._shared(), read_own(checkpoint)
        _check_parts(checkpoint, state)
        load(checkpoint, state)
        counters = state["accelerate"]
        self._accelerator.step = counters["step"]
        for loader, epoch in zip(self._accelerator._dataloaders, counters["epochs"], strict=True):
            loader.iteration = epoch
        for loader in self._accelerator._dataloaders:
            name = self._name_of(loader)
            if name in own.get("loaders", {}):
                loader.load_state_dict(own["loaders"][name])
            _set_generator(loader, own.get("generators", {}).get(name, {}))
        restore_random(own)
        self._own = own
        return found

    def rest_of_epoch(self, loader: Any, num_batches: int = 0) -> Iterator[Any]:
        """The batches of a prepared data loader after the first `num_batches` of its epoch, which the saved job has had.

        Iterate by it in every epoch, with 0 where nothing is skipped: it notes the random states that decide an epoch's order, so
        that a job that resumes within the epoch has the same order, and goes on drawing where the saved one stopped. A loader
        with a state of its own (`use_stateful_dataloader`) finds its place alone.
        """
        name = self._name_of(loader)
        start = self._own.get("starts", {}).get(name) if num_batches else None
        if start is None:
            start = {"random": random_states(), **_generator_of(loader)}
        _set_generator(loader, start)
        restore_random(start)
        is_stateful = name in self._stateful()
        if is_stateful and not num_batches:
            loader.load_state_dict({})  # forget the iterator that `prepare` made, with a seed: so every epoch draws one
        skip = 0 if is_stateful else num_batches
        rest = self._accelerator.skip_first_batches(loader, skip) if skip else loader
        rest.iteration = loader.iteration
        self._epochs[name] = (rest, start)
        for number, batch in enumerate(rest):
            if number == 0 and num_batches:
                restore_random(self._own)
            yield batch
        del self._epochs[name]
        loader.iteration = rest.iteration

    def check(self) -> None:
        """Raise the error of a save that failed, on any rank. Call it every step."""
        self._run.check()

    def close(self) -> None:
        """Wait for the save under way and raise its error."""
        self._run.close()

    def _shared(self) -> dict[str, Any]:
        """What all ranks have alike, or each its shard of."""
        accelerator = self._accelerator
        models = [accelerator.unwrap_model(each, keep_torch_compile=False) for each in accelerator._models]
        optimizers = [each.optimizer for each in accelerator._optimizers]
        state: dict[str, Any] = {
            **_numbered("model", models),
            **_numbered("optimizer", optimizers),
            **_numbered("scheduler", accelerator._schedulers),
            **_numbered("registered", accelerator._custom_objects),
            "accelerate": {
                "step": accelerator.step,
                "epochs": [self._epoch(each) for each in accelerator._dataloaders],
            },
        }
        return state if accelerator.scaler is None else {**state, "scaler": accelerator.scaler}

    def _is_inside(self, loader: Any) -> bool:
        """Whether the loader is within an epoch, before its last batch."""
        now = self._epochs.get(self._name_of(loader), (loader,))[0]
        return self._is_active(now) and not now.end_of_dataloader

    def _is_active(self, loader: Any) -> bool:
        return any(each is loader for each in self._accelerator.gradient_state.dataloader_references)

    def _epoch(self, loader: Any) -> int:
        """The epoch of the next batch: a loader counts it when it is asked for a batch after the last one."""
        now = self._epochs.get(self._name_of(loader), (loader,))[0]
        return int(now.iteration) + (self._is_active(now) and now.end_of_dataloader)

    def _places(self) -> dict[str, Any]:
        """Where this rank is in its data: states of loaders that have one, of generators, and those at the start of an epoch."""
        loaders = {self._name_of(each): each for each in self._accelerator._dataloaders}
        inside = [name for name, each in loaders.items() if self._is_inside(each)]
        unknown = [name for name in inside if name not in self._epochs]
        if unknown and not self._is_warned:
            self._is_warned = True
            log.warning(
                "%s: within an epoch, whose order is not saved: iterate by rest_of_epoch to resume in the same order",
                ", ".join(unknown),
            )
        return {
            "starts": {name: self._epochs[name][1] for name in inside if name in self._epochs},
            "generators": {name: found for name, each in loaders.items() if (found := _generator_of(each))},
            "loaders": {name: loaders[name].state_dict() for name in self._stateful() if name in inside},
        }

    def _name_of(self, loader: Any) -> str:
        for number, each in enumerate(self._accelerator._dataloaders):
            if each is loader:
                return f"loader_{number}"
        raise UsageError(
            "this data loader was not prepared by the accelerator, so its place is not saved: prepare it first"
        )

    def _stateful(self) -> list[str]:
        loaders = self._accelerator._dataloaders
        return [self._name_of(each) for each in loaders if getattr(each, "use_stateful_dataloader", False)]

    def _steps_per_rank(self) -> bool:
        return any(each.step_with_optimizer and not each.split_batches for each in self._accelerator._schedulers)

    def _check_ranks(self, checkpoint: Checkpoint) -> None:
        """UsageError for what another number of ranks cannot take over."""
        training = checkpoint.manifest.training
        saved, here = training["world_size"], world_size()
        if saved == here:
            return
        what = f"{checkpoint} was saved by {saved} ranks, and this job has {here}"
        if training["schedulers_per_rank"] or self._steps_per_rank():
            raise UsageError(
                f"{what}: Accelerate steps a prepared scheduler once for each rank, so its place in the schedule would be "
                "another. Use Accelerator(step_scheduler_with_optimizer=False) or split_batches=True in both jobs"
            )
        if training["stateful_loaders"] or self._stateful():
            raise UsageError(
                f"{what}: the place of a stateful data loader cannot be divided among other ranks. Resume on {saved}, or use "
                "plain data loaders in both jobs"
            )


def _check_parts(checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
    """UsageError if the saved job had prepared or registered more than this one has."""
    manifest = checkpoint.manifest
    saved = {name.partition(".")[0] for name in [*manifest.by_fqn, *manifest.objects_by_fqn]}
    more = sorted(name for name in saved - {*state} if not name.startswith("rank_"))
    if more:
        raise UsageError(
            f"{checkpoint} has {', '.join(more)}, which this job has not prepared or registered, so that it would be lost: "
            "prepare the same objects, in the same order, and register_for_checkpointing what was registered"
        )


def _generator_of(loader: Any) -> dict[str, Any]:
    """The state of the generator that a loader shares among the ranks; empty if it has none."""
    generator = getattr(loader, "synchronized_generator", None)
    return {} if generator is None else {"generator": generator.get_state()}


def _set_generator(loader: Any, state: Mapping[str, Any]) -> None:
    """Set it as `_generator_of` returned it. On another number of ranks there may be none; then epochs get another order."""
    if "generator" in state and _generator_of(loader):
        loader.synchronized_generator.set_state(state["generator"])


def _numbered(name: str, objects: list[Any]) -> dict[str, Any]:
    return {name if i == 0 else f"{name}_{i}": each for i, each in enumerate(objects)}


def _are_buffers_sent(accelerator: Accelerator) -> bool:
    """Whether the models are in DistributedDataParallel, and it sends buffers."""
    handler = accelerator.ddp_handler
    return accelerator.distributed_type.value.startswith("MULTI_") and (handler is None or handler.broadcast_buffers)


def _check_supported(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_") and not accelerator.is_fsdp2:
        more = " version 1: use FullyShardedDataParallelPlugin(fsdp_version=2)" if kind == "FSDP" else ""
        raise UsageError(f"AcceleratorCheckpoints cannot save {kind}{more}; DDP and FSDP2 are supported")


def _check_hooks(hooks: Mapping[Any, Any], what: str) -> None:
    if hooks:
        names = ", ".join(getattr(hook, "__qualname__", str(hook)) for hook in hooks.values())
        raise UsageError(
            f"register_{what}_state_pre_hook: {names} would {what} files in a folder, and there is none. Remove it, and give "
            "what it keeps to register_for_checkpointing"
        )
