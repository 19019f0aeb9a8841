"""Generate docs/api.md from the signatures and docstrings of the public names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

WIDTH = 110
PACKAGES = ("titan_ckpt", "titan_ckpt.debug", "titan_ckpt.converters", "titan_ckpt.trainer")
# Types that public functions return or raise, by module; not exported, since users never construct them.
RECORDS = {
    "titan_ckpt.saving.options": ("SaveHandle", "SaverMetrics"),
    "titan_ckpt.state.exchange": ("SaveError",),
    "titan_ckpt.format.commit": ("Commit",),
    "titan_ckpt.check.scan": ("Problem",),
    "titan_ckpt.check.diff": ("Difference",),
    "titan_ckpt.resharding.reshard": ("ReshardPlan", "ReshardReport"),
    "titan_ckpt.sharding.placement": ("Box", "Shard"),
    "titan_ckpt.dcp.storage": ("PlanesZstd",),
}
# Classes for loops of other libraries that the development install has.
LOOPS = {
    "titan_ckpt.integrations.accelerate": "AcceleratorCheckpoints",
    "titan_ckpt.integrations.transformers": "TrainerCheckpoints",
}
HEAD = """\
# titan-ckpt in Python

Written by `make docs` from the docstrings. Names carry their units (`_bytes`, `_s`); shapes, boxes and offsets count elements; an
error named here is a `TitanError` (the tree is at the end). `url` is any fsspec URL or local path of a run.
"""
_DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


def reference() -> str:
    """The whole page."""
    sections = [HEAD]
    for package in PACKAGES:
        module = importlib.import_module(package)
        sections.append(f"## {package}\n")
        for name in sorted(module.__all__, key=str.lower):
            if not name.startswith("__"):
                sections.extend(_entry(name, getattr(module, name)))
    sections.append("## titan_ckpt.integrations\n\nFor loops of other libraries: [loops.md](loops.md).\n")
    for module_name, name in LOOPS.items():
        sections.extend(_entry(name, getattr(importlib.import_module(module_name), name), where=module_name))
    sections.append("## What they return and take\n")
    for module_name, names in RECORDS.items():
        module = importlib.import_module(module_name)
        for name in names:
            sections.extend(_entry(name, getattr(module, name), where=module_name))
    errors = importlib.import_module("titan_ckpt.errors")
    sections.append(f"## Errors\n\n`titan_ckpt.errors`. {inspect.getdoc(errors)}\n")
    return "\n".join(sections)


def _entry(name: str, value: Any, *, where: str | None = None) -> Iterator[str]:
    """A function, or a class and its public methods and properties."""
    label = f"{where}.{name}" if where else name
    if not inspect.isclass(value):
        yield f"### {label}\n\n{_signature(name, value)}\n\n{_doc(value)}\n"
        return
    is_plain = "__init__" in value.__dict__ or dataclasses.is_dataclass(value)
    yield f"### {label}\n\n{_signature(name, value) if is_plain else _bases(value)}\n\n{_doc(value)}\n"
    for attribute, member in value.__dict__.items():
        is_public = not attribute.startswith("_") and not _is_called_by_others(value, attribute)
        if is_public and (text := _member(f"{name}.{attribute}", member)):
            yield text


def _is_called_by_others(value: type, attribute: str) -> bool:
    """Whether the method overrides one of another library's base class, which calls it instead of the user."""
    return any(attribute in base.__dict__ for base in value.__mro__ if not base.__module__.startswith("titan_ckpt"))


def _member(label: str, member: Any) -> str:
    """A method or property with its docstring; empty for a field, which the class's signature shows."""
    function = getattr(member, "__func__", member)
    if isinstance(member, property) or hasattr(member, "func"):
        getter = member.fget if isinstance(member, property) else member.func
        returned = getter.__annotations__.get("return", "")
        return f"#### {label}\n\n```python\n{label}: {_annotation(returned)}\n```\n\n{_doc(getter)}\n"
    if not inspect.isfunction(function):
        return ""
    return f"#### {label}\n\n{_signature(label, function)}\n\n{_doc(function)}\n"


def _bases(value: type) -> str:
    return f"```python\nclass {value.__name__}({', '.join(base.__name__ for base in value.__bases__)})\n```"


def _doc(value: Any) -> str:
    """The docstring as Markdown, its doctests fenced."""
    text = inspect.cleandoc(value.__doc__ or "")
    return _DOCTEST.sub(lambda match: f"```pycon\n{match.group()}\n```", text)


def _signature(label: str, function: Callable[..., Any]) -> str:
    """`label(parameters) -> type` in a fence, one parameter per line if it is too long."""
    signature = inspect.signature(function)
    words = list(_parameters(signature))
    returned = "" if inspect.isclass(function) else f" -> {_annotation(signature.return_annotation)}"
    line = f"{label}({', '.join(words)}){returned}"
    if len(line) > WIDTH:
        line = f"{label}(\n" + "".join(f"    {word},\n" for word in words) + f"){returned}"
    return f"```python\n{line}\n```"


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    kinds = inspect.Parameter
    is_starred = False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is kinds.KEYWORD_ONLY and not is_starred:
            is_starred = True
            yield "*"
        stars = {int(kinds.VAR_POSITIONAL): "*", int(kinds.VAR_KEYWORD): "**"}.get(int(parameter.kind), "")
        is_starred = is_starred or stars == "*"
        annotation = "" if parameter.annotation is kinds.empty else f": {_annotation(parameter.annotation)}"
        default = "" if parameter.default is kinds.empty else f" = {_default(parameter.default)}"
        yield f"{stars}{parameter.name}{annotation}{default}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _default(value: Any) -> str:
    """A default as source text; `...` for one from a factory."""
    if inspect.isfunction(value):
        return str(value.__name__)
    text = repr(value)
    return "..." if text.startswith("<") else text
