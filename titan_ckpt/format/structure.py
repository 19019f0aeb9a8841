"""The nesting of a state: which containers, under which keys, hold the entries of a checkpoint. No torch.

A structure is rows, parents before children, in the state's own order. Row 0 is the root, `(kind,)`. A container is
`(parent, key, kind)`, an entry `(parent, key)`; parents are numbered by containers alone. A name is the keys' text, joined by
dots. Kinds are `KINDS`, and `defaultdict:int` and its like. A key that is not text or a whole number is `(type, ...)`.

A wrapper subclass is a mapping of its inner tensors, named `NAME.part`, with a value `NAME.__subclass__`, its mark, that says
what they make: `Mark.value`. Protocol of torch: `__tensor_flatten__`, `__tensor_unflatten__` (torch/utils/_python_dispatch.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from titan_ckpt.errors import DamagedError, UsageError
from titan_ckpt.parsing.json_values import JsonValue

KeyCode: TypeAlias = Any
Row: TypeAlias = tuple[Any, ...]
Structure: TypeAlias = tuple[Row, ...]
Path: TypeAlias = tuple[str | int, ...]
"""Keys as DCP's `planner_data` has them: text for a mapping, a number for a list."""

DICT, LIST, TUPLE = "dict", "list", "tuple"
FACTORIES: dict[str, Any] = {
    "": None, "int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "set": set, "tuple": tuple,
}  # fmt: skip
KINDS = (DICT, LIST, TUPLE, "OrderedDict", "Counter", *(f"defaultdict:{name}" for name in FACTORIES))
MOST_EXACT = 1 << 53
MAX_KEY_LEVELS = 16
MOST_NAME_CHARS = 1 << 28  # a million names of 268 characters; nesting makes them long without making a file long
FREE_GAPS = 10_000


