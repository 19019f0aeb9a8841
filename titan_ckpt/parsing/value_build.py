"""Phase 2 of reading a value: plain data and records to the value itself, by known constructors alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from titan_ckpt.errors import DamagedError, UnsafeContentError
from titan_ckpt.parsing.own_objects import build_own
from titan_ckpt.parsing.value_records import Record, Storage, is_name

Name = tuple[str, str]


# What a constructor raises for arguments that no writer gave it.
_MISFITS = (
    TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, ArithmeticError, RuntimeError, MemoryError,
)  # fmt: skip
Constructor: TypeAlias = "Callable[[Builder, Record], Any]"


@dataclass(frozen=True, slots=True)
class Known:
    """What a pickle may name, by (module, name): values of their own, and what may be called."""

    constants: Mapping[Name, Any]
    constructors: Mapping[Name, Constructor]


@dataclass(frozen=True, slots=True)
class OnlyNamed:
    """A function that a value may hold. Nothing calls it while the value is built."""

    function: Callable[..., Any]


class Builder:
    """Builds one value. `allowed` are classes and functions of the caller by `module.name`; `storages` the bytes of tensors.

    DamagedError for arguments that do not fit their constructor; UnsafeContentError for a name that is neither known nor
    allowed.
    """

    def __init__(
        self, where: str, storages: Mapping[str, memoryview], allowed: Mapping[str, Any], known: Known
    ) -> None:
        self.where, self.storages, self._allowed, self._known = where, storages, allowed, known
        self.shared: dict[Any, Any] = {}
        self._done: dict[int, tuple[Any, Any]] = {}

    def value(self, inert: Any) -> Any:
        """The value that `inert` stands for. What the pickle shares stays shared."""
        kind = type(inert)
        if kind in (str, int, float, bool, type(None), bytes):
            return inert
        if id(inert) in self._done:
            return self._done[id(inert)][1]
        if is_name(inert):
            return self._named(inert.call)
        if isinstance(inert, Record):
            return self.keep(inert, self._made(inert))
        return self._container(inert)

    def keep(self, inert: Any, value: Any) -> Any:
        """Note the value of a place in the pickle, for other references to it; before its parts, if they may lead back."""
        self._done[id(inert)] = (inert, value)
        return value

    def args(self, record: Record) -> tuple[Any, ...]:
        """The arguments of a record's call."""
        return tuple(map(self.value, record.args))

    def fail(self, text: str) -> DamagedError:
        """The error for content that no writer made."""
        return DamagedError(f"{self.where}: {text}; nothing was loaded")

    def _container(self, inert: Any) -> Any:
        if isinstance(inert, list):
            items: list[Any] = self.keep(inert, [])
            items.extend(map(self.value, inert))
            return items
        if isinstance(inert, dict):
            found: dict[Any, Any] = self.keep(inert, {})
            for key, value in inert.items():
                found[self.value(key)] = self.value(value)
            return found
        if isinstance(inert, tuple | set | frozenset):
            return self.keep(inert, type(inert)(map(self.value, inert)))
        if isinstance(inert, bytearray):
            return inert
        raise self.fail(f"holds a bare {'storage' if isinstance(inert, Storage) else type(inert).__name__}")

    def _named(self, name: Name) -> Any:
        """A constant, or a class that stands for itself."""
        if name in self._known.constants:
            return self._known.constants[name]
        if (own := self._allowed.get(".".join(name))) is not None:
            return own.function if isinstance(own, OnlyNamed) else own
        outer, _, member = name[1].rpartition(".")
        if isinstance(outer_kind := self._allowed.get(f"{name[0]}.{outer}"), type):
            return self._member(outer_kind, member)
        raise self._refused(name)

    def _member(self, kind: Any, member: str) -> Any:
        """A member of an Enum of the caller, which some Python versions store as `getattr(class, name)`."""
        members = getattr(kind, "__members__", {})
        if member not in members:
            raise self.fail(f"{member!r} is not a member of {kind.__name__}")
        return members[member]

    def _made(self, record: Record) -> Any:
        call = ("", "a call of what another call returned") if isinstance(record.call, Record) else record.call
        found = self._known.constructors.get(call)
        if found is not None:
            try:
                return found(self, record)
            except RecursionError:
                raise
            except _MISFITS as error:
                raise self.fail(
                    f"{'.'.join(call)} cannot be made: {type(error).__name__}: {str(error)[:200]}"
                ) from error
        own = self._allowed.get(".".join(call))
        if own is None or isinstance(own, OnlyNamed):
            raise self._refused(call)
        return build_own(self, own, record)

    def own(self, name: Name) -> Any:
        """A class that the caller allows. UnsafeContentError if it is none."""
        found = self._allowed.get(".".join(name))
        if found is None or isinstance(found, OnlyNamed):
            raise self._refused(name)
        return found

    def _refused(self, name: Name) -> UnsafeContentError:
        shown = ".".join(name).replace("builtins.", "")
        return UnsafeContentError(
            f"{self.where} holds {shown}, which is not plain data and is made by code",
            f"; it was not loaded. If you trust it, put a {name[1]} in its place in the state to be loaded, or name it: "
            f"LoadPolicy(allow=[{name[1]}])",
        )


def only_args(make: Callable[..., Any]) -> Constructor:
    """A constructor whose record has arguments and nothing else."""

    def constructor(builder: Builder, record: Record) -> Any:
        if record.kwargs or record.state is not None or record.items or record.pairs:
            raise ValueError("it was given more than arguments")
        return make(*builder.args(record))

    return constructor
