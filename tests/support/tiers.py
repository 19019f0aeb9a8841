"""Two tiers of a run: a second one that can be down, and savers that wait for it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.errors import TransientStoreError
from titan_ckpt.saving.saver import SaveError, Saver
from titan_ckpt.store.base import Buffer, ObjectInfo
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.retention import RetentionPolicy

KEEP_ONE = RetentionPolicy(keep_last=1)


class Target(FileStore):
    """A second tier whose writes fail while it is down."""

    is_down = False

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        if self.is_down:
            raise TransientStoreError("the second tier is down")
        return super().write(path, parts)


def committed(url: object) -> list[int]:
    return [info.step for info in list_checkpoints(str(url)) if info.state == "committed"]


def save(saver: Saver, step: int) -> None:
    saver.save({"w": torch.full((5,), float(step)), "frozen": torch.arange(90.0)}, step=step).wait()
    while saver._mirror is not None and saver._mirror.metrics().waiting:
        saver._mirror._thread.join(0.01)


def fail(saver: Saver, step: int) -> None:
    save(saver, step)
    with pytest.raises(SaveError, match=f"mirroring step {step}"):
        saver.check()
