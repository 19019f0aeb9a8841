"""Decode the bytes that `torch.save` wrote for one value."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from titan_ckpt.errors import DamagedError
from titan_ckpt.parsing import value_numpy, value_standard
from titan_ckpt.parsing.value_archive import read_archive
from titan_ckpt.parsing.value_build import Builder, Known
from titan_ckpt.parsing.value_records import read_pickle

_NOTHING: Mapping[str, Any] = {}


def decode_value(data: bytes, *, where: str, allowed: Mapping[str, Any] = _NOTHING) -> Any:
    """The value whose `torch.save` is `data`; `where` names it in errors.

    Plain data, tensors, and the types of `value_standard`, `value_numpy` and `value_torch` are made; objects of other classes
    only if `allowed` has the class by `module.name`. Time and memory are bounded by the length of `data`.

    UnsafeContentError names a class that is missing in `allowed`; DamagedError says what `torch.save` cannot have written.
    """
    pickled, storages = read_archive(data, where=where)
    root, names = read_pickle(pickled, where=where)
    if not names and not storages:
        return root
    is_torch = any(module.partition(".")[0] == "torch" for module, _ in names)
    known = _with_torch() if is_torch else _plain()
    try:
        return Builder(where, storages, allowed, known).value(root)
    except RecursionError as error:
        raise DamagedError(f"{where}: nested too deeply to be made; flatten it") from error


@cache
def _plain() -> Known:
    return Known(
        constants=value_standard.CONSTANTS | value_numpy.CONSTANTS,
        constructors=value_standard.CONSTRUCTORS | value_numpy.CONSTRUCTORS,
    )


@cache
def _with_torch() -> Known:
    from titan_ckpt.parsing import value_tensors, value_torch  # tools for laptops read no such value

    plain = _plain()
    return Known(
        constants={**plain.constants, **value_torch.CONSTANTS},
        constructors={**plain.constructors, **value_tensors.CONSTRUCTORS, **value_torch.CONSTRUCTORS},
    )
