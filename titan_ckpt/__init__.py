"""titan-ckpt: checkpoint-centric training, resharding, hang debugging and Hugging Face conversion.

Names are loaded on first use, so that the command line starts without importing torch.

`save`, `load`, `verify` and `diff` are functions, and also the submodules that hold them: `titan_ckpt.save(url, state, step=1)`
and `from titan_ckpt.save import Saver` both work, because these four modules can be called.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from titan_ckpt import foreign_formats
from titan_ckpt.version import __version__

if TYPE_CHECKING:
    from titan_ckpt.checkpoint import Checkpoint, CheckpointInfo, list_checkpoints, open_checkpoint
    from titan_ckpt.dcp import StorageReader, StorageWriter
    from titan_ckpt.diff import diff
    from titan_ckpt.errors import TitanError
    from titan_ckpt.load import LoadPolicy, load
    from titan_ckpt.mesh import MeshSpec
    from titan_ckpt.reshard import plan_reshard, run_plan
    from titan_ckpt.retention import RetentionPolicy, prune
    from titan_ckpt.save import SaveOptions, Saver, save
    from titan_ckpt.store import Store
    from titan_ckpt.store_open import open_store
    from titan_ckpt.verify import verify

_HOMES = {
    "Checkpoint": "titan_ckpt.checkpoint",
    "CheckpointInfo": "titan_ckpt.checkpoint",
    "LoadPolicy": "titan_ckpt.load",
    "MeshSpec": "titan_ckpt.mesh",
    "RetentionPolicy": "titan_ckpt.retention",
    "SaveOptions": "titan_ckpt.save",
    "Saver": "titan_ckpt.save",
    "StorageReader": "titan_ckpt.dcp",
    "StorageWriter": "titan_ckpt.dcp",
    "Store": "titan_ckpt.store",
    "TitanError": "titan_ckpt.errors",
    "list_checkpoints": "titan_ckpt.checkpoint",
    "open_checkpoint": "titan_ckpt.checkpoint",
    "open_store": "titan_ckpt.store_open",
    "plan_reshard": "titan_ckpt.reshard",
    "prune": "titan_ckpt.retention",
    "run_plan": "titan_ckpt.reshard",
}
_CALLABLE = ("diff", "load", "save", "verify")

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "LoadPolicy",
    "MeshSpec",
    "RetentionPolicy",
    "SaveOptions",
    "Saver",
    "StorageReader",
    "StorageWriter",
    "Store",
    "TitanError",
    "__version__",
    "diff",
    "list_checkpoints",
    "load",
    "open_checkpoint",
    "open_store",
    "plan_reshard",
    "prune",
    "run_plan",
    "save",
    "verify",
]


class _CallableModule(ModuleType):
    """A submodule that bears the name of its main function: a call of the one is a call of the other."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._main(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._main)

    @property
    def _main(self) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])


class _Package(ModuleType):
    """This package: the import system sets each submodule as an attribute of it, and the four of them become callable then."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLABLE and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _open_hugging_face(url: str) -> Checkpoint:
    from titan_ckpt.converters.hf_checkpoint import open_hf_checkpoint  # hardly any run needs the converters

    return open_hf_checkpoint(url)


def _name_torchtitan(checkpoint: Checkpoint, model: Mapping[str, Any]) -> Checkpoint:
    from titan_ckpt.converters.torchtitan_checkpoint import under_our_names  # the same

    return under_our_names(checkpoint, model)


foreign_formats.register(
    foreign_formats.ForeignFormats(open_hugging_face=_open_hugging_face, name_torchtitan=_name_torchtitan)
)


def __getattr__(name: str) -> Any:
    if name in _CALLABLE:
        return importlib.import_module(f"titan_ckpt.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'titan_ckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
