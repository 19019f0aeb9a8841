"""JSON that others wrote: parsed within bounds, then read value by value with the type that each place must have.

A wrong type is a DamagedError that names the file, the place in the document, what was expected and what was found.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from titan_ckpt.arguments import MAX_DEPTH
from titan_ckpt.errors import DamagedError

MAX_INT64 = (1 << 63) - 1
MAX_VALUES = 1 << 23
"""Values in a document, roughly: it is the number of brackets, commas and colons. A value takes up to about 64 bytes."""
MAX_SHOWN, MAX_ITEMS_SHOWN = 80, 6
_MARKS = (b"[", b"{", b",", b":")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(data: bytes, where: str) -> Any:
    """The value of a UTF-8 JSON document. Floats are finite; object keys are unique; text can be encoded again.

    DamagedError if it is anything else, nested too deeply for the parser, or has more than MAX_VALUES values.

    >>> parse_json(b'{"a": [1, 2.5]}', "x.json")
    {'a': [1, 2.5]}
    """
    if sum(map(data.count, _MARKS)) > MAX_VALUES:
        raise DamagedError(f"{where}: not JSON of a sane size: more than {MAX_VALUES} values")
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where}: not JSON: {_reason(error)}") from error
    return value


def parse_json_line(line: bytes | str) -> Any:
    """The value of one line of a log or a list. Unlike a document it may hold NaN, infinities, and a key twice.

    ValueError if it is not JSON, nested too deeply for the parser, or has more than MAX_VALUES values.

    >>> parse_json_line('{"step": 3, "loss": NaN}')
    {'step': 3, 'loss': nan}
    """
    if len(line) > MAX_VALUES:
        text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
        if sum(text.count(mark.decode()) for mark in _MARKS) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values in one line")
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeEncodeError):
        return "text with half of a surrogate pair"
    return str(error)[:200]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"lists {name[:100]!r} twice")
        seen.add(name)
    raise AssertionError("a shorter dict without a repeated key")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large a number")
    return number


def show(value: Any, levels: int = 2) -> str:
    """A value of any size as a short piece of ASCII text.

    >>> show([1, "a"]), show({"key": 10**400})
    ("[1, 'a']", "{'key': an integer of 1329 bits}")
    """
    if isinstance(value, str):
        return ascii(value if len(value) <= MAX_SHOWN else value[:MAX_SHOWN] + "...")
    if type(value) is int and abs(value) >= 10**24:  # Python refuses to print one of more than 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, list | tuple | dict):
        start, end = "{}" if isinstance(value, dict) else "()" if isinstance(value, tuple) else "[]"
        if not levels:
            return f"{start}...{end}"
        first = itertools.islice(value.items() if isinstance(value, dict) else value, MAX_ITEMS_SHOWN)
        if isinstance(value, dict):
            shown = [f"{show(key, 0)}: {show(inner, levels - 1)}" for key, inner in first]
        else:
            shown = [show(inner, levels - 1) for inner in first]
        return start + ", ".join([*shown, *["..."] * (len(value) > MAX_ITEMS_SHOWN)]) + end
    return f"a {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class JsonValue:
    """A value of a document: `where` names the file, `path` the place in it (`tensors[3].shape`)."""

    value: Any
    where: str
    path: str = ""

    def fail(self, expected: str) -> NoReturn:
        """DamagedError: this place should hold something else."""
        place = f"{self.path}: " if self.path else ""
        raise DamagedError(f"{self.where}: {place}expected {expected}, found {show(self.value)}")

    def __getitem__(self, key: str) -> JsonValue:
        """The value of a key that an object must have."""
        found = self.table()
        if key not in found:
            place = f"{self.path}: " if self.path else ""
            raise DamagedError(f"{self.where}: {place}has no {key!r}; it has {show(sorted(found))}")
        return JsonValue(found[key], self.where, f"{self.path}.{key}" if self.path else key)

    def find(self, key: str) -> JsonValue | None:
        """The value of a key, None if the object lacks it or it is null."""
        return None if self.table().get(key) is None else self[key]

    def table(self) -> dict[str, Any]:
        """An object, its values unchecked."""
        if not isinstance(self.value, dict):
            self.fail("an object")
        found: dict[str, Any] = self.value
        return found

    def items(self) -> Iterator[tuple[str, JsonValue]]:
        """Keys and values of an object."""
        for key, value in self.table().items():
            yield key, JsonValue(value, self.where, f"{self.path}[{key[:60]!a}]")

    def entries(self) -> Iterator[JsonValue]:
        """The items of a list."""
        if not isinstance(self.value, list):
            self.fail("a list")
        for number, value in enumerate(self.value):
            yield JsonValue(value, self.where, f"{self.path}[{number}]")

    def text(self, most: int = 1 << 20) -> str:
        """A string of at most `most` characters."""
        if not isinstance(self.value, str) or len(self.value) > most:
            self.fail(f"text of at most {most} characters")
        return self.value

    def whole(self, least: int = 0, most: int = MAX_INT64) -> int:
        """A whole number in `[least, most]`; true and false are none."""
        if type(self.value) is not int or not least <= self.value <= most:
            self.fail(f"a whole number from {least} to {most}")
        return self.value

    def wholes(self, least: int = 0, most: int = MAX_INT64) -> list[int]:
        """A list of whole numbers in `[least, most]`."""
        found: Any = self.value
        if not isinstance(found, list) or any(type(n) is not int or not least <= n <= most for n in found):
            self.fail(f"a list of whole numbers from {least} to {most}")
        return list(found)

    def number(self) -> float:
        """A finite number; true and false are none."""
        if type(self.value) not in (int, float) or not abs(self.value) < 1e308:
            self.fail("a number")
        return float(self.value)

    def flag(self) -> bool:
        """True or false."""
        if type(self.value) is not bool:
            self.fail("true or false")
        return self.value

    def free(self) -> dict[str, Any]:
        """An object of anything, at most MAX_DEPTH levels deep."""
        level: list[Any] = [self.table()]
        for _ in range(MAX_DEPTH):
            level = [
                inner
                for outer in level
                for inner in (outer.values() if isinstance(outer, dict) else outer)
                if isinstance(inner, dict | list)
            ]
            if not level:
                break
        else:
            self.fail(f"values of at most {MAX_DEPTH} levels")
        return self.table()
