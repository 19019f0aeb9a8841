"""Phase 1 of reading a value: a pickle as plain data and records. Nothing that the pickle names is imported or called."""

from __future__ import annotations

import _compat_pickle
import io
import pickle
from typing import Any

from titan_ckpt.errors import DamagedError
from titan_ckpt.parsing.pickle_check import check_pickle

MAX_NAME = 200


class Record:
    """What a pickle asks for in place of a plain value: `call` names a function or class, or is a record that is called.

    `args` and `kwargs` are those of the call, `state` what the result is then given, `items` what is appended, `pairs` what is
    set by key. An instance stands for the result, a subclass for the function itself.
    """

    call: Any = ("", "")
    is_new = True
    """Made by `cls.__new__` alone, as objects of a class without a `__reduce__` of its own are."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:
        record = super().__new__(cls)
        record.args, record.kwargs = args, kwargs
        record.state, record.items, record.pairs = None, list[Any](), list[tuple[Any, Any]]()
        return record

    def __init__(self, *_: Any, **__: Any) -> None:
        self.is_new = False

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    items: list[Any]
    pairs: list[tuple[Any, Any]]

    def __call__(self, *args: Any) -> Record:
        record = Record(*args)
        record.call = self
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = (state,)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))

    def append(self, value: Any) -> None:
        """As of a list."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """As of a list."""
        self.items.extend(values)

    def add(self, value: Any) -> None:
        """As of a set."""
        self.items.append(value)


class Storage:
    """A tensor's storage: the class of its elements, its key, and their number."""

    __slots__ = ("key", "kind", "num_elements")

    def __init__(self, kind: tuple[str, str], key: str, num_elements: int) -> None:
        self.kind, self.key, self.num_elements = kind, key, num_elements


def is_name(value: Any) -> bool:
    """Whether `value` stands for a function, class or constant that the pickle names."""
    return isinstance(value, type) and issubclass(value, Record)


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        self._where = where
        self.names: dict[tuple[str, str], type[Record]] = {}
        self._member = type("Record", (Record,), {"call": ("builtins", "getattr"), "__new__": self._new_member})
        self.storages = 0

    def find_class(self, module: str, name: str) -> Any:
        module, name = _compat_pickle.NAME_MAPPING.get(
            (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        )
        if (module, name) == ("builtins", "getattr"):
            self.names[module, name] = self._member
        return self._named(module, name)

    def _new_member(self, kind: Any, *args: Any) -> Any:
        """A call of `getattr`, by which protocol 2 names a class inside of another one, a method, a member of an Enum."""
        if len(args) == 2 and is_name(args[0]) and type(args[1]) is str:
            module, name = args[0].call
            return self._named(module, f"{name}.{args[1]}")
        return Record.__new__(kind, *args)

    def _named(self, module: str, name: str) -> type[Record]:
        if len(module) + len(name) > MAX_NAME:
            raise DamagedError(f"{self._where}: names a class of {len(module) + len(name)} characters")
        if (module, name) not in self.names:
            self.names[module, name] = type("Record", (Record,), {"call": (module, name)})
        return self.names[module, name]

    def persistent_load(self, pid: Any) -> Any:
        is_storage = isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and is_name(pid[1])
        if not is_storage or type(pid[2]) is not str or type(pid[4]) is not int:
            raise DamagedError(f"{self._where}: refers to something that is not a storage")
        self.storages += 1
        return Storage(pid[1].call, pid[2], pid[4])


def read_pickle(data: bytes, *, where: str) -> tuple[Any, set[tuple[str, str]]]:
    """The value in a pickle, and the (module, name) of everything that it names; without any, the value is complete.

    DamagedError if it is not a whole pickle, or asks for more than its length allows.
    """
    check_pickle(data, where=where, are_surrogates_allowed=True)
    reader = _Reader(data, where)
    try:
        root = reader.load()
    except DamagedError:
        raise
    except Exception as error:  # whatever a broken pickle makes the standard library raise
        raise DamagedError(f"{where}: not a whole pickle: {type(error).__name__}: {str(error)[:200]}") from error
    return root, set(reader.names)