def kind_of(container: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> str:
    """The kind of a container; other mappings, sequences and defaultdicts of other factories count as the plain ones."""
    if isinstance(container, list | tuple):
        return LIST if isinstance(container, list) else TUPLE
    if isinstance(container, defaultdict):
        name = getattr(container.default_factory, "__name__", "") if container.default_factory else ""
        return f"defaultdict:{name}" if FACTORIES.get(name, KINDS) is container.default_factory else DICT
    return next((kind.__name__ for kind in (OrderedDict, Counter) if isinstance(container, kind)), DICT)


def encode_key(key: Any) -> KeyCode:
    """A key as JSON can hold it; one of another type as its text, under which alone it can be found again."""
    if type(key) is str or (type(key) is int and abs(key) < MOST_EXACT):
        return key
    if key is None or type(key) in (bool, int):
        return (type(key).__name__, str(key))
    if type(key) is float:
        return ("float", key.hex())
    if type(key) is bytes:
        return ("bytes", key.hex())
    if type(key) is tuple:
        return ("tuple", *map(encode_key, key))
    return ("text", str(key))


_DECODERS: dict[str, Callable[[str], Any]] = {
    "NoneType": lambda _: None, "bool": lambda text: text == "True", "int": int, "float": float.fromhex, "bytes": bytes.fromhex,
    "text": str,
}  # fmt: skip


def decode_key(code: KeyCode) -> Any:
    """The key that a code stands for."""
    if not isinstance(code, tuple):
        return code
    if code[0] == "tuple":
        return tuple(map(decode_key, code[1:]))
    return _DECODERS[code[0]](code[1])


def names(structure: Structure) -> list[str | None]:
    """The name of each row's entry, None for containers."""
    found: list[str | None] = [None]
    containers = [""]
    for row in structure[1:]:
        name = f"{containers[row[0]]}{decode_key(row[1])}"
        if len(row) == 2:
            found.append(name)
        else:
            found.append(None)
            containers.append(f"{name}.")
    return found


def container_names(structure: Structure) -> dict[str, int]:
    """The names of all containers below the root, and how many items each has."""
    found, numbers = dict[str, int](), [""]
    for row in structure[1:]:
        if numbers[row[0]]:
            found[numbers[row[0]]] += 1
        if len(row) == 3:
            name = f"{numbers[row[0]]}.{decode_key(row[1])}" if numbers[row[0]] else str(decode_key(row[1]))
            numbers.append(name)
            found.setdefault(name, 0)
    return found


def planner_paths(structure: Structure) -> dict[str, Path]:
    """The path of each entry by name, as DCP records it."""
    found: dict[str, Path] = {}
    containers: list[tuple[Path, bool]] = [((), structure[0][0] in (LIST, TUPLE))]
    for row, name in zip(structure[1:], names(structure)[1:], strict=True):
        above, is_list = containers[row[0]]
        path = (*above, row[1] if is_list else str(decode_key(row[1])))
        if name is None:
            containers.append((path, row[2] in (LIST, TUPLE)))
        else:
            found[name] = path
    return found


def of_paths(paths: Mapping[str, Sequence[str | int]]) -> Structure:
    """The structure that paths of DCP's index describe: a number is a place in a list. UsageError if they contradict another."""
    rows: list[Row] = [(DICT,)]
    numbers: dict[tuple[int, str | int], int] = {}  # of each container, by that of the one above and its key
    for path in paths.values():
        if not path:
            raise UsageError("an entry without a key")
        above = 0
        for key, below in pairwise(path):
            if (above, key) not in numbers:
                numbers[above, key] = len(numbers) + 1
                rows.append((above, key, LIST if isinstance(below, int) else DICT))
            above = numbers[above, key]
        rows.append((above, path[-1]))
    kinds = [row[-1] for row in rows if len(row) != 2]
    if any(isinstance(row[1], int) != (kinds[row[0]] == LIST) for row in rows[1:]):
        raise UsageError("a list with keys that are no places")
    return merge([tuple(rows)])


def merge(structures: Sequence[Structure]) -> Structure:
    """The structure of all ranks' states together. UsageError if two keys lead to one name, or a place is of two kinds."""
    merged = _Merged(structures[0][0])
    for structure in dict.fromkeys(structures):
        merged.add(structure)
    return tuple(merged.rows)


class _Merged:
    """Rows of several structures, each place once."""

    def __init__(self, root: Row) -> None:
        self.rows = [root]
        self._places: dict[tuple[int, KeyCode], tuple[Any, int]] = {}
        self._names: dict[str, tuple[int, KeyCode]] = {}
        self._containers = 1

    def add(self, structure: Structure) -> None:
        numbers = [0]
        for row, name in zip(structure[1:], names(structure)[1:], strict=True):
            place, kind = (numbers[row[0]], row[1]), row[2] if len(row) == 3 else None
            if place not in self._places:
                self._places[place] = (kind, self._containers)
                self._containers += kind is not None
                self.rows.append((*place, *row[2:]))
            known, number = self._places[place]
            if known != kind or (name is not None and self._names.setdefault(name, place) != place):
                raise UsageError(
                    f"state has two entries for {name or decode_key(row[1])!r}: other keys with the same text, or a container on "
                    f"one rank that is something else on another; rename one of them"
                )
            if kind is not None:
                numbers.append(number)


def rebuild(structure: Structure, entries: Mapping[str, Any]) -> Any:
    """The nested state with the values of `entries`; an entry that has none is left out, in a list as None.

    DamagedError for lists that would be mostly such places.
    """
    gaps = [FREE_GAPS + len(structure)]
    containers: list[Any] = [empty_of(structure[0][0])]
    places: list[tuple[Any, Any, str]] = [(None, None, structure[0][0])]
    for row, name in zip(structure[1:], names(structure)[1:], strict=True):
        if name is None:
            containers.append(empty_of(row[2]))
            places.append((row[0], decode_key(row[1]), row[2]))
            _set(containers[row[0]], places[-1][1], containers[-1], gaps)
        elif name in entries:
            _set(containers[row[0]], decode_key(row[1]), entries[name], gaps)
    for number in reversed(range(1, len(containers))):
        parent, key, kind = places[number]
        if kind == TUPLE:
            containers[parent][key] = tuple(containers[number])
    return tuple(containers[0]) if structure[0][0] == TUPLE else containers[0]


def below(structure: Structure, prefix: str) -> Structure | None:
    """The structure inside the container named `prefix`, the whole one for ""; None if there is no such container, or several."""
    if not prefix:
        return structure
    texts, found, numbers, rows, count = [""], 0, dict[int, int](), list[Row](), 0
    for row in structure[1:]:
        if len(row) == 3:
            count += 1
            texts.append(f"{texts[row[0]]}{decode_key(row[1])}.")
            if texts[-1] == f"{prefix}.":
                found += 1
                numbers[count] = 0
                rows.append((row[2],))
                continue
        if row[0] in numbers:
            rows.append((numbers[row[0]], *row[1:]))
            if len(row) == 3:
                numbers[count] = len(numbers)
    return tuple(rows) if found == 1 else None


def empty_of(kind: str) -> Any:
    """A new container to fill; a tuple is filled as a list."""
    if kind.startswith("defaultdict:"):
        return defaultdict(FACTORIES[kind.partition(":")[2]])
    return {LIST: list, TUPLE: list, "OrderedDict": OrderedDict, "Counter": Counter}.get(kind, dict)()


def _set(container: Any, key: Any, value: Any, gaps: list[int]) -> None:
    if isinstance(container, list) and key >= len(container):
        gaps[0] -= key - len(container)
        if gaps[0] < 0:
            raise DamagedError(
                f"place {key} of a list of {len(container)} items: the checkpoint's structure is damaged"
            )
        container += [None] * (key + 1 - len(container))
    container[key] = value


def decode_structure(document: JsonValue) -> Structure:
    """The structure in a manifest. DamagedError if it contradicts itself."""
    rows: list[Row] = []
    kinds: list[str] = []
    lengths, total = [0], 0  # of the containers' names, and of all names together, in characters
    for row in document.entries():
        cells = list(row.entries())
        kind = cells[-1].text() if len(cells) == (3 if rows else 1) else None
        if (
            len(cells) > 3
            or not cells
            or (kind is not None and kind not in KINDS)
            or (kind is None and len(cells) != 2)
        ):
            row.fail("a row of a structure")
        if rows:
            parent = cells[0].whole(0, len(kinds) - 1)
            is_place = kinds[parent] in (LIST, TUPLE)
            key = cells[1].whole(0, len(document.value)) if is_place else _decode_code(cells[1])
            rows.append((parent, key, *([] if kind is None else [kind])))
            length = lengths[parent] + len(str(key)) + 1
            total += length
            if total > MOST_NAME_CHARS:
                row.fail(f"a structure whose names have at most {MOST_NAME_CHARS} characters together")
            if kind is not None:
                lengths.append(length)
        else:
            rows.append((kind,))
        if kind is not None:
            kinds.append(kind)
    if not rows:
        document.fail("the rows of a structure")
    return tuple(rows)


def _decode_code(cell: JsonValue, levels: int = MAX_KEY_LEVELS) -> KeyCode:
    """A key's code whose key can be made."""
    if isinstance(cell.value, str):
        return cell.text()
    if type(cell.value) is int:
        return cell.whole(-MOST_EXACT, MOST_EXACT)
    parts = list(cell.entries())
    kind = parts[0].text() if parts else ""
    if kind == "tuple" and levels:
        return ("tuple", *(_decode_code(part, levels - 1) for part in parts[1:]))
    if kind not in _DECODERS or len(parts) != 2:
        cell.fail("a key")
    code = (kind, parts[1].text())
    try:
        decode_key(code)
    except ValueError:
        cell.fail(f"a key of the type {kind}")
    return code


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
