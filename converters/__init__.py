"""Hugging Face, torchtitan and plain torch files, to and from checkpoints."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "titan_ckpt.converters":
    raise ImportError("import titan_ckpt.converters: the folder converters/ installs only as a part of titan_ckpt")

if TYPE_CHECKING:
    from titan_ckpt.converters.export import ExportReport, export_hf
    from titan_ckpt.converters.hf_checkpoint import open_hf_checkpoint
    from titan_ckpt.converters.hf_source import HfModel, open_hf
    from titan_ckpt.converters.importing import ImportReport, import_hf

_HOMES = {
    "ExportReport": "titan_ckpt.converters.export",
    "HfModel": "titan_ckpt.converters.hf_source",
    "ImportReport": "titan_ckpt.converters.importing",
    "export_hf": "titan_ckpt.converters.export",
    "import_hf": "titan_ckpt.converters.importing",
    "open_hf": "titan_ckpt.converters.hf_source",
    "open_hf_checkpoint": "titan_ckpt.converters.hf_checkpoint",
}

__all__ = ["ExportReport", "HfModel", "ImportReport", "export_hf", "import_hf", "open_hf", "open_hf_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'titan_ckpt.converters' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
