"""TOML files to frozen dataclasses: `base` chains, `--set`, the origin of every value, and errors that name the key.

Works for any tree of dataclasses, also those of users. A field named `from_` is written `from` in TOML.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from titan_ckpt.arguments import nearest, text_of_file
from titan_ckpt.errors import ConfigError
from titan_ckpt.location import redact_values
from titan_ckpt.toml_text import MAX_TEXT, parse_toml
from titan_ckpt.trainer.seams.boundary import calling

T = TypeVar("T")
Tree: TypeAlias = dict[str, Any]
Origins: TypeAlias = dict[str, str]
DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[T]):
    """A config and its origins: for every dotted key that is not left at its default, the file or `--set` that set it."""

    config: T
    origins: Origins


def resolve(
    kind: type[T], path: str, sets: Sequence[str] = (), fill: Callable[[Tree, Origins], None] | None = None
) -> Resolved[T]:
    """Read `path` with its bases, apply `sets` (`key=value`, the value in TOML), and check every key and type.

    `fill` may add values to the tree, with their origin, before it is checked.
    """
    tree, origins = read_file(path)
    merge_sets(tree, sets, origins)
    if fill is not None:
        fill(tree, origins)
    return Resolved(config=build_record(kind, tree, origins), origins=origins)


def merge_sets(tree: Tree, sets: Sequence[str], origins: Origins) -> None:
    """Lay `key=value` texts over `tree`, in place."""
    for text in sets:
        key, value = parse_set(text)
        merge_tables(tree, _nest(key, value), origins, f"--set {key}")


def read_file(path: str, _chain: tuple[str, ...] = ()) -> tuple[Tree, Origins]:
    """The merged tree of a TOML file and its `base` chain, and the origin of each key."""
    full = os.path.abspath(path)
    if full in _chain:
        raise ConfigError(f"{path}: `base` is circular: {' -> '.join([*_chain, full])}")
    try:
        own = parse_toml(text_of_file(path, 4 * MAX_TEXT), path)
    except FileNotFoundError as error:
        needed_by = f" (the `base` of {_chain[-1]})" if _chain else ""
        raise ConfigError(f"{path}{needed_by}: no such config file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    base = own.pop("base", None)
    if base is None:
        tree, origins = Tree(), Origins()
    elif isinstance(base, str):
        tree, origins = read_file(os.path.join(os.path.dirname(path), base), (*_chain, full))
    else:
        raise ConfigError(f"{path}: base: expected the name of a TOML file, found {base!r:.80}")
    merge_tables(tree, own, origins, path)
    return tree, origins


def parse_set(text: str) -> tuple[str, Any]:
    """Key and value of a `--set`; a value that is not TOML is taken as a string, so that URLs need no quotes.

    >>> parse_set("mesh.tp=4"), parse_set("save.url=s3://bucket/run"), parse_set("optimizer.betas=[0.9, 0.95]")
    (('mesh.tp', 4), ('save.url', 's3://bucket/run'), ('optimizer.betas', [0.9, 0.95]))
    """
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set {text!r}: write section.key=value, for example --set mesh.tp=4")
    if len(text.splitlines()) > 1:
        raise ConfigError(f"--set {text!r}: a line break; give each setting its own --set")
    try:
        return key, parse_toml(f"value = {value}", "--set")["value"]
    except ConfigError:
        if value.lstrip()[:1] in tuple("\"'[{"):
            raise ConfigError(f"--set {text!r}: {value.strip()!r} is not a TOML value") from None
        return key, value.strip()


def merge_tables(tree: Tree, other: Mapping[str, Any], origins: Origins, origin: str, prefix: str = "") -> None:
    """Merge `other` into `tree` in place; tables merge, other values replace."""
    for key, value in other.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            if not isinstance(tree.get(key), dict):
                tree[key] = {}
            merge_tables(tree[key], value, origins, origin, f"{name}.")
        else:
            tree[key] = value
        origins[name] = origin


def _nest(key: str, value: Any) -> Tree:
    head, _, rest = key.partition(".")
    return {head: _nest(rest, value) if rest else value}


def build_record(kind: type[T], tree: Mapping[str, Any], origins: Mapping[str, str], prefix: str = "") -> T:
    """An instance of dataclass `kind` from `tree`; unknown keys, missing keys and wrong types are ConfigErrors."""
    with calling(_record_of(prefix), kind):
        hints = get_type_hints(kind)
    fields = {field.name.rstrip("_"): field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise ConfigError(_unknown(name, key, hints, origins))
        values[fields[key].name] = _convert(hints[fields[key].name], value, name, origins)
    for key, field in fields.items():
        if field.name not in values and _has_no_default(field):
            raise ConfigError(f"{prefix}{key}: missing; the config must set it")
    with calling(_record_of(prefix), kind):
        return kind(**values)


def _record_of(prefix: str) -> str:
    return f"the record of [{prefix.rstrip('.')}]" if prefix else "a table's record"


def _unknown(name: str, key: str, hints: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    section, known = name.removesuffix(key), [field.rstrip("_") for field in hints]
    tables = ((table, hint) for table, hint in hints.items() if dataclasses.is_dataclass(hint))
    in_tables = [f"{table}.{field.name}" for table, hint in tables for field in dataclasses.fields(hint)]
    hint = nearest(key, [*known, *(word for word in in_tables if word.endswith(f".{key}"))], section=section).strip()
    hint = hint or f"known here: {', '.join(section + other for other in sorted(known))}"
    return f"{_origin(name, origins)}: unknown key {name}; {hint}"


def _origin(name: str, origins: Mapping[str, str]) -> str:
    return origins.get(name, "config")


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: Any, name: str, origins: Mapping[str, str]) -> Any:
    """Convert `value` to type `hint`; accepts int for float and list for tuple, no other conversions."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(hint), value, name, origins)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise _wrong(hint, value, name, origins)
        return build_record(hint, value, origins, f"{name}.")
    if origin is tuple:
        return _convert_tuple(hint, value, name, origins)
    if origin is Literal:
        if value not in get_args(hint):
            raise _wrong(hint, value, name, origins)
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(hint, type) or hint is Any:
        raise ConfigError(f"{name}: a table cannot have values of type {describe_type(hint)}; see docs/extending.md")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise _wrong(hint, value, name, origins)
    return value


