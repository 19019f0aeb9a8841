"""titan-ckpt: checkpoint-centric training, resharding, hang debugging and Hugging Face conversion.

Names are loaded on first use, so that the command line starts without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

__version__ = "0.1.0"

_HOMES: dict[str, str] = {
    "Store": "titan_ckpt.store",
    "open_store": "titan_ckpt.store",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'titan_ckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
