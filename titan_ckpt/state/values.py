"""Values that are not tensors, to the bytes that DCP writes for them. What could not be loaded again is refused here."""

from __future__ import annotations

import datetime
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import TitanError, UnsafeContentError, UsageError
from titan_ckpt.parsing.pickle_check import check_pickle
from titan_ckpt.parsing.value_archive import write_archive
from titan_ckpt.parsing.values import decode_value
from titan_ckpt.state.classes import allowed_by, objects_in

_ATOMS = frozenset({int, float, str, bool, type(None)})
_CONTAINERS = frozenset({list, tuple, dict})


class Encoder:
    """Encodes the values of one state; equal small values are encoded once."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def encode(self, fqn: str, value: Any) -> bytes:
        """The bytes that `torch.save` would write, or others that `torch.load` reads alike.

        UsageError if `value` cannot be pickled, or could not be loaded without running code that only the file names.
        """
        try:
            is_atom = type(value) in _ATOMS
            if not is_atom and not is_plain(value):
                return _by_torch(fqn, value)
            pickled = pickle.dumps(value, protocol=2)
            data = self._known.get(pickled)
            if data is None:
                data = self._known[pickled] = write_archive(pickled)
                if not is_atom or (type(value) is str and not value.isascii()):
                    check_pickle(pickled, where=fqn, are_surrogates_allowed=True)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{fqn}: a {type(value).__name__} cannot be stored: {type(error).__name__}: {error}"
            ) from error
        return data


def encode_value(fqn: str, value: Any) -> bytes:
    """The bytes of one value, as `Encoder.encode` makes them."""
    return Encoder().encode(fqn, value)


def is_plain(value: Any) -> bool:
    """Whether a value is made of numbers, text, None, lists, tuples and dicts alone, by their exact types."""
    inside, seen = [value], set[int]()
    while inside:
        each = inside.pop()
        if type(each) in _ATOMS:
            continue
        if type(each) not in _CONTAINERS:
            return False
        if id(each) in seen:
            continue
        seen.add(id(each))
        parts = [*each.keys(), *each.values()] if isinstance(each, dict) else each
        if not set(map(type, parts)) <= _ATOMS:
            inside += parts
    return True


def _by_torch(fqn: str, value: Any) -> bytes:
    """As `torch.save` writes it; in a later protocol of pickle what protocol 2 cannot name: a class inside of another one."""
    _refuse_shards(fqn, value)
    refused: UsageError | None = None
    for protocol in (2, 4):
        try:
            return _checked(fqn, value, _torch_bytes(value, protocol))
        except UsageError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _refuse_shards(fqn: str, value: Any) -> None:
    """UsageError for a tensor of which each rank has a part, inside of a value, which is stored as one rank has it."""
    for each in objects_in(value):
        is_part = isinstance(each, ShardedTensor) or (isinstance(each, DTensor) and each.device_mesh.size() > 1)
        if is_part:
            raise UsageError(
                f"{fqn}: a {type(value).__name__} holds a {type(each).__name__}, of which each rank has a part, and one of them "
                "would be stored for all: put it into a mapping, a list or a tuple, which are taken apart"
            )


class _Exact(pickle._Pickler):
    """Pickles sets in an order that all ranks have, since their own follows hashes, which differ between processes; and times
    with their `fold`, which protocol 2 leaves out.
    """

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)
    save_reduce: Callable[..., None]  # of the base, which typeshed leaves out

    def save_in_order(self, items: Any) -> None:
        """A set as the call that makes it from a list."""
        self.save_reduce(type(items), (sorted(items, key=_order),), obj=items)

    def save_with_fold(self, moment: Any) -> None:
        """A time as later protocols call it."""
        self.save_reduce(*moment.__reduce_ex__(4), obj=moment)

    dispatch[set] = dispatch[frozenset] = save_in_order
    dispatch[datetime.datetime] = dispatch[datetime.time] = save_with_fold


def _order(item: Any) -> bytes:
    buffer = io.BytesIO()
    _Exact(buffer, 4).dump(item)
    return buffer.getvalue()


_EXACT = SimpleNamespace(__name__="exact", Pickler=_Exact)
_INEXACT = (b"__builtin__\nset\n", b"__builtin__\nfrozenset\n", b"datetime\ndatetime\n", b"datetime\ntime\n")


def _torch_bytes(value: Any, protocol: int) -> bytes:
    """As `torch.save` writes it, but by `_Exact`, which is slow, where that makes a difference."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    data = buffer.getvalue()
    if protocol == 2 and not any(name in data for name in _INEXACT):
        return data
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_EXACT, pickle_protocol=protocol)
    return buffer.getvalue()


def _checked(fqn: str, value: Any, data: bytes) -> bytes:
    """`data`, which must be readable where the state to be loaded holds objects of the same classes in this place."""
    try:
        decode_value(data, where=f"value {fqn!r}", allowed=allowed_by(value))
    except TitanError as error:
        why = error.what if isinstance(error, UnsafeContentError) else error
        raise UsageError(
            f"{fqn}: a {type(value).__name__} is not saved, since it could not be loaded again: {why}. Save its "
            f"state_dict(), or plain data from which it can be made"
        ) from error
    return data
