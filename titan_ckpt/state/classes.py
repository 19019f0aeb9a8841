"""Classes and functions of the caller: those of the objects in a value, and those that a load allows."""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from titan_ckpt.parsing.value_build import OnlyNamed

MAX_OBJECTS = 100_000
_METHODS = (types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType)
_ATOMS = (
    str, int, float, complex, bool, bytes, bytearray, type(None), types.ModuleType, types.FunctionType, *_METHODS,
)  # fmt: skip


def allowed_by(value: Any) -> dict[str, Any]:
    """The classes of all objects in a value, and classes and functions that it holds, by `module.name`."""
    found: dict[str, Any] = {}
    for each in objects_in(value):
        if callable(each) and not isinstance(each, type):
            found.setdefault(_name(each), OnlyNamed(each))
        kind = each if isinstance(each, type) else type(each)
        if kind.__module__ != "builtins":
            found.setdefault(_name(kind), kind)
    return found


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
        elif isinstance(each, functools.partial):
            inside += [each.func, each.args, each.keywords]
        if isinstance(each, defaultdict):
            inside.append(each.default_factory)
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
    return {_name(each): each for each in allow}


def _name(each: Any) -> str:
    """As a pickle names it; a method of a class by the name of the class."""
    made = each.__reduce__() if isinstance(each, _METHODS) else ""
    if not isinstance(made, str) and isinstance(made[1][0], type):
        return f"{_name(made[1][0])}.{made[1][1]}"
    name = getattr(each, "__qualname__", None) or getattr(each, "__name__", "")
    return f"{getattr(each, '__module__', None)}.{name}"
