"""What holds for the whole codebase: imports stay lazy, exported names stay, floors are kept, the reference is up to date."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import titan_ckpt
from scripts.cli_docs import reference
from titan_ckpt.save import Saver, save

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "s3fs", "textual", "transformers", "botocore")
PUBLIC = [
    "Checkpoint",
    "CheckpointInfo",
    "LoadPolicy",
    "MeshSpec",
    "RetentionPolicy",
    "SaveOptions",
    "Saver",
    "StorageReader",
    "StorageWriter",
    "Store",
    "TitanError",
    "__version__",
    "diff",
    "list_checkpoints",
    "load",
    "open_checkpoint",
    "open_store",
    "plan_reshard",
    "prune",
    "run_plan",
    "save",
    "verify",
]


def _fresh(code: str) -> str:
    """What `code` prints in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "modules",
    [
        "titan_ckpt, titan_ckpt.cli",
        "titan_ckpt.debug, titan_ckpt.debug.cli",
        "titan_ckpt.commands, titan_ckpt.commands_check, titan_ckpt.commands_keep",
        "titan_ckpt.reshard, titan_ckpt.commands_reshard",
        "titan_ckpt.tui.data_incident, titan_ckpt.tui.session",
    ],
)
def test_what_runs_on_a_laptop_loads_nothing_heavy(modules: str) -> None:
    code = f"import sys, json, {modules}; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    assert json.loads(_fresh(code)) == []


def test_the_exported_names_are_these() -> None:
    assert sorted(titan_ckpt.__all__) == PUBLIC
    assert all(getattr(titan_ckpt, name) is not None for name in PUBLIC)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'saev'"):
        titan_ckpt.saev  # noqa: B018


@pytest.mark.parametrize("name", ["diff", "load", "save", "verify"])
def test_a_module_named_like_its_function_can_be_called_in_every_order_of_imports(name: str) -> None:
    orders = (
        f"import titan_ckpt; f = titan_ckpt.{name}",
        f"from titan_ckpt.{name} import {name}; import titan_ckpt; f = titan_ckpt.{name}",
        f"from titan_ckpt import {name} as f",
        f"import titan_ckpt.{name} as f",
    )
    for order in orders:
        assert "missing" in _fresh(f"{order}\ntry: f()\nexcept TypeError as error: print(error)")
    assert inspect.signature(getattr(titan_ckpt, name)).parameters
    assert Saver.__module__ == "titan_ckpt.save"
    assert inspect.signature(titan_ckpt.save) == inspect.signature(save)


def test_the_version_is_the_same_in_the_project_file_and_in_the_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == titan_ckpt.__version__


@pytest.mark.parametrize("room", ["trainer", "debug", "tui", "converters"])
def test_a_room_imported_by_its_bare_name_says_its_real_one(room: str) -> None:
    code = f"try:\n import {room}\nexcept ImportError as error: print(error)"
    assert f"import titan_ckpt.{room}" in _fresh(code)


def test_the_floors_are_kept() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout


def test_the_printed_reference_is_what_help_says() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == reference(), "run `make docs`"
