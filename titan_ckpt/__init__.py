"""titan-ckpt: checkpoint-centric training, resharding, hang debugging and Hugging Face conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titan_ckpt.checkpoint import foreign_formats
from titan_ckpt.lazy import lazy_names
from titan_ckpt.version import __version__

if TYPE_CHECKING:
    from titan_ckpt.check.diff import diff
    from titan_ckpt.check.verify import verify
    from titan_ckpt.checkpoint.checkpoint import Checkpoint
    from titan_ckpt.checkpoint.open import CheckpointInfo, list_checkpoints, open_checkpoint
    from titan_ckpt.converters.convert import convert
    from titan_ckpt.dcp.storage import StorageReader, StorageWriter
    from titan_ckpt.errors import TitanError
    from titan_ckpt.loading.load import load
    from titan_ckpt.loading.policy import LoadPolicy, LoadReport
    from titan_ckpt.resharding.reshard import plan_reshard, run_plan
    from titan_ckpt.resharding.whole import reshard
    from titan_ckpt.resharding.workers import Workers
    from titan_ckpt.saving.options import SaveOptions, SaveReport
    from titan_ckpt.saving.saver import Saver, save
    from titan_ckpt.sharding.mesh import MeshSpec
    from titan_ckpt.store.base import Store
    from titan_ckpt.store.open import open_store
    from titan_ckpt.upkeep.copy import CopyReport, cp
    from titan_ckpt.upkeep.pruning import PruneReport, prune
    from titan_ckpt.upkeep.retention import RetentionPolicy

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "CopyReport",
    "LoadPolicy",
    "LoadReport",
    "MeshSpec",
    "PruneReport",
    "RetentionPolicy",
    "SaveOptions",
    "SaveReport",
    "Saver",
    "StorageReader",
    "StorageWriter",
    "Store",
    "TitanError",
    "Workers",
    "__version__",
    "convert",
    "cp",
    "diff",
    "list_checkpoints",
    "load",
    "open_checkpoint",
    "open_store",
    "plan_reshard",
    "prune",
    "reshard",
    "run_plan",
    "save",
    "verify",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Checkpoint": "checkpoint.checkpoint",
        "CheckpointInfo": "checkpoint.open",
        "CopyReport": "upkeep.copy",
        "LoadPolicy": "loading.policy",
        "LoadReport": "loading.policy",
        "MeshSpec": "sharding.mesh",
        "PruneReport": "upkeep.pruning",
        "RetentionPolicy": "upkeep.retention",
        "SaveOptions": "saving.options",
        "SaveReport": "saving.options",
        "Saver": "saving.saver",
        "StorageReader": "dcp.storage",
        "StorageWriter": "dcp.storage",
        "Store": "store.base",
        "TitanError": "errors",
        "Workers": "resharding.workers",
        "__version__": "version",
        "convert": "converters.convert",
        "cp": "upkeep.copy",
        "diff": "check.diff",
        "list_checkpoints": "checkpoint.open",
        "load": "loading.load",
        "open_checkpoint": "checkpoint.open",
        "open_store": "store.open",
        "plan_reshard": "resharding.reshard",
        "prune": "upkeep.pruning",
        "reshard": "resharding.whole",
        "run_plan": "resharding.reshard",
        "save": "saving.saver",
        "verify": "check.verify",
    },
)


def _open_hugging_face(url: str) -> Checkpoint:
    from titan_ckpt.converters.hf.checkpoint import open_hf_checkpoint  # hardly any run needs the converters

    return open_hf_checkpoint(url)


def _name_torchtitan(checkpoint: Checkpoint, model: Mapping[str, Any]) -> Checkpoint:
    from titan_ckpt.converters.torchtitan_checkpoint import under_our_names  # the same

    return under_our_names(checkpoint, model)


foreign_formats.register(hugging_face=_open_hugging_face, torchtitan=_name_torchtitan)
