"""The nesting of the state that a checkpoint was saved from."""

from __future__ import annotations

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.errors import NotFoundError, UsageError
from titan_ckpt.format.dcp_read import dcp_paths
from titan_ckpt.format.names import METADATA
from titan_ckpt.format.own_step import read_index
from titan_ckpt.format.structure import Structure, of_paths


def nesting(checkpoint: Checkpoint) -> Structure | None:
    """The structure in the manifest; in checkpoints of releases without one, what `.metadata` says; None if nothing does.

    DamagedError if `.metadata` is not a DCP index.
    """
    manifest = checkpoint.manifest
    if manifest.structure is not None or manifest.kind == CheckpointKind.FOREIGN:
        return manifest.structure
    path = f"{checkpoint.folder}/{METADATA}" if checkpoint.folder else METADATA
    try:
        return of_paths(dcp_paths(read_index(checkpoint.store, path), where=checkpoint.store.where(path)))
    except (NotFoundError, UsageError):
        return None
