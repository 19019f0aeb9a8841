"""Objects of classes that the caller allows."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_ckpt.parsing.value_build import Builder
    from titan_ckpt.parsing.value_records import Record


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
    args, kwargs = builder.args(record), {name: builder.value(value) for name, value in record.kwargs.items()}
    is_enum = isinstance(own, type) and issubclass(own, Enum)
    result = own.__new__(own, *args, **kwargs) if record.is_new and not is_enum else own(*args, **kwargs)
    builder.keep(record, result)
    if record.items:
        result.extend(map(builder.value, record.items))
    for key, value in record.pairs:
        result[builder.value(key)] = builder.value(value)
    if record.state is not None:
        set_attributes(result, builder.value(record.state[0]), by_own_method=hasattr(result, "__setstate__"))
    return result


def set_attributes(result: Any, state: Any, *, by_own_method: bool) -> None:
    """As `pickle` does: by the class's own method, else attributes, and a second mapping for slots."""
    if by_own_method:
        result.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        vars(result).update(state)
    for name, value in (slots or {}).items():
        object.__setattr__(result, name, value)
