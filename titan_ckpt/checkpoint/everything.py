"""Read a checkpoint, or a part of it, as the nested state that was saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.nesting import nesting
from titan_ckpt.checkpoint.objects import read_object
from titan_ckpt.checkpoint.subclasses import known_and, put_together
from titan_ckpt.checkpoint.unflattened import warn_of_text
from titan_ckpt.errors import NotFoundError
from titan_ckpt.format.structure import MARK, below, names, of_paths, owner_of, rebuild


def read_everything(checkpoint: Checkpoint, prefix: str, allow: Iterable[Any]) -> Any:
    """The nested state below `prefix`, or the one entry of that name. NotFoundError if there is none."""
    manifest, start = checkpoint.manifest, f"{prefix}." if prefix else ""
    stored = [*manifest.by_fqn, *manifest.objects_by_fqn]
    wanted = [name for name in stored if name.startswith(start) or name == prefix]
    allowed: Mapping[str, Any] = {f"{each.__module__}.{each.__qualname__}": each for each in allow}
    entries = {
        name.removeprefix(start): checkpoint.read(name)
        if name in manifest.by_fqn
        else read_object(checkpoint, name, allowed=known_and(allowed))
        for name in wanted
    }
    if prefix and wanted == [prefix]:
        return entries[prefix]
    structure = nesting(checkpoint)
    inner = None if structure is None else below(structure, prefix)
    if inner is None or not set(entries) <= set(names(inner)):
        inner = of_paths({name: (name,) for name in entries})
        if not entries:
            raise NotFoundError(f"{checkpoint}: nothing below {prefix!r}; `titan-ckpt inspect` lists the names")
    state = rebuild(inner, entries)
    warn_of_text(checkpoint, state, start)
    return put_together(state, allowed, str(checkpoint)) if any(map(owner_of, entries)) or MARK in entries else state
