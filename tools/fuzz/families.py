"""The family of a name. Each module is imported when one of its families is asked for: torch is slow to import."""

from __future__ import annotations

import importlib
from typing import Any

from tools.fuzz.family import Family

_PLACES = {
    "archives": ("archive",),
    "checkpoints": ("manifest", "commit", "metadata", "blob", "settings"),
    "evidence": ("dump", "dump_json", "box", "sidecar", "log", "packed", "incident"),
    "models": ("safetensors", "torch_file", "value", "hugging_face", "tokenizer", "chat"),
}


def family(name: str) -> Family:
    """The family `name` of `tools.fuzz.names`."""
    place = next(place for place, names in _PLACES.items() if name in names)
    module: Any = importlib.import_module(f"tools.fuzz.{place}")
    found: Family = module.FAMILIES[name]
    return found
