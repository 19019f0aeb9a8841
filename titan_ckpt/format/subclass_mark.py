"""How a tensor that is made of others is stored: as a mapping of its parts, with a value that says what they make. No torch.

The parts are tensors named `NAME.part`; the value `NAME.__subclass__` is a dict, `Mark.value`. Protocol of torch:
`__tensor_flatten__` and `__tensor_unflatten__` (torch/utils/_python_dispatch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MARK = "__subclass__"
_FIELDS = frozenset({"class", "dtype", "shape", "parts", "own", "context"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What the parts make: a tensor of the class `name` (module and qualified name), of `dtype` and global `shape`.

    `parts` are the names of its parts, `own` those of which every shard has its own, with their number of dimensions in a
    shard: they are stored one after another, along leading dimensions. `context` is the rest, as the class gives it, for the
    whole tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    own: dict[str, int]
    context: Any

    @property
    def value(self) -> dict[str, Any]:
        """The value that is stored."""
        return {
            "class": self.name, "dtype": self.dtype, "shape": list(self.shape), "parts": list(self.parts), "own": self.own,
            "context": self.context,
        }  # fmt: skip

    def shape_of(self, part: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a part of the whole tensor, of which `stored` is that in the checkpoint."""
        return stored[len(stored) - self.own[part] :] if part in self.own else stored


def mark_of(value: Any) -> Mark | None:
    """The mark that a stored value is; None for any other value."""
    if type(value) is not dict or set(value) != _FIELDS:
        return None
    texts, shape, own = [value["class"], value["dtype"]], value["shape"], value["own"]
    if not _are(str, texts) or not _are(int, shape) or not _are(str, value["parts"]):
        return None
    if type(own) is not dict or not _are(str, list(own)) or not _are(int, list(own.values())):
        return None
    return Mark(
        name=texts[0],
        dtype=texts[1],
        shape=tuple(shape),
        parts=tuple(value["parts"]),
        own=own,
        context=value["context"],
    )


def _are(kind: type, values: Sequence[Any]) -> bool:
    return type(values) is list and all(type(each) is kind for each in values)


def owner_of(name: str) -> str | None:
    """The name of the tensor that a value of this name marks; None for any other name.

    >>> owner_of("model.weight.__subclass__")
    'model.weight'
    """
    return name.removesuffix(MARK).removesuffix(".") if name == MARK or name.endswith(f".{MARK}") else None
