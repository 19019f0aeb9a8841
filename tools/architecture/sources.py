"""The modules of the five packages, and rules that no linter holds: hidden imports and sizes.

A rule takes the tree's root, so that a test can plant a violation in a copy, and yields one line per finding.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.paths import ROOT

PACKAGES = ("titan_ckpt", "converters", "debug", "trainer", "tui")
IMPORTERS = ("import_module", "__import__", "find_spec", "resolve_name", "run_module")
# `titan_ckpt.lazy` serves the lazy names of the three packages with a public interface.
MAY_IMPORT_BY_NAME = ("titan_ckpt.lazy",)

MAX_FILES = 16
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 51
MAX_TEST_NAME = 60


def package_files(root: Path = ROOT) -> Iterator[Path]:
    """All modules of the five packages, each once: not through the links in titan_ckpt/."""
    for package in PACKAGES:
        for path in sorted((root / package).glob("**/*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


def module_name(path: Path, root: Path = ROOT) -> str:
    """The name under which a file of the five packages is imported."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts if parts[0] == "titan_ckpt" else ("titan_ckpt", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def hidden_imports(root: Path = ROOT) -> Iterator[str]:
    """Imports by a string that import-linter cannot see: of another room of titan_ckpt, or of a computed name."""
    for path in package_files(root):
        name = module_name(path, root)
        if name in MAY_IMPORT_BY_NAME:
            continue
        room = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if _hides_an_import(node, room):
                yield f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}: import by name: {ast.unparse(node)}"


def _hides_an_import(node: ast.AST, room: str) -> bool:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("importlib"):
        return any(alias.name in IMPORTERS and alias.asname for alias in node.names)
    if not isinstance(node, ast.Call) or _last_name(node.func) not in IMPORTERS:
        return False
    target = node.args[0] if node.args else None
    if not isinstance(target, ast.Constant) or not isinstance(target.value, str):
        return True
    first = target.value.partition(".")[0]
    return first in ("", *PACKAGES) and target.value.rpartition(".")[0] != room


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
