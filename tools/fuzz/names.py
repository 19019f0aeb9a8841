"""The families by name, with the modules whose coverage guides each. Imports nothing that is fuzzed."""

from __future__ import annotations

_FORMAT, _PARSING, _READ = "titan_ckpt.format.", "titan_ckpt.parsing.", "titan_ckpt.debug.read."
_MODULES: dict[str, tuple[str, ...]] = {
    "manifest": (_FORMAT, _PARSING, "titan_ckpt.sharding."),
    "commit": (_FORMAT, _PARSING),
    "metadata": (_FORMAT, _PARSING),
    "blob": (_FORMAT, _PARSING),
    "dump": (_READ, _PARSING),
    "dump_json": (_READ, _PARSING),
    "box": (_READ, "titan_ckpt.debug.incident."),
    "sidecar": ("titan_ckpt.debug.", _PARSING),
    "log": (_READ, "titan_ckpt.tui.data."),
    "archive": (_READ + "archives.", _PARSING),
    "packed": (_READ, _PARSING, "titan_ckpt.tui.data."),
    "safetensors": ("titan_ckpt.converters.", _PARSING),
    "torch_file": ("titan_ckpt.converters.torch_file", _FORMAT, _PARSING),
    "value": (_PARSING,),
    "hugging_face": ("titan_ckpt.converters.", _PARSING),
    "tokenizer": ("titan_ckpt.converters.", "titan_ckpt.trainer.data.tokenizer", _PARSING),
    "chat": ("titan_ckpt.trainer.data.", _PARSING),
    "settings": (
        "titan_ckpt.sharding.", "titan_ckpt.resharding.placement_rules", "titan_ckpt.location", "titan_ckpt.tui.data.metrics",
    ),
    "incident": ("titan_ckpt.debug.",),
}  # fmt: skip
FAMILIES = tuple(_MODULES)


def modules_of(family: str) -> tuple[str, ...]:
    """Prefixes of modules."""
    return _MODULES[family]