def _convert_union(hints: Sequence[Any], value: Any, name: str, origins: Mapping[str, str]) -> Any:
    candidates = [hint for hint in hints if hint is not type(None)]
    if len(candidates) == 1:
        return _convert(candidates[0], value, name, origins)
    for hint in candidates:
        try:
            return _convert(hint, value, name, origins)
        except ConfigError:
            continue
    raise _wrong(Union[tuple(candidates)], value, name, origins)  # noqa: UP007  (built at run time)


def _convert_tuple(hint: Any, value: Any, name: str, origins: Mapping[str, str]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(hint, value, name, origins)
    items = get_args(hint)
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise _wrong(hint, value, name, origins)
    pairs = enumerate(zip(items, value, strict=True))
    return tuple(_convert(item, part, f"{name}[{i}]", origins) for i, (item, part) in pairs)


def _wrong(hint: Any, value: Any, name: str, origins: Mapping[str, str]) -> ConfigError:
    return ConfigError(f"{_origin(name, origins)}: {name}: expected {describe_type(hint)}, found {toml_value(value)}")


def describe_type(hint: Any) -> str:
    """A type in plain words, for error messages.

    >>> describe_type(int), describe_type(tuple[float, ...]), describe_type(Literal["a", "b"])
    ('a whole number', 'a list of a number', '"a" or "b"')
    """
    plain = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    if hint in plain:
        return plain[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(item) for item in arguments if item is not type(None))
    if origin is Literal:
        return " or ".join(toml_value(item) for item in arguments)
    if origin is tuple:
        many = len(arguments) == 2 and arguments[1] is Ellipsis
        return f"a list of {describe_type(arguments[0])}" if many else f"a list of {len(arguments)} values"
    return "a table" if dataclasses.is_dataclass(hint) else getattr(hint, "__name__", str(hint))


def as_dict(config: Any) -> Tree:
    """A config as plain TOML/JSON values, with keys as in TOML; leaves out None, and hides secrets."""
    shown: Tree = redact_values(_table(config))
    return shown


def _table(config: Any) -> Tree:
    return {key: _plain(value) for key, value in _items(config) if value is not None}


def _items(config: Any) -> list[tuple[str, Any]]:
    return [(field.name.rstrip("_"), getattr(config, field.name)) for field in dataclasses.fields(config)]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _table(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def render(resolved: Resolved[Any]) -> str:
    """The whole config as TOML, each value with its origin as a comment."""
    lines: list[str] = []
    _render(resolved.config, resolved.origins, "", lines)
    return "\n".join(lines).strip() + "\n"


def _render(config: Any, origins: Mapping[str, str], prefix: str, lines: list[str]) -> None:
    tables = [(key, value) for key, value in _items(config) if dataclasses.is_dataclass(value)]
    plain = [(key, value) for key, value in _items(config) if not dataclasses.is_dataclass(value)]
    if prefix:
        lines += ["", f"[{prefix.rstrip('.')}]"]
    for key, value in plain:
        origin = origins.get(f"{prefix}{key}", DEFAULT)
        text = f"# {key} is not set" if value is None else f"{key} = {toml_value(value)}"
        lines.append(f"{text:<48}  # {origin}")
    for key, value in tables:
        _render(value, origins, f"{prefix}{key}.", lines)


def toml_value(value: Any) -> str:
    """A value as TOML; a record as an inline table without the values that are None.

    >>> toml_value((1, 2.5)), toml_value("a"), toml_value(True)
    ('[1, 2.5]', '"a"', 'true')
    """
    if dataclasses.is_dataclass(value) or isinstance(value, dict):
        items = _items(value) if dataclasses.is_dataclass(value) else value.items()
        return "{" + ", ".join(f"{k} = {toml_value(v)}" for k, v in items if v is not None) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
