"""No module imports a room by a string name, which import-linter cannot see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.architecture.sources import PACKAGES, hidden_imports, package_files
from tools.paths import ROOT


def _planted(root: Path, module: str, line: str) -> list[str]:
    """What is found in a tree that holds nothing but a copy of `module` with one more line."""
    path = root / module
    path.parent.mkdir(parents=True)
    path.write_text(f"{(ROOT / module).read_text()}\n{line}\n")
    return list(hidden_imports(root))


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
def test_a_planted_import_by_name_is_refused(tmp_path: Path, module: str, line: str) -> None:
    (found,) = _planted(tmp_path, module, line)
    assert found.startswith(f"{module}:")


@pytest.mark.parametrize(
    "line",
    ['import importlib; importlib.import_module("wandb")', 'import importlib.util; importlib.util.find_spec("torch")'],
)
def test_an_import_of_another_library_by_name_is_fine(tmp_path: Path, line: str) -> None:
    assert _planted(tmp_path, "trainer/report/metrics.py", line) == []
