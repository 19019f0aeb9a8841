"""Classes of the caller: those of the objects in a value, and those that a load allows."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

MAX_OBJECTS = 100_000
_ATOMS = (str, int, float, complex, bool, bytes, bytearray, type(None), types.FunctionType, types.ModuleType)


def classes_in(value: Any) -> dict[str, Any]:
    """The classes of all objects in a value, and classes that it holds, by `module.name`."""
    found: dict[str, Any] = {}
    for each in objects_in(value):
        kind = each if isinstance(each, type) else type(each)
        found.setdefault(f"{kind.__module__}.{kind.__qualname__}", kind)
    return {name: kind for name, kind in found.items() if kind.__module__ != "builtins"}


def objects_in(value: Any) -> Iterator[Any]:
    """A value and what is in it, at any depth: the first `MAX_OBJECTS` objects."""
    seen: set[int] = set()
    inside = [value]
    while inside and len(seen) < MAX_OBJECTS:
        each = inside.pop()
        yield each
        if type(each) in _ATOMS or isinstance(each, type) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Mapping):
            inside += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset) or type(each).__name__ == "deque":
            inside += each
        elif isinstance(each, np.ndarray) and each.dtype.hasobject:
            inside += each.ravel().tolist()
        inside += _attributes(each)


def _attributes(value: Any) -> list[Any]:
    try:
        own = list(vars(value).values())
    except TypeError:
        own = []
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return own + [getattr(value, name) for name in slots if hasattr(value, name)]


def _slots(kind: type) -> Iterable[str]:
    found = kind.__dict__.get("__slots__", ())
    return [found] if isinstance(found, str) else [name for name in found if not name.startswith("__")]


def named(allow: Iterable[Any]) -> dict[str, Any]:
    """Classes and functions by `module.name`, as pickles name them."""
    return {f"{each.__module__}.{each.__qualname__}": each for each in allow}
