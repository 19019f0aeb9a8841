"""Every setting of the config with its type, default and meaning, taken from the records themselves.

The meaning of a setting is the comment behind its field; the meaning of a table is the docstring of its record.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from titan_ckpt.arguments import nearest
from titan_ckpt.errors import UsageError
from titan_ckpt.trainer.config.ranges import RANGES
from titan_ckpt.trainer.config.toml_records import describe_type, toml_value
from titan_ckpt.trainer.config.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. `default` is TOML; None if the config must set it, "" if nothing stands for it in TOML."""

    name: str  # dotted, such as mesh.tp
    type: str
    default: str | None
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of the file: its settings, and what it is for."""

    name: str
    meaning: str
    settings: tuple[Setting, ...]


MODEL_FROM = Setting(
    name="model.from", type="a string", default='""',
    meaning="a Hugging Face folder or checkpoint that gives all of [model], and resume.from and data.tokenizer if not set",
)  # fmt: skip


def tables() -> list[Table]:
    """The tables of a config, in the order of its records."""
    hints = get_type_hints(TrainConfig)
    found = [_table(field.name, hints[field.name]) for field in dataclasses.fields(TrainConfig)]
    return [
        dataclasses.replace(table, settings=(MODEL_FROM, *table.settings)) if table.name == "model" else table
        for table in found
    ]


def explain(name: str) -> Setting | Table:
    """The setting or table `name`. UsageError if there is none, with the nearest."""
    known: dict[str, Setting | Table] = {}
    for table in tables():
        known |= {table.name: table} | {setting.name: setting for setting in table.settings}
    if name in known:
        return known[name]
    raise UsageError(f"no setting {name!r}; {nearest(name, known)}`titan-ckpt config` lists all")


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a config file, for editors that complete and check TOML."""
    top = _schema_of(TrainConfig)
    top["properties"]["base"] = {
        "type": "string",
        "description": "a config that is read first and overridden by this one",
    }
    top.pop("required")  # a base may set it
    model = top["properties"]["model"]
    model.pop("required")  # `from` may give them
    model["properties"]["from"] = {"type": "string", "description": MODEL_FROM.meaning}
    for name, least, most in RANGES:
        table, _, key = name.partition(".")
        top["properties"][table]["properties"][key] |= {"minimum": least, "maximum": most}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "titan-ckpt train"} | top


def _table(name: str, record: Any) -> Table:
    return Table(name=name, meaning=_first_paragraph(record), settings=tuple(_settings(f"{name}.", record)))


def _settings(prefix: str, record: Any) -> Iterator[Setting]:
    hints, meanings = get_type_hints(record), comments(record)
    for field in dataclasses.fields(record):
        key, inner = field.name.rstrip("_"), _record_in(hints[field.name])
        yield Setting(
            name=f"{prefix}{key}",
            type=describe_type(hints[field.name]),
            default=_default(field),
            meaning=meanings.get(field.name, ""),
        )
        if inner is not None:
            yield from _settings(f"{prefix}{key}.", inner)


def _default(field: dataclasses.Field[Any]) -> str | None:
    if field.default is not dataclasses.MISSING:
        return "" if field.default is None else toml_value(field.default)
    return None if field.default_factory is dataclasses.MISSING else toml_value(field.default_factory())


def _record_in(hint: Any) -> Any:
    """The record that a table, or the tables of a list, are read into; None for plain values."""
    for part in (hint, *get_args(hint)):
        if dataclasses.is_dataclass(part):
            return part
    return None


def _first_paragraph(record: Any) -> str:
    return " ".join(inspect.cleandoc(record.__doc__ or "").partition("\n\n")[0].split())


@cache
def comments(record: type) -> dict[str, str]:
    """The comment behind each field of a dataclass, or inside the parentheses of its default."""
    source = textwrap.dedent(inspect.getsource(record))
    by_line: dict[int, str] = {}
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT:
            by_line[token.start[0]] = token.string.lstrip("# ")
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    names = {field.name for field in dataclasses.fields(record)}
    return {
        node.target.id: " ".join(by_line[line] for line in _lines(node) if line in by_line)
        for node in body.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in names
    }


def _lines(node: ast.AnnAssign) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _schema_of(hint: Any) -> dict[str, Any]:
    plain = {int: "integer", float: "number", str: "string", bool: "boolean"}
    if hint in plain:
        return {"type": plain[hint]}
    origin, arguments = get_origin(hint), [part for part in get_args(hint) if part is not type(None)]
    if origin is Literal:
        return {"enum": arguments}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _schema_of(arguments[0])}
    if origin is tuple:
        items = [_schema_of(part) for part in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if dataclasses.is_dataclass(hint):
        return _schema_of_record(hint)
    if len(arguments) == 1:
        return _schema_of(arguments[0])
    return {"anyOf": [_schema_of(part) for part in arguments]}


def _schema_of_record(record: Any) -> dict[str, Any]:
    hints, meanings = get_type_hints(record), comments(record)
    properties, required = {}, []
    for field in dataclasses.fields(record):
        key = field.name.rstrip("_")
        properties[key] = _schema_of(hints[field.name])
        if meanings.get(field.name):
            properties[key]["description"] = meanings[field.name]
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(key)
    described = {"description": _first_paragraph(record), "type": "object", "properties": properties}
    return described | {"additionalProperties": False, "required": required}
