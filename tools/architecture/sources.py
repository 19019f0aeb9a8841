"""The modules of the five packages, and rules that no linter holds: hidden imports and sizes.

A rule takes the tree's root, so that a test can plant a violation in a copy, and yields one line per finding.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.paths import ROOT

PACKAGES = ("titan_ckpt", "converters", "debug", "trainer", "tui")
IMPORTERS = ("import_module", "__import__", "find_spec", "resolve_name", "run_module")
# The first serves the lazy names of the four packages with a public interface, the second has a list of torchao's
# classes, the third imports a module that the user names.
MAY_IMPORT_BY_NAME = ("titan_ckpt.lazy", "titan_ckpt.checkpoint.subclasses", "titan_ckpt.trainer.config.extension")

MAX_FILES = 16
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 51
MAX_TEST_NAME = 60


def package_files(root: Path = ROOT) -> Iterator[Path]:
    """All modules of the five packages, each once: not through the links in titan_ckpt/."""
    for package in PACKAGES:
        yield from _python_files(root / package)


def _python_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("**/*.py")) if not any(p.is_symlink() for p in path.parents))


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


def oversized(root: Path = ROOT) -> Iterator[str]:
    """Folders, files, functions and test names past the project's limits."""
    for top in (*PACKAGES, "tests", "tools", "scripts", "benchmarks"):
        paths = [path for path in _python_files(root / top) if (root / "tests" / "data") not in path.parents]
        for folder, count in sorted(Counter(path.parent for path in paths).items()):
            if count > MAX_FILES:
                yield f"{folder.relative_to(root)}: {count} files, at most {MAX_FILES}"
        for path in paths:
            yield from (f"{path.relative_to(root)}{finding}" for finding in _oversized_in(path, top))


def _oversized_in(path: Path, top: str) -> Iterator[str]:
    text = path.read_text()
    num_lines = text.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f": {num_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if top in PACKAGES and num_lines > MAX_FUNCTION_LINES:
            yield f":{node.lineno}: {node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"
        if top == "tests" and node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME:
            yield f":{node.lineno}: {node.name} has {len(node.name)} characters, at most {MAX_TEST_NAME}"
