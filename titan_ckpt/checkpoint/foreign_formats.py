"""Registry of the readers of foreign checkpoints. They are in `titan_ckpt.converters`, above the rooms that call them.

`titan_ckpt/__init__.py` registers them, so that no room imports a room above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_ckpt.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFormats:
    """`open_hugging_face(url)`; `name_torchtitan(checkpoint, model)`: torchtitan's checkpoint under our names."""

    open_hugging_face: Callable[[str], Checkpoint]
    name_torchtitan: Callable[[Checkpoint, Mapping[str, Any]], Checkpoint]


_registered: list[ForeignFormats] = []


def register(formats: ForeignFormats) -> None:
    """Replace the registered formats."""
    _registered[:] = [formats]


def registered() -> ForeignFormats:
    """The registered formats."""
    (formats,) = _registered
    return formats
