"""Objects that load their state themselves get all of it, though the state that they have now has less.

A new optimizer has no moments yet, a scheduler or data loader in another phase has other entries. `dcp.load` leaves out what such
an object does not have at the moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.nesting import nesting
from titan_ckpt.checkpoint.objects import read_object
from titan_ckpt.checkpoint.subclasses import known_and, put_together
from titan_ckpt.errors import LoadContractError
from titan_ckpt.format.structure import MARK, Mark, Structure, below, container_names, mark_of, owner_of, rebuild
from titan_ckpt.state.flatten import FlatState, Names, StatefulPlace, flatten
from titan_ckpt.state.state_dict import TORCH_DTYPE


def grown(checkpoint: Checkpoint, flat: FlatState, stored: Names) -> FlatState:
    """`flat`, with places for all that the checkpoint has for the objects in it; modules keep what they have."""
    states: dict[int, Any] = {}
    structure = None
    for place in flat.stateful:
        start = f"{place.name}."
        extra = [name for name in stored.all if name.startswith(start) and name not in flat.keys]
        short = [name for name in flat.keys if name.startswith(start) and name not in stored.all]
        other = [name for name in flat.keys if name.startswith(start) and _is_other_kind(checkpoint, flat, name)]
        if not (extra or short or other) or isinstance(place.owner, torch.nn.Module):
            continue
        structure = structure or nesting(checkpoint)
        inner = None if structure is None else below(structure, place.name)
        if inner is not None and _are_replaced(inner, [name.removeprefix(start) for name in short]):
            states[id(place.owner)] = _state(checkpoint, flat, place, inner)
    return flatten(flat.root, stored=stored, states=states) if states else flat


def _is_other_kind(checkpoint: Checkpoint, flat: FlatState, name: str) -> bool:
    """Whether the checkpoint has a tensor where the object has a value now, or a value instead of a tensor: a learning rate."""
    manifest = checkpoint.manifest
    return name in (
        manifest.by_fqn if name in flat.objects else manifest.objects_by_fqn if name in flat.tensors else ()
    )


def _are_replaced(inner: Structure, short: Iterable[str]) -> bool:
    """Whether the checkpoint has something else where the object has the names `short`: a container, or an empty one above.

    Otherwise the two states are of different things.
    """
    containers = container_names(inner)
    empty = {name for name, size in containers.items() if not size}
    return all(name in containers or any(name.startswith(f"{above}.") for above in empty) for name in short)


def _state(checkpoint: Checkpoint, flat: FlatState, place: StatefulPlace, inner: Structure) -> Any:
    """The state of an object as it was saved: its own tensors where it has them, new ones elsewhere, values still to be read."""
    start, manifest = f"{place.name}.", checkpoint.manifest
    params = _params(place.owner)
    entries: dict[str, Any] = {}
    marks = _marks(checkpoint, start, params)
    for name in [*manifest.by_fqn, *manifest.objects_by_fqn]:
        if not name.startswith(start):
            continue
        own = name.removeprefix(start)
        if name in manifest.by_fqn:
            entry, mark = manifest.by_fqn[name], marks.get(f"{name.rpartition('.')[0]}.{MARK}")
            shape = entry.global_shape if mark is None else mark.shape_of(name.rpartition(".")[2], entry.global_shape)
            fresh = _like(params, own, shape, TORCH_DTYPE[entry.dtype])
            entries[own] = flat.tensors.get(name, fresh)
        elif name in marks:
            entries[own] = replace(marks[name], own={}).value
        else:
            entries[own] = flat.objects.get(name)
    state = put_together(rebuild(inner, entries), {}, str(checkpoint))
    if (
        isinstance(place.owner, torch.optim.Optimizer)
        and isinstance(state, dict)
        and isinstance(state.get("state"), dict)
    ):
        state["state"] = {int(k) if str(k).isdigit() else k: v for k, v in state["state"].items()}
    return state


def _marks(checkpoint: Checkpoint, start: str, params: list[torch.Tensor]) -> dict[str, Mark]:
    """The marks of wrapper subclasses below a name. LoadContractError for DTensors, whose shards' sizes are not known."""
    found: dict[str, Mark] = {}
    for name in checkpoint.manifest.objects_by_fqn:
        if name.startswith(start) and (owner := owner_of(name)) is not None:
            mark = mark_of(read_object(checkpoint, name, allowed=known_and()))
            if mark is not None:
                found[name] = mark
            if mark is not None and any(isinstance(param, DTensor) for param in params):
                raise LoadContractError(
                    f"{checkpoint}: {owner}: the optimizer has no {mark.name.rpartition('.')[2]} to load it into: let it take a "
                    "step first, with gradients of zero and a learning rate of zero"
                )
    return found


def _params(owner: Any) -> list[torch.Tensor]:
    """An optimizer's parameters, in the order of the numbers in its state."""
    groups = owner.param_groups if isinstance(owner, torch.optim.Optimizer) else []
    return [param for group in groups for param in group["params"]]


def _like(params: list[torch.Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor: cut like the parameter that it belongs to, if it has its shape."""
    parts = name.split(".")
    number = int(parts[1]) if parts[0] == "state" and len(parts) == 3 and parts[1].isdigit() else len(params)
    if number < len(params):
        param = params[number].detach()
        if isinstance(param, DTensor) and tuple(param.shape) == shape:
            return torch.empty_like(param, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device="cpu")
