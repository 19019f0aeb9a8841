"""A nested state as flat names, and values put back into it.

Names and the choice of what is opened are those of `torch.distributed.checkpoint` (`_traverse.py`, torch 2.13): mappings always;
lists that contain a tensor, a mapping or a list to be opened. Beyond that, whatever is around a DTensor in a tuple is opened: DCP
would pickle it, with one rank's shard for all.
"""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import CheckpointError, UsageError
from titan_ckpt.format.structure import MARK, KeyCode, Mark, Row, Structure, encode_key, kind_of
from titan_ckpt.state.subclasses import parts_of

_PLAIN = frozenset({int, float, str, bool, type(None), bytes, complex, torch.Tensor})
_CONTAINERS = frozenset({dict, list, tuple, OrderedDict})
_DEEP = 500  # containers around one: no state needs as many


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names in a checkpoint, which decide how a state to be loaded is taken apart: `values` are stored whole."""

    values: Collection[str]
    all: Collection[str]

    def are_below(self, name: str) -> bool:
        """Whether an entry is stored below `name`."""
        start = f"{name}."
        return any(each.startswith(start) for each in self.all)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A state dict without nesting: tensors, other values (objects), the keys that led to each name, and the nesting.

    `stateful` are the objects whose `state_dict()` stands in their place, outer ones first. `marks` are those of
    wrapper subclasses by name; `tensors` has their inner tensors. `fixed` has the type of the container for each entry of one
    that cannot be changed, `reduced` what becomes of containers whose type no structure records.
    """

    root: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    stateful: list[StatefulPlace] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    marks: dict[str, Mark] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)
    reduced: dict[str, str] = field(default_factory=dict)

    @property
    def structure(self) -> Structure:
        """The nesting of the state."""
        return tuple(self.rows)

    def put(self, name: str, value: Any) -> None:
        """Set a value in its place, in the state or in that of an object in it."""
        root, keys = self.root, self.keys[name]
        for place in self.stateful:
            if self.keys[name][: len(place.keys)] == place.keys:
                root, keys = place.box, ("state", *self.keys[name][len(place.keys) :])
        _put(root, keys, value)

    def give_back(self) -> None:
        """Let each object load its state, inner ones first. CheckpointError if one cannot."""
        for place in reversed(self.stateful):
            try:
                place.owner.load_state_dict(place.box["state"])
            except Exception as error:
                raise CheckpointError(
                    f"{place.name}: the tensors are loaded, but {type(place.owner).__name__}.load_state_dict failed: "
                    f"{type(error).__name__}: {error}"
                ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulPlace:
    """An object in a state that has `state_dict` and `load_state_dict`; `box["state"]` is its state, which a load fills."""

    name: str
    keys: tuple[Any, ...]
    owner: Any
    box: dict[str, Any]


def flatten(
    state: Mapping[Any, Any], *, stored: Names | None = None, states: Mapping[int, Any] | None = None
) -> FlatState:
    """Flatten `state`; names are the keys' text, joined by dots. With `stored`, take apart what that checkpoint has apart.
    An object with `state_dict` and `load_state_dict` is flattened as its `state_dict()`, or as `states[id(object)]`.

    UsageError if two entries get the same name, for a key whose text does not tell it from others, and for a state that
    contains itself.
    """
    if not isinstance(state, Mapping):
        raise UsageError(
            f"state is of type {type(state).__name__}; give a mapping of names to tensors and values, such as "
            "{'model': model.state_dict()}, with the parentheses"
        )
    walk = _Walk(state, stored, states or {})
    try:
        walk.container((), "", state, 0)
    except RecursionError:
        place = _deepest_below(state)
        raise UsageError(
            f"state is nested too deeply, or contains itself, at {place!r}; flatten it, or take the cycle out"
        ) from None
    return walk.flat


def _deepest_below(state: Any) -> str:
    """The name of a container that is among those around it, or its first parts if the nesting has no such end."""
    todo: list[tuple[Any, tuple[str, ...], tuple[int, ...]]] = [(state, (), ())]
    while todo:
        value, names, around = todo.pop()
        if id(value) in around or len(around) > _DEEP:
            return ".".join(names[:8]) + "..." * (len(names) > 8)
        inner = value.items() if isinstance(value, Mapping) else enumerate(value)
        own = (*around, id(value))
        todo += [(each, (*names, str(key)), own) for key, each in inner if isinstance(each, Mapping | list | tuple)]
    return ""


class _Walk:
    """Visits a state from the top."""

    def __init__(self, state: Mapping[Any, Any], stored: Names | None, states: Mapping[int, Any]) -> None:
        self.flat = FlatState(root=state, rows=[(kind_of(state),)])
        self._stored, self._states, self._containers = stored, states, 1

    def container(self, keys: tuple[Any, ...], prefix: str, container: Any, number: int, fixed: str = "") -> None:
        """All entries of a container, the `number`-th one; `fixed` is the type of an unchangeable one around a tuple."""
        is_mapping = isinstance(container, Mapping)
        if not isinstance(container, tuple):
            fixed = "" if hasattr(type(container), "__setitem__") else type(container).__name__
        for key, value in container.items() if is_mapping else enumerate(container):
            text = key if type(key) is str else _text(keys, key)
            code = key if type(key) is str else encode_key(key)
            name = prefix + text
            if type(value) not in _PLAIN and is_stateful(value):
                value = self._state_of((*keys, key), name, value)
            if type(value) not in _PLAIN and isinstance(value, torch.Tensor):
                value = self._in_parts(name, value)
            if type(value) not in _PLAIN and self._is_open(name, value):
                kind = kind_of(value)
                self.flat.rows.append((number, code, kind))
                if type(value) not in _CONTAINERS and type(value).__name__ != kind.partition(":")[0]:
                    self.flat.reduced[name] = f"a {type(value).__name__} comes back as a {kind}"
                self._containers += 1
                self.container((*keys, key), f"{name}.", value, self._containers - 1, fixed)
            else:
                self._entry((*keys, key), name, value, number, code)
                if fixed:
                    self.flat.fixed[name] = fixed

    def _in_parts(self, name: str, tensor: torch.Tensor) -> torch.Tensor | dict[str, Any]:
        """A wrapper subclass as a mapping of its inner tensors and its mark; any other tensor as it is."""
        parts = parts_of(name, tensor)
        if parts is None:
            return tensor
        self.flat.marks[f"{name}.{MARK}"] = parts.mark
        return {**parts.tensors, MARK: parts.mark.value}

    def _state_of(self, keys: tuple[Any, ...], name: str, owner: Any) -> Any:
        state = self._states[id(owner)] if id(owner) in self._states else owner.state_dict()
        self.flat.stateful.append(StatefulPlace(name=name, keys=keys, owner=owner, box={"state": state}))
        return state

    def _is_open(self, name: str, value: Any) -> bool:
        if isinstance(value, torch.Tensor) or not isinstance(value, Mapping | list | tuple):
            return False
        if name in self.flat.marks or (self._stored is not None and name in self._stored.values):
            return False
        if isinstance(value, Mapping) or (isinstance(value, list) and _has_parts(value)):
            return True
        if self._stored is not None and _holds(value, torch.Tensor | Mapping):
            return self._stored.are_below(name)
        return not isinstance(value, Mapping) and _holds_shards(value)

    def _entry(self, keys: tuple[Any, ...], name: str, value: Any, number: int, code: KeyCode) -> None:
        flat = self.flat
        if name in flat.keys:
            raise UsageError(
                f"state has two entries named {name!r}: under the keys {flat.keys[name]} and {keys}; rename one of them"
            )
        if not name.isascii():
            _check_text(name)
        flat.keys[name] = keys
        flat.rows.append((number, code))
        if isinstance(value, torch.Tensor) and not is_value(value):
            flat.tensors[name] = value
        else:
            flat.objects[name] = value


def is_stateful(value: Any) -> bool:
    """Whether DCP saves `value` as its `state_dict()`: modules, optimizers, schedulers, data loaders."""
    if type(value) in _CONTAINERS or isinstance(value, type | torch.Tensor):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_value(tensor: torch.Tensor) -> bool:
    """Whether a tensor is stored whole, as other values are: sparse, nested and quantised ones, which no mesh cuts."""
    if isinstance(tensor, ShardedTensor):  # it knows no such question
        return False
    return tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized


def _has_parts(items: list[Any]) -> bool:
    """Whether DCP opens a list: it has a tensor or a mapping in it, or a list that has."""
    return any(isinstance(i, torch.Tensor | Mapping) or (isinstance(i, list) and _has_parts(i)) for i in items)


def _holds(value: Any, kinds: Any) -> bool:
    return any(isinstance(i, kinds) or (isinstance(i, list | tuple) and _holds(i, kinds)) for i in value)


def _holds_shards(value: Any) -> bool:
    """Whether a tensor of which each rank has a part is in a container, at any depth."""
    inside = value.values() if isinstance(value, Mapping) else value
    return any(
        isinstance(i, DTensor | ShardedTensor) or (isinstance(i, Mapping | list | tuple) and _holds_shards(i))
        for i in inside
    )


def _text(keys: tuple[Any, ...], key: Any) -> str:
    """A key's part of a name. UsageError for one that is shown with its address in memory, which another job has not."""
    text = str(key)
    if isinstance(key, torch.Tensor) or " at 0x" in text or " object at " in text:
        place = ".".join(map(str, keys)) or "the state"
        raise UsageError(f"{place}: a key of type {type(key).__name__} has no name; use text or numbers as keys")
    return text


def _check_text(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name!r}: this name has half of a surrogate pair, which no file can hold") from error


def _put(state: Any, keys: tuple[Any, ...], value: Any) -> Any:
    """`state` with `value` under `keys`: changed in place, except tuples, which are replaced.

    A ChainMap is changed in the first of its maps that has the key.
    """
    key, rest = keys[0], keys[1:]
    inner = value if not rest else _put(state[key], rest, value)
    if isinstance(state, ChainMap):
        _put(next((each for each in state.maps if key in each), state.maps[0]), (key,), inner)
        return state
    if not isinstance(state, tuple):
        state[key] = inner
        return state
    items = [*state[:key], inner, *state[key + 1 :]]
    return state._make(items) if hasattr(state, "_make") else tuple(items)
