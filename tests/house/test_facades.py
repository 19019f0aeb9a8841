"""The lazy names of the public packages match those that the type checker sees."""

from __future__ import annotations

import ast
import importlib

import pytest

from tools.paths import ROOT

FACADES = ("titan_ckpt", "titan_ckpt.debug", "titan_ckpt.converters", "titan_ckpt.trainer")


def _facade(package: str) -> ast.Module:
    path = ROOT.joinpath(*package.split(".")) / "__init__.py"
    return ast.parse(path.read_text())


def _imported(nodes: list[ast.stmt]) -> dict[str, str]:
    """Names and the modules that `from titan_ckpt... import` statements take them from."""
    return {
        alias.asname or alias.name: node.module or ""
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _typed_homes(package: str) -> dict[str, str]:
    """The module of each public name, as the type checker sees it."""
    tree = _facade(package)
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    (block,) = blocks
    assert not block.orelse
    at_import = {name: home for name, home in _imported(tree.body).items() if name == "__version__"}
    return _imported(block.body) | at_import


def _lazy_homes(package: str) -> dict[str, str]:
    """The module of each public name, as `lazy_names` is given it."""
    calls = [node for node in ast.walk(_facade(package)) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if ast.unparse(call.func) == "lazy_names"]
    homes: dict[str, str] = ast.literal_eval(call.args[1])
    return {name: f"{package}.{home}" for name, home in homes.items()}


@pytest.mark.parametrize("package", FACADES)
def test_a_facade_loads_what_the_type_checker_sees(package: str) -> None:
    assert _lazy_homes(package) == _typed_homes(package)


@pytest.mark.parametrize("package", FACADES)
def test_a_facade_exports_every_lazy_name_sorted(package: str) -> None:
    exported = importlib.import_module(package).__all__
    assert exported == sorted(_lazy_homes(package))
    assert len(exported) == len(set(exported))


@pytest.mark.parametrize("package", FACADES)
def test_every_lazy_name_is_the_one_of_its_module(package: str) -> None:
    facade = importlib.import_module(package)
    for name, home in _lazy_homes(package).items():
        value = getattr(importlib.import_module(home), name)
        assert getattr(facade, name) is value, name
        assert getattr(value, "__module__", home) == home or name == "__version__", f"{name} is defined elsewhere"
