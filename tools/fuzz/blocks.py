"""Which blocks of our modules an input reaches: a counter at the start of every block, put into the source as it is imported.

A compiled counter costs some 30 ns; a trace function costs a hundred times that.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

_HITS = "__fuzz_hits__"


class Blocks(MetaPathFinder):
    """Import hook. `hits[n]` is 1 when block n was reached since `clear`."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = tuple(prefixes)
        self.hits = bytearray()

    def install(self) -> None:
        """Take part in every import from now on; modules that are imported already stay as they are."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the prefixes, with a loader that counts."""
        if not name.startswith(self._prefixes):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _CountingLoader(spec.loader.name, spec.loader.path, self)
        return spec

    def clear(self) -> None:
        self.hits[:] = bytes(len(self.hits))

    def reached(self) -> int:
        """The blocks reached since `clear`, as bits."""
        return int.from_bytes(self.hits, "little")


class _CountingLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, blocks: Blocks) -> None:
        super().__init__(name, path)
        self._blocks = blocks

    def get_code(self, fullname: str) -> CodeType | None:
        """Compiled from the source; a cached file has no counters."""
        path = self.get_filename(fullname)
        tree = _Counted(self._blocks.hits).visit(ast.parse(self.get_data(path), path))
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _HITS, self._blocks.hits)
        super().exec_module(module)


class _Counted(ast.NodeTransformer):
    """Puts `hits[n] = 1` before the first statement of every function, branch and loop."""

    def __init__(self, hits: bytearray) -> None:
        self._hits = hits

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.Module | ast.ClassDef):
            return node
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                body.insert(1 if _is_docstring(body[0]) else 0, self._count(body[0]))
        return node

    def _count(self, statement: ast.stmt) -> ast.stmt:
        self._hits.append(0)
        (count,) = ast.parse(f"{_HITS}[{len(self._hits) - 1}] = 1").body
        return ast.copy_location(count, statement)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
