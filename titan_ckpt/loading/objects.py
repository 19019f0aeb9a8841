"""Values of a checkpoint that take the places of those in a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.objects import read_object
from titan_ckpt.checkpoint.subclasses import known_and
from titan_ckpt.checkpoint.unflattened import with_keys_of
from titan_ckpt.loading.destinations import has_shared_elements
from titan_ckpt.loading.policy import LoadPolicy
from titan_ckpt.state.classes import allowed_by, named
from titan_ckpt.state.flatten import is_value

_ATOMS = (int, float, str, bool, type(None))


def read_objects(
    checkpoint: Checkpoint, names: Iterable[str], present: Mapping[str, Any], policy: LoadPolicy
) -> dict[str, Any]:
    """Read values by name. Of the caller's own classes and functions, `policy.allow` and those that are `present` are made.

    Keys that became text in a mapping stored whole are again those of the one that is `present`.
    """
    always = named(policy.allow)
    found = {
        name: read_object(checkpoint, name, allowed=known_and(always, allowed_by(present[name])))
        if type(present[name]) not in _ATOMS
        else read_object(checkpoint, name, allowed=known_and(always))
        for name in names
    }
    return {name: with_keys_of(present[name], value) for name, value in found.items()}


def settle(present: Any, value: Any) -> Any:
    """`value`, with the tensors that are `present` in the same places of lists, tuples and dicts filled in its stead."""
    return _settled(present, value) if _holds_tensors(value) else value


def _holds_tensors(value: Any) -> bool:
    inside, seen = [value], set[int]()
    while inside:
        each = inside.pop()
        if isinstance(each, torch.Tensor):
            return True
        if isinstance(each, list | tuple | dict) and id(each) not in seen:
            seen.add(id(each))
            inside += each.values() if isinstance(each, dict) else each
    return False


def _filled(present: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`present` with the elements of a sparse, nested or quantised tensor; `value` itself if torch cannot copy them there."""
    if present.layout != value.layout or present.dtype != value.dtype or present.is_nested != value.is_nested:
        return value
    if not value.is_nested and present.shape != value.shape:
        return value
    try:
        with torch.no_grad():
            return present.copy_(value)
    except RuntimeError:  # another number of elements, or another way to quantise them
        return value


def _settled(present: Any, value: Any) -> Any:
    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor:
            return value
        if is_value(value) or is_value(present):
            return _filled(present, value)
        if present.shape != value.shape or present.dtype != value.dtype or has_shared_elements(present):
            return value
        with torch.no_grad():
            present.copy_(value)
        return present
    if type(present) is not type(value) or not isinstance(value, list | tuple | dict) or len(present) != len(value):
        return value
    if isinstance(value, dict):
        return {key: _settled(present[key], inner) if key in present else inner for key, inner in value.items()}
    items = [_settled(a, b) for a, b in zip(present, value, strict=True)]
    return value._make(items) if hasattr(value, "_make") else type(value)(items)
