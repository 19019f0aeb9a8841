"""Registry of the readers of foreign checkpoints. They are in `titan_ckpt.converters`, above the rooms that call them.

`titan_ckpt/__init__.py` registers them, so that no room imports a room above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_ckpt.checkpoint.checkpoint import Checkpoint

_readers: dict[str, Callable[..., Checkpoint]] = {}


def register(
    *,
    hugging_face: Callable[[str], Checkpoint],
    torchtitan: Callable[[Checkpoint, Mapping[str, Any]], Checkpoint],
) -> None:
    """Replace the readers."""
    _readers.update(hugging_face=hugging_face, torchtitan=torchtitan)


def open_hugging_face(url: str) -> Checkpoint:
    """The Hugging Face model at `url` as a model-only checkpoint of step 0."""
    return _readers["hugging_face"](url)


def name_torchtitan(checkpoint: Checkpoint, model: Mapping[str, Any]) -> Checkpoint:
    """torchtitan's `checkpoint` under our names; `model` is a config's `[model]` table."""
    return _readers["torchtitan"](checkpoint, model)
