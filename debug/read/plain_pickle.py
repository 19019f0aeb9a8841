"""Unpickle what torch's Flight Recorder writes, and nothing else: no class, no function, bounded size."""

from __future__ import annotations

import io
import pickle  # only through the subclass below, which refuses every class
from typing import Any, NoReturn

from titan_ckpt.errors import UnsafeContentError
from titan_ckpt.parsing.pickle_check import check_pickle

MAX_DUMP_BYTES = 1 << 28


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, strings, lists, tuples and dicts only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise UnsafeContentError(f"pickle asks for {module[:100]}.{name[:100]}; a Flight Recorder dump holds no class")

    def persistent_load(self, _pid: Any) -> NoReturn:
        raise UnsafeContentError("pickle asks for a persistent object; a Flight Recorder dump holds none")


def plain_loads(data: bytes) -> Any:
    """The plain value pickled in `data`. UnsafeContentError for a class; ValueError or DamagedError for a damaged pickle.

    Takes about 20 bytes of memory per byte of `data` (see `check_pickle`).

    >>> plain_loads(pickle.dumps({"a": [1, 2]}))
    {'a': [1, 2]}
    """
    if len(data) > MAX_DUMP_BYTES:
        raise ValueError(f"{len(data)} bytes; no dump is larger than {MAX_DUMP_BYTES}")
    check_pickle(data, where="the pickle")
    try:
        # Buffered, because the unpickler reads ahead only where it can peek: three times as fast
        return _PlainUnpickler(io.BufferedReader(io.BytesIO(data), 1 << 16)).load()
    except UnsafeContentError:
        raise
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except MemoryError as error:
        raise ValueError("asks for more memory than there is") from error
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def looks_like_pickle(head: bytes) -> bool:
    """Whether a file that starts with `head` is a pickle of protocol 2 to 5."""
    return len(head) >= 2 and head[0:1] == pickle.PROTO and 2 <= head[1] <= 5
