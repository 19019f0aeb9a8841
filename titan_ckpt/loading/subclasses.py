"""Load wrapper subclasses: their inner tensors are filled like any tensor; class, shape and context must be equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.objects import read_object
from titan_ckpt.checkpoint.subclasses import known_and, one_for_all
from titan_ckpt.format.structure import Mark, mark_of, owner_of
from titan_ckpt.loading.policy import LoadPolicy
from titan_ckpt.state.classes import allowed_by, named
from titan_ckpt.state.flatten import FlatState
from titan_ckpt.state.state_dict import has_part_of, local_shard
from titan_ckpt.state.subclasses import without_shapes


def stored_marks(checkpoint: Checkpoint, flat: FlatState, policy: LoadPolicy) -> dict[str, Mark]:
    """The marks in the checkpoint for the wrapper subclasses of `flat`, by the name of the mark."""
    found: dict[str, Mark] = {}
    for name in flat.marks:
        if name in checkpoint.manifest.objects_by_fqn:
            allowed = known_and(named(policy.allow), allowed_by(flat.objects[name]))
            mark = mark_of(read_object(checkpoint, name, allowed=allowed))
            if mark is not None:
                found[name] = mark
    return found


def mark_problems(checkpoint: Checkpoint, flat: FlatState, stored: Mapping[str, Mark]) -> list[str]:
    """Why the checkpoint has something else than these tensors of the state, one line each."""
    problems = []
    for name, wanted in flat.marks.items():
        owner, kind = owner_of(name), wanted.name.rpartition(".")[2]
        if name in stored:
            problems += [f"{owner}: {each}" for each in _differences(stored[name], wanted)]
        elif owner in checkpoint.manifest.by_fqn:
            entry = checkpoint.manifest.by_fqn[owner]
            problems.append(
                f"{owner}: checkpoint has one tensor of {entry.dtype}, the state a {kind}: load a plain tensor, then convert it"
            )
        else:
            problems.append(f"{owner}: the checkpoint has no {kind}")
    return problems


def _differences(stored: Mark, wanted: Mark) -> list[str]:
    pairs = {
        "a": (_family(stored.name), _family(wanted.name)),
        "dtype": (stored.dtype, wanted.dtype),
        "global shape": (stored.shape, wanted.shape),
        "the parts": (stored.parts, wanted.parts),
        "settings": tuple(without_shapes(each.context, len(each.shape)) for each in (stored, wanted)),
    }
    return [
        f"checkpoint has {what} {_shown(have)}, the state {_shown(want)}"
        for what, (have, want) in pairs.items()
        if have != want and repr(have) != repr(want)
    ]


def _family(name: str) -> str:
    """The package and the name of a class; its module may move between releases."""
    return f"{name.partition('.')[0]}'s {name.rpartition('.')[2]}"


def _shown(value: Any) -> str:
    return str(value)[:200]


def spread(
    checkpoint: Checkpoint, flat: FlatState, stored: Mapping[str, Mark]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Values for parts that each shard has for itself, where the shards are others now: the stored one, if all are equal.

    By name; and what cannot be loaded, one line each.
    """
    found: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for name, mark in stored.items():
        own = flat.marks[name].own
        for part in sorted({*mark.own, *own}):
            fqn = f"{owner_of(name)}.{part}"
            entry, target = checkpoint.manifest.by_fqn.get(fqn), flat.tensors.get(fqn)
            if entry is None or target is None or entry.global_shape == tuple(target.shape) or not has_part_of(target):
                continue
            num_dims = own.get(part, target.dim())
            value = one_for_all(checkpoint.read(fqn), num_dims)
            if value is None or value.shape != target.shape[target.dim() - num_dims :]:
                problems.append(
                    f"{fqn}: {entry.global_shape} are stored, one for each shard, and the shards are others now"
                )
                found[fqn] = target
                continue
            box = local_shard(fqn, target).box
            for dim in range(num_dims):
                above = target.dim() - num_dims + dim
                value = value.narrow(dim, box.offsets[above], box.sizes[above])
            found[fqn] = value
    return found, problems
