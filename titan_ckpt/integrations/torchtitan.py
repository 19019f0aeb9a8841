"""torchtitan: a checkpoint manager that takes the place of `CheckpointManager` in a trainer's config.

    from titan_ckpt.integrations.torchtitan import TitanCheckpointManager
    config.checkpoint = TitanCheckpointManager.Config(enable=True, folder="checkpoint", interval=500)

`folder` is the run, below the trainer's dump folder or any URL. Names are torchtitan's own, so its CheckpointManager and plain
`dcp.load` read each step's folder, and `initial_load_path` reads theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.checkpoint.open import foreign_steps, list_checkpoints, open_checkpoint
from titan_ckpt.errors import UsageError
from titan_ckpt.integrations.libraries import not_importable
from titan_ckpt.integrations.random_states import random_states, set_random_states
from titan_ckpt.integrations.run import LoopCheckpoints, own_state, read_own, restore_random
from titan_ckpt.loading.load import load
from titan_ckpt.loading.policy import LoadPolicy, OnMismatch
from titan_ckpt.saving.options import SaveOptions
from titan_ckpt.store.base import Store
from titan_ckpt.store.clients.options import using
from titan_ckpt.store.open import open_store

try:
    from torchtitan.components.checkpointer.base import DATALOADER, MODEL, OPTIMIZER
    from torchtitan.components.checkpointer.dcp import CheckpointManager
except ImportError as error:
    raise not_importable("torchtitan", error) from error


class TitanCheckpointManager(CheckpointManager):  # type: ignore[misc]  # not installed where this is checked
    """Saves in the background and resumes from the newest whole step; what to save and when stays torchtitan's.

    Beyond `CheckpointManager`: digests, a commit, retention that deletes nothing that is not ours, the random generators of every
    rank, any fsspec URL, and errors of an upload at the next `save`, on all ranks. A checkpoint of other data-parallel ranks is
    loaded if the dataloader is left out (`exclude_from_loading=["dataloader"]`): UsageError says so otherwise.
    Hugging Face folders are read and written by torchtitan's own code.
    """

    save_future: Future[Any] | None

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's settings, of which `keep_latest_k` is a retention policy and `async_mode` has no effect."""

        options: SaveOptions = field(default_factory=SaveOptions)
        """How to save; its `retention`, if there is one, stands in for `keep_latest_k`."""

        storage_options: dict[str, Any] | None = None
        """Options of the store, as `titan_ckpt.Saver` takes them."""

    def __init__(self, config: Config, **components: Any) -> None:
        keep, config.keep_latest_k = config.keep_latest_k, 0  # no thread that deletes folders by their names
        try:
            super().__init__(config, **components)
        finally:
            config.keep_latest_k = keep
        if self.enable:
            self._run = LoopCheckpoints(self.folder, "torchtitan", config.options, config.storage_options, keep or None)
            self._storage_options = config.storage_options

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Start a save if one is due; the last one, and a seed checkpoint, are committed before this returns."""
        self._run.check()
        if not self._should_save(curr_step, last_step):
            return False
        if last_step:
            self._save_last_step(curr_step)
            self._run.close()
            self.save_future = None
        else:
            self._write(self._flattened_model_states_sd(), curr_step, CheckpointKind.FULL)
        return True

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **more: Any) -> None:
        """Save the last step as torchtitan prepared it: the model alone, a whole state, or a Hugging Face folder."""
        if more.get("to_hf"):
            super().dcp_save(state_dict, checkpoint_id, *args, **more)
            return
        kind = CheckpointKind.FULL if OPTIMIZER in state_dict else CheckpointKind.MODEL
        self._write(state_dict, int(checkpoint_id.rpartition("-")[2]), kind)

    @torch.no_grad()
    def _write(self, state: Mapping[str, Any], step: int, kind: CheckpointKind) -> None:
        own = own_state() if kind == CheckpointKind.FULL else {}
        handle = self._run.save({**_present(state), **own}, step=step, kind=kind)
        self.save_future = handle.future

    def _wait_for_saving(self) -> None:
        """Wait for the save under way and raise its error."""
        self._run.saver.wait()
        self.save_future = None

    def _load(self, step: int = -1) -> bool:
        """Load `step`, or the newest whole one of the run; without any, what `initial_load_path` names."""
        checkpoint = self._found(step)
        if checkpoint is None:
            return bool(super()._load(-1))
        self._read(checkpoint, self._states_to_load(model_only=checkpoint.manifest.kind == CheckpointKind.MODEL))
        return True

    def _found(self, step: int) -> Checkpoint | None:
        """The checkpoint to resume from: of this run, else one that torchtitan saved here before, or a seed."""
        found = self._run.newest() if step == -1 else step
        others = [number for number, _ in foreign_steps(self._store())]
        if found in (None, *others) and others:
            return open_checkpoint(self.folder, step=found or others[-1], storage_options=self._storage_options)
        if found is None:
            infos = list_checkpoints(self.folder, storage_options=self._storage_options)
            found = 0 if [info.step for info in infos if info.commit is not None] == [0] else None
        return None if found is None else self._run.open(found)

    def _store(self) -> Store:
        with using(self._storage_options, self.folder):
            return open_store(self.folder)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load what `initial_load_path` names: a run of ours or of torchtitan, a checkpoint of DCP, a Hugging Face folder."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        else:
            self._read(open_checkpoint(checkpoint_id, storage_options=self._storage_options), state_dict)

    def _read(self, checkpoint: Checkpoint, states: Mapping[str, Any]) -> None:
        """Fill `states`: the optimizer by its names, of which each pipeline stage has its own."""
        states = _present(states)
        optimizers, loader = states.get(OPTIMIZER), states.get(DATALOADER)
        if loader is not None:
            _check_ranks(checkpoint, loader)
        if optimizers is not None:
            states[OPTIMIZER] = optimizers.state_dict()
        is_ours = optimizers is not None and "loop" in checkpoint.manifest.training
        own = read_own(checkpoint) if is_ours else {}
        load(checkpoint, states, policy=LoadPolicy(extra=OnMismatch.ALLOW))
        self.states[MODEL].load_state_dict(dict(states))
        if optimizers is not None:
            optimizers.load_state_dict(states[OPTIMIZER])
        restore_random(own)
        if own and loader is not None:
            _start_without_drawing(loader)

    def _find_load_step(self, folder: str = "") -> int:
        """-1: what is in the folder was looked at by `_found`."""
        del folder
        return -1

    def _maybe_wait_for_staging(self) -> None:
        """Staging is done when `save` returns."""

    def _close(self) -> None:
        """Wait for the save under way and raise its error."""
        if hasattr(self, "_run"):
            self._run.close()

    def __del__(self) -> None:
        """A save ends with `close`, not whenever the garbage is collected."""


def _present(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` without parts that the trainer does not have, such as a dataloader of None."""
    return {name: value for name, value in state.items() if value is not None}


def _start_without_drawing(loader: Any) -> None:
    """Let the loader's next iterator leave the random generators alone: it draws a seed, which the saved job did long ago."""
    start = getattr(loader, "_get_iterator", None)  # of torch's DataLoader and torchdata's StatefulDataLoader
    if start is None:
        return

    def once() -> Any:
        del loader._get_iterator
        states = random_states()
        try:
            return start()
        finally:
            set_random_states(states)

    loader._get_iterator = once


def _check_ranks(checkpoint: Checkpoint, loader: Any) -> None:
    """UsageError if the dataloader's places are those of another number of data-parallel ranks."""
    here = getattr(loader, "dp_world_size", None)
    name = f"{DATALOADER}.world_size"
    if here is None or name not in checkpoint.manifest.objects_by_fqn:
        return
    saved = checkpoint.read_all(name)
    if saved != here:
        raise UsageError(
            f"{checkpoint}: its dataloader has the places of {saved} data-parallel ranks, and this job has {here}. Resume on "
            f"as many, or start the data anew: exclude_from_loading=[{DATALOADER!r}]"
        )
