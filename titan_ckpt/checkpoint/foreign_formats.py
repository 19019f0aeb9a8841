"""Readers of other people's checkpoints, which stand in `titan_ckpt.converters`, above the rooms that call them.

The package registers them when it is imported (`titan_ckpt/__init__.py`), so that no room imports one that stands above it.
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
    """Take `formats` in place of those registered before."""
    _registered[:] = [formats]


def registered() -> ForeignFormats:
    """The formats in use."""
    (formats,) = _registered
    return formats
