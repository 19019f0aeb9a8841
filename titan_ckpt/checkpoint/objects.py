"""The values of a checkpoint that are not tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.errors import DamagedError, NotFoundError
from titan_ckpt.format.digest import digest
from titan_ckpt.parsing.values import decode_value


def read_object(checkpoint: Checkpoint, fqn: str, *, allowed: Mapping[str, Any] | None = None) -> Any:
    """Read a value that is not a tensor; `allowed` are classes of the caller by `module.name`.

    UnsafeContentError for an object of another class, DamagedError for what torch.save cannot have written.
    """
    data = read_object_bytes(checkpoint, fqn)
    return decode_value(data, where=f"{checkpoint}: value {fqn!r}", allowed=allowed or {})


def read_object_bytes(checkpoint: Checkpoint, fqn: str) -> bytes:
    """The verified blob of a non-tensor value."""
    entry = checkpoint.manifest.objects_by_fqn.get(fqn)
    if entry is None:
        raise NotFoundError(f"{checkpoint}: no value {fqn!r}")
    path = checkpoint.path(entry.file)
    data = checkpoint.store.read(path, entry.offset, entry.length)
    if entry.digest is not None and digest(data) != entry.digest:
        raise DamagedError(damage(checkpoint, path, fqn, entry.offset, entry.length))
    return data


def damage(checkpoint: Checkpoint, path: str, fqn: str, start: int, length: int) -> str:
    """The text of an error for bytes whose digest differs."""
    return (
        f"{checkpoint.store.where(path)}: {fqn}: bytes {start} to {start + length} are not what was saved (digest differs); "
        f"`titan-ckpt verify --data` lists all damage"
    )
