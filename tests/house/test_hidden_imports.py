"""No module imports a room by a string name, which import-linter cannot see."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.architecture.sources import PACKAGES, hidden_imports, package_files
from tools.paths import ROOT


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the five packages."""
    root = tmp_path_factory.mktemp("tree")
    for path in package_files():
        target = root / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return root


def test_no_room_imports_another_by_name() -> None:
    assert list(hidden_imports()) == []


def test_every_package_is_searched_for_hidden_imports() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in package_files()} == set(PACKAGES)


@pytest.mark.parametrize(
    "line",
    [
        'import importlib; importlib.import_module("titan_ckpt.trainer.cli")',
        'from importlib import import_module; import_module("titan_ckpt.tui")',
        "from importlib import import_module as load_room",
        '__import__("titan_ckpt.converters.cli")',
        'import importlib; importlib.import_module(".cli", package="titan_ckpt")',
        'import importlib, os; importlib.import_module(f"titan_ckpt.{os.sep}")',
        'import pkgutil; pkgutil.resolve_name("titan_ckpt.cli.main:main")',
    ],
)
@pytest.mark.parametrize("module", ["titan_ckpt/store/base.py", "debug/read/reader.py"])
def test_a_planted_import_by_name_is_refused(tree: Path, module: str, line: str) -> None:
    path = tree / module
    clean = path.read_text()
    path.write_text(f"{clean}\n{line}\n")
    try:
        (found,) = hidden_imports(tree)
    finally:
        path.write_text(clean)
    assert found.startswith(f"{module}:")


@pytest.mark.parametrize(
    "line",
    ['import importlib; importlib.import_module("wandb")', 'import importlib.util; importlib.util.find_spec("torch")'],
)
def test_an_import_of_another_library_by_name_is_fine(tree: Path, line: str) -> None:
    path = tree / "trainer" / "report" / "metrics.py"
    clean = path.read_text()
    path.write_text(f"{clean}\n{line}\n")
    try:
        assert list(hidden_imports(tree)) == []
    finally:
        path.write_text(clean)
