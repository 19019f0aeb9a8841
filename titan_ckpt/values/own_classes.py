"""Objects of the caller's own classes: which classes a value holds, and an object of one that the caller allows."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_ckpt.values.build import Builder
    from titan_ckpt.values.inert import Record

MAX_OBJECTS = 100_000
_ATOMS = (str, int, float, complex, bool, bytes, bytearray, type(None), types.FunctionType, types.ModuleType)


def classes_in(value: Any) -> dict[str, Any]:
    """The classes of all objects in a value, and classes that it holds, by `module.name`; of the first `MAX_OBJECTS` objects."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    inside = [value]
    while inside and len(seen) < MAX_OBJECTS:
        each = inside.pop()
        kind = each if isinstance(each, type) else type(each)
        found.setdefault(f"{kind.__module__}.{kind.__qualname__}", kind)
        if type(each) in _ATOMS or isinstance(each, type) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Mapping):
            inside += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset) or type(each).__name__ == "deque":
            inside += each
        inside += _attributes(each)
    return {name: kind for name, kind in found.items() if kind.__module__ != "builtins"}


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


def build_own(builder: Builder, own: Any, record: Record) -> Any:
    """What the call of an allowed class or function makes, as pickle would make it: its own methods run."""
    try:
        return _build(builder, own, record)
    except RecursionError:
        raise
    except Exception as error:
        if type(error).__module__.startswith("titan_ckpt"):
            raise
        shown = getattr(own, "__qualname__", own)
        raise builder.fail(f"a {shown} cannot be made: {type(error).__name__}: {str(error)[:200]}") from error


def _build(builder: Builder, own: Any, record: Record) -> Any:
    args = builder.args(record)
    if record.kwargs:
        raise builder.fail(f"{own.__qualname__} with arguments by name")
    is_enum = isinstance(own, type) and issubclass(own, Enum)
    result = own.__new__(own, *args) if record.is_new and not is_enum else own(*args)
    builder.keep(record, result)
    if record.items:
        result.extend(map(builder.value, record.items))
    for key, value in record.pairs:
        result[builder.value(key)] = builder.value(value)
    if record.state is not None:
        _set_state(result, builder.value(record.state[0]))
    return result


def _set_state(result: Any, state: Any) -> None:
    """As `pickle` does: by the class's own method, else attributes, and a second mapping for slots."""
    if hasattr(result, "__setstate__"):
        result.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        vars(result).update(state)
    for name, value in (slots or {}).items():
        object.__setattr__(result, name, value)
