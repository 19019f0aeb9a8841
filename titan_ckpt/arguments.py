"""What callers pass: checks of words, numbers, types and JSON, whose UsageError names argument and value; progress callbacks."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import TypeAlias

from titan_ckpt.errors import UsageError

MAX_DEPTH = 64
"""Levels of lists and mappings in free-form JSON: what is saved, and what is read back."""
MAX_INT_BITS = 14_000
"""Python reads no integer of more than 4,300 digits."""
MAX_SHOWN = 200
OnProgress: TypeAlias = Callable[[int, int], None]
"""Hears how much is done, and of how much."""


def ignore_progress(_done: int, _total: int) -> None:
    """Nobody wants to hear."""


def check_word(value: object, words: Iterable[str], name: str) -> None:
    """UsageError unless `value` is one of `words`; suggests the nearest."""
    known = [str(word) for word in words]
    if isinstance(value, str) and value in known:
        return
    raise UsageError(f"{name} is {_shown(value)}; {nearest(value, known)}use one of {', '.join(known)}")


def nearest(value: object, known: Iterable[str], *, section: str = "") -> str:
    """`did you mean 'x'? ` with the word that is most like `value`, behind `section`; "" if none is.

    A name without its section means all that end with it: `tp` is 'mesh.tp'.
    """
    if not isinstance(value, str):
        return ""
    in_lower = {word.lower(): word for word in known}
    found = [word for word in in_lower if value and word.endswith(f".{value.lower()}")]
    found = found or get_close_matches(value.lower(), list(in_lower), n=1)
    return f"did you mean {' or '.join(repr(section + in_lower[word]) for word in found)}? " if found else ""


def check_flag(value: object, name: str) -> None:
    """UsageError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {_shown(value)}; give True or False")


def check_whole(value: object, name: str, *, at_least: int) -> None:
    """UsageError unless `value` is an int, not a bool, from `at_least` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise UsageError(f"{name} is {_shown(value)}; give a whole number from {at_least} on")


def check_number(value: object, name: str, *, above: float | None = None, at_least: float | None = None) -> None:
    """UsageError unless `value` is a finite number `above` or `at_least` a bound."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    is_inside = is_number and (above is None or value > above) and (at_least is None or value >= at_least)  # type: ignore[operator]
    if not is_inside:
        bound = f"above {above:g}" if above is not None else f"from {at_least or 0:g} on"
        raise UsageError(f"{name} is {_shown(value)}; give a finite number {bound}")


def check_type(value: object, name: str, *types: type, or_none: bool = False, hint: str) -> None:
    """UsageError unless `value` has one of `types`; `hint` says what to give."""
    if not (isinstance(value, types) or (or_none and value is None)):
        raise UsageError(
            f"{name} is {_shown(value)}, of type {type(value).__name__}; give {hint}{' or None' if or_none else ''}"
        )


def check_callable(value: Callable[..., object] | None, name: str, *, or_none: bool = False) -> None:
    """UsageError unless `value` can be called."""
    if not (callable(value) or (or_none and value is None)):
        raise UsageError(f"{name} is {_shown(value)}; give a function{' or None' if or_none else ''}")


def check_text(value: str, name: str) -> None:
    """UsageError for text that UTF-8 cannot hold: half a surrogate pair, as in the name of a file that is not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{name} is {value[:MAX_SHOWN]!a}: UTF-8 cannot hold the character {value[error.start]!a}, so it could not be "
            f"read back; replace it, for example with os.fsencode(text).decode(errors='replace')"
        ) from error


def _shown(value: object) -> str:
    """A value as a short piece of text, whatever its size and whatever its `repr` does."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  (whatever a repr raises; the type is named)
        return f"a {type(value).__name__} whose repr() raises {type(error).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def check_json(value: object, name: str, depth: int = 0) -> None:
    """UsageError, with the place, unless JSON holds `value` and can be read back.

    That is text as keys, finite numbers, text that UTF-8 can hold, at most MAX_DEPTH levels, no other types.
    """
    if isinstance(value, Mapping | list | tuple) and depth >= MAX_DEPTH:
        raise UsageError(f"{name[:MAX_SHOWN]}... is nested more than {MAX_DEPTH} deep, or contains itself")
    if isinstance(value, str):
        check_text(value, name)
        return
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise UsageError(
            f"{name} is an integer of {value.bit_length()} bits, which could not be read back: store it as text"
        )
    if value is None or isinstance(value, int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UsageError(f"{name} is {value!r}, which JSON cannot hold; store None or text instead")
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{name} has the key {_shown(key)}; JSON would change it to text: use text as keys")
            check_text(key, f"{name}: a key")
            check_json(inner, f"{name}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_json(inner, f"{name}[{index}]", depth + 1)
    else:
        raise UsageError(f"{name} is of type {type(value).__name__}, which is not JSON: convert it to numbers or text")


def text_of_file(path: str, limit: int) -> str:
    """The text of a file that a caller names, or its first `limit` bytes. OSError, UnicodeDecodeError if it cannot be read.

    A pipe may be named (`<(command)`), but one into which nobody writes is an error, and is not waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        os.set_blocking(descriptor, True)
        data = file.read(limit)
    if not data and not os.path.isfile(path):
        raise OSError(errno.ENODATA, "not a file, and nobody writes into it")
    return data.decode("utf-8")
