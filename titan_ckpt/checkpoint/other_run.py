"""A checkpoint is not written among those of another run: a job that goes on there would take it for its own newest one."""

from __future__ import annotations

from collections.abc import Mapping

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.errors import AlreadyExistsError
from titan_ckpt.format.names import OWNER, RUN_ID
from titan_ckpt.store.base import Store, read_if_any


def refuse_other_run(source: Checkpoint, target: Store) -> None:
    """AlreadyExistsError if a training job saves, or saved, to `target`, would go on from the source as its newest checkpoint,
    and has none of the source's run."""
    there = _attempts(target) if target.exists(OWNER) else {}
    if not there or source.step < max(there) or _is_of_run(source, target, there):
        return
    held = f"step {max(there)}" if len(there) == 1 else f"steps {min(there)} to {max(there)}"
    raise AlreadyExistsError(
        f"{target} is the run of another training job ({OWNER} and {held} are there), which would go on from {source} as if it "
        "had saved it itself; nothing was written. Give a URL of its own"
    )


def _is_of_run(source: Checkpoint, target: Store, there: Mapping[int, str]) -> bool:
    """Whether both have the id that the tiers of a run share, or a checkpoint of one is there."""
    run_id = read_if_any(target, RUN_ID)
    is_tier = run_id is not None and run_id == read_if_any(source.store, RUN_ID)
    return is_tier or bool({source.manifest.attempt, *_attempts(source.store).values()} & {*there.values()})


def _attempts(store: Store) -> dict[int, str]:
    """The attempt of each committed step."""
    return {info.step: info.commit.attempt for info in list_checkpoints(store) if info.commit is not None}
