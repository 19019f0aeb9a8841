"""Rules for the whole codebase: lazy imports, stable exported names, minimum versions, an up-to-date reference."""

from __future__ import annotations

import doctest
import importlib
import json
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import titan_ckpt
from tools.docs.cli_docs import reference
from tools.paths import DOCS, ROOT

HEAVY = ("torch", "s3fs", "textual", "transformers", "botocore")
PUBLIC = [
    "Checkpoint",
    "CheckpointInfo",
    "CopyReport",
    "LoadPolicy",
    "LoadReport",
    "MeshSpec",
    "PruneReport",
    "RetentionPolicy",
    "SaveOptions",
    "SaveReport",
    "Saver",
    "StorageReader",
    "StorageWriter",
    "Store",
    "TitanError",
    "Workers",
    "__version__",
    "convert",
    "cp",
    "diff",
    "list_checkpoints",
    "load",
    "open_checkpoint",
    "open_store",
    "plan_reshard",
    "prune",
    "reshard",
    "run_plan",
    "save",
    "verify",
]


def _fresh(code: str) -> str:
    """Output of `code` in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "modules",
    [
        "titan_ckpt, titan_ckpt.cli.main",
        "titan_ckpt.debug, titan_ckpt.debug.cli",
        ", ".join(f"titan_ckpt.cli.{name}" for name in ("ls", "inspect", "verify", "diff", "cp", "prune")),
        "titan_ckpt.resharding.reshard, titan_ckpt.cli.reshard",
        "titan_ckpt.tui.data.incident, titan_ckpt.tui.session.session",
    ],
)
def test_laptop_commands_import_nothing_heavy(modules: str) -> None:
    code = f"import sys, json, {modules}; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    assert json.loads(_fresh(code)) == []


def test_the_exported_names_are_these() -> None:
    assert sorted(titan_ckpt.__all__) == PUBLIC
    assert all(getattr(titan_ckpt, name) is not None for name in PUBLIC)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'saev'"):
        titan_ckpt.saev  # noqa: B018


@pytest.mark.parametrize("name", ["convert", "cp", "diff", "load", "prune", "reshard", "save", "verify"])
def test_the_main_functions_are_plain_functions(name: str) -> None:
    function = getattr(titan_ckpt, name)
    assert isinstance(function, FunctionType)
    assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301  (our own bytes)
    assert (function.__doc__ or "").strip()


def test_the_version_stands_in_one_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "titan_ckpt.version.__version__"}
    assert f"\n## {titan_ckpt.__version__} - " in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {titan_ckpt.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("room", ["trainer", "debug", "tui", "converters"])
def test_a_bare_sub_package_import_names_the_full_one(room: str) -> None:
    code = f"try:\n import {room}\nexcept ImportError as error: print(error)"
    assert f"import titan_ckpt.{room}" in _fresh(code)


def _modules_with_examples() -> Iterator[str]:
    for folder in ("titan_ckpt", "trainer", "debug", "tui", "converters"):
        for path in sorted((ROOT / folder).glob("**/*.py")):
            if not any(parent.is_symlink() for parent in path.parents) and ">>> " in path.read_text():
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                yield name if folder == "titan_ckpt" else f"titan_ckpt.{name}"


@pytest.mark.parametrize("module", _modules_with_examples())
def test_docstring_examples_hold(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout


def test_the_command_reference_matches_help() -> None:
    assert (DOCS / "cli.md").read_text() == reference(), "run `make docs`"


def _schema(name: str) -> dict[str, Any]:
    """A JSON schema that docs/format.md prints."""
    text = (DOCS / "format.md").read_text()
    found = re.search(rf"<!-- schema: {name} -->\n```json\n(.*?)```", text, re.DOTALL)
    assert found is not None
    schema: dict[str, Any] = json.loads(found.group(1))
    return schema


_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "null": type(None),
}  # fmt: skip


def _violations(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """Violations of the schema in `value`; supports only the JSON Schema keywords that our pages use."""
    if "const" in schema and value != schema["const"]:
        yield f"{where}: {value!r} is not {schema['const']!r}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(value, _TYPES[kind]) for kind in kinds):
        yield f"{where}: {type(value).__name__} is not {kinds}"
    if isinstance(value, dict):
        known = schema.get("properties", {})
        yield from (f"{where}: {key} is missing" for key in schema.get("required", []) if key not in value)
        if schema.get("additionalProperties") is False:
            yield from (f"{where}: {key} is not in the schema" for key in value if key not in known)
        for key in value.keys() & known.keys():
            yield from _violations(value[key], known[key], f"{where}/{key}")
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            yield from _violations(item, schema["items"], f"{where}/{number}")


def test_a_saved_checkpoint_fits_the_documented_schema(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.ones(3, 4), "scale": torch.tensor(1.0)}, "note": {"a": 1}}
    options = titan_ckpt.SaveOptions(mesh=titan_ckpt.MeshSpec.parse("dp_shard=1"))
    titan_ckpt.save(str(tmp_path), state, step=3, options=options, training={"step": 3}, user={"who": "me"})
    (commit,) = tmp_path.glob("step-*/COMMIT.json")
    (manifest,) = tmp_path.glob("step-*/*/manifest.json")
    assert list(_violations(json.loads(commit.read_text()), _schema("commit"))) == []
    assert list(_violations(json.loads(manifest.read_text()), _schema("manifest"))) == []


def test_the_documented_schema_refuses_unknown_fields() -> None:
    found = list(_violations({"format": "other", "more": 1}, _schema("manifest")))
    assert {"/format: 'other' is not 'titan-ckpt'", ": more is not in the schema", ": step is missing"} <= set(found)
