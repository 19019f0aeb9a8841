"""A checkpoint is not written among those of another run: a job that goes on there would take it for its own newest one."""

from __future__ import annotations

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.errors import AlreadyExistsError
from titan_ckpt.format.names import OWNER
from titan_ckpt.store.base import Store


def refuse_other_run(source: Checkpoint, target: Store) -> None:
    """AlreadyExistsError if a training job saves, or saved, to `target`, and none of its checkpoints is of the source's run."""
    there = _attempts(target) if target.exists(OWNER) else {}
    if not there or {source.manifest.attempt, *_attempts(source.store).values()} & set(there.values()):
        return
    steps = sorted(there)
    held = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    raise AlreadyExistsError(
        f"{target} is the run of another training job ({OWNER} and {held} are there), which would go on from {source} as if it "
        "had saved it itself; nothing was written. Give a URL of its own"
    )


def _attempts(store: Store) -> dict[int, str]:
    """The attempt of each committed step."""
    return {info.step: info.commit.attempt for info in list_checkpoints(store) if info.commit is not None}
