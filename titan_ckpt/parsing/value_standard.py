"""Constructors of the standard library's plain types, as their pickles name and call them (CPython 3.11 to 3.14)."""

from __future__ import annotations

import argparse
import array
import datetime
import io
import ipaddress
import pathlib
import random
import re
import time
import types
import urllib.parse
import uuid
import zoneinfo
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from titan_ckpt.parsing.value_build import Builder, Constructor, only_args
from titan_ckpt.parsing.value_records import Record, is_name

MAX_DIGITS = 4000
_TYPES = (
    int, float, complex, str, bytes, bytearray, bool, list, tuple, dict, set, frozenset, range, slice, object,
)  # fmt: skip


def _encode(text: str = "", encoding: str = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1", "ascii", "utf-8"):
        raise ValueError("bytes of another encoding")
    return text.encode(encoding)


def _bytearray(content: Any = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(content if type(content) in (bytes, bytearray) else _encode(content, encoding))


def _set(kind: type) -> Callable[..., Any]:
    return lambda items=(): kind(_checked(items, list, tuple, set))


def _checked(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise ValueError(f"a {type(value).__name__}, expected a {kinds[0].__name__}")
    return value


def _mapping(builder: Builder, record: Record) -> Any:
    """An OrderedDict or Counter; attributes, such as a module's `_metadata`, are kept."""
    kind = OrderedDict if record.call[1] == "OrderedDict" else Counter
    args = [dict(_checked(arg, dict, list)) for arg in builder.args(record)]
    found: Any = builder.keep(record, kind(*args[:1]))
    return _filled(builder, record, found)


def _defaultdict(builder: Builder, record: Record) -> Any:
    factory = builder.value(record.args[0]) if record.args else None
    is_named = factory is None or (is_name(record.args[0]) and callable(factory))
    if not is_named and factory not in _TYPES:
        raise builder.fail("a factory")
    found: defaultdict[Any, Any] = builder.keep(record, defaultdict(factory))
    return _filled(builder, record, found)


def _filled(builder: Builder, record: Record, found: Any) -> Any:
    for key, value in record.pairs:
        found[builder.value(key)] = builder.value(value)
    if record.state is not None:
        vars(found).update(_checked(builder.value(record.state[0]), dict))
    return found


def _deque(builder: Builder, record: Record) -> Any:
    args = builder.args(record)
    if len(args) > 2:
        raise ValueError("more than items and a length")
    maxlen = args[1] if len(args) > 1 else None
    found: deque[Any] = builder.keep(record, deque(_checked(args[0], tuple, list) if args else (), maxlen))
    found.extend(map(builder.value, record.items))
    return found


def _around(kind: Any, name: str, *held: type) -> Constructor:
    """A wrapper of the standard library, which holds a plain container as its attribute `name` and nothing else."""

    def constructor(builder: Builder, record: Record) -> Any:
        found = builder.keep(record, kind.__new__(kind))
        state = _checked(builder.value(record.state[0]) if record.state else None, dict)
        if set(state) != {name}:
            raise ValueError("it has other attributes")
        setattr(found, name, _checked(state[name], *held))
        return found

    return constructor


def _chain_map(builder: Builder, record: Record) -> ChainMap[Any, Any]:
    found: ChainMap[Any, Any] = _around(ChainMap, "maps", list)(builder, record)
    if not found.maps or not all(isinstance(each, Mapping) for each in found.maps):
        raise ValueError("its maps are no mappings")
    return found


def _bytes_io(builder: Builder, record: Record) -> io.BytesIO:
    """A buffer of bytes, at its position: the extra state of Transformer Engine's modules is one."""
    content, position, _attributes = builder.value(record.state[0]) if record.state else (b"", 0, None)
    found = io.BytesIO(_checked(content, bytes))
    found.seek(_checked(position, int))
    return found


def _uuid(builder: Builder, record: Record) -> uuid.UUID:
    state = builder.value(record.state[0]) if record.state else {"int": int(_checked(builder.args(record)[0], int))}
    return uuid.UUID(int=_checked(state["int"], int))


def _namespace(kind: Any) -> Constructor:
    def constructor(builder: Builder, record: Record) -> Any:
        found = builder.keep(record, kind())
        vars(found).update(_checked(builder.value(record.state[0]), dict) if record.state else {})
        return found

    return constructor


def _random(builder: Builder, record: Record) -> random.Random:
    found = random.Random()
    found.setstate(builder.value(record.state[0]))
    return found


def _decimal(text: str) -> Decimal:
    if len(_checked(text, str)) > MAX_DIGITS:
        raise ValueError("a number of that many digits")
    return Decimal(text)


def _fraction(numerator: Any, denominator: Any = 1) -> Fraction:
    if type(numerator) is str:
        if len(numerator) > MAX_DIGITS or not re.fullmatch(r"-?\d+(/\d+)?", numerator):
            raise ValueError("not a fraction")
        return Fraction(numerator)
    return Fraction(_checked(numerator, int), _checked(denominator, int))


def _pattern(pattern: Any, flags: int) -> re.Pattern[Any]:
    if len(pattern) > MAX_DIGITS:
        raise ValueError("a regular expression of that length")
    return re.compile(pattern, _checked(flags, int))


def _path(name: str) -> Constructor:
    """A path of this system's kind where it can be one; else pure, the same path."""
    kind: Any = getattr(pathlib, name)
    if name in ("PosixPath", "WindowsPath") and not isinstance(pathlib.Path(), kind):
        kind = getattr(pathlib, f"Pure{name}")
    return only_args(lambda *parts: kind(*(_checked(part, str) for part in parts)))


_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
CONSTANTS: dict[tuple[str, str], Any] = {
    **{("builtins", kind.__name__): kind for kind in _TYPES},
    ("builtins", "Ellipsis"): ...,
    ("builtins", "NotImplemented"): NotImplemented,
}
CONSTRUCTORS: dict[tuple[str, str], Constructor] = {
    ("_codecs", "encode"): only_args(_encode),
    ("collections", "OrderedDict"): _mapping,
    ("collections", "Counter"): _mapping,
    ("collections", "defaultdict"): _defaultdict,
    ("collections", "deque"): _deque,
    ("collections", "UserList"): _around(UserList, "data", list),
    ("collections", "UserDict"): _around(UserDict, "data", dict),
    ("collections", "UserString"): _around(UserString, "data", str),
    ("collections", "ChainMap"): _chain_map,
    **{("datetime", kind.__name__): only_args(kind) for kind in (
        datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone,
    )},
    ("decimal", "Decimal"): only_args(_decimal),
    ("fractions", "Fraction"): only_args(_fraction),
    ("uuid", "UUID"): _uuid,
    ("types", "SimpleNamespace"): _namespace(types.SimpleNamespace),
    ("argparse", "Namespace"): _namespace(argparse.Namespace),
    ("random", "Random"): _random,
    ("zoneinfo", "ZoneInfo._unpickle"): only_args(lambda key, _=True: zoneinfo.ZoneInfo(_checked(key, str))),
    **{(module, name): _path(name) for module in ("pathlib", "pathlib._local") for name in _PATHS},
    ("builtins", "set"): only_args(_set(set)),
    ("builtins", "frozenset"): only_args(_set(frozenset)),
    ("builtins", "complex"): only_args(complex),
    ("builtins", "bytes"): only_args(lambda: b""),
    ("builtins", "bytearray"): only_args(_bytearray),
    ("builtins", "range"): only_args(range),
    ("builtins", "slice"): only_args(slice),
    ("builtins", "type"): only_args(lambda value: type(_checked(value, type(None), type(...), type(NotImplemented)))),
    ("_io", "BytesIO"): _bytes_io,
    ("re", "_compile"): only_args(_pattern),
    ("re", "RegexFlag"): only_args(lambda flags: re.RegexFlag(_checked(flags, int))),
    ("array", "array"): only_args(lambda code, items=(): array.array(_checked(code, str), _checked(items, list, tuple))),
    ("time", "struct_time"): only_args(lambda fields, more=None: time.struct_time(fields, more or {})),
    **{("ipaddress", kind.__name__): only_args(kind) for kind in (
        ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network, ipaddress.IPv4Interface,
        ipaddress.IPv6Interface,
    )},
    **{("urllib.parse", kind.__name__): only_args(kind) for kind in (
        urllib.parse.ParseResult, urllib.parse.SplitResult, urllib.parse.ParseResultBytes, urllib.parse.SplitResultBytes,
    )},
}  # fmt: skip
