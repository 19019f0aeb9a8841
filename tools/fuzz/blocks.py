"""How often an input reaches each block of our modules: a counter at the start of every block, put into the source at import.

A compiled counter costs some 50 ns; a trace function costs a hundred times that. An `if` without an `else` gets one, so that
passing it by counts as well. A module's source can be changed on the way: see `plants`.
"""

from __future__ import annotations

import ast
import sys
from array import array
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

import numpy as np
import numpy.typing as npt

_HITS = "__fuzz_hits__"


class Blocks(MetaPathFinder):
    """Import hook. `hits[n]` is how often block n was reached since `clear`; `change` may rewrite a module's source."""

    def __init__(self, prefixes: Sequence[str], change: Callable[[str, str], str] = lambda _, source: source) -> None:
        self._prefixes = tuple(prefixes)
        self.change = change
        self.hits = array("Q")
        self._seen: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)

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
        np.frombuffer(self.hits, np.uint64)[:] = 0

    def is_new(self) -> bool:
        """Whether some block was reached, since `clear`, a power of two times as often as ever before; remembers it."""
        counts = np.frombuffer(self.hits, np.uint64)
        if len(self._seen) < len(counts):  # a module that was imported late
            self._seen = np.concatenate([self._seen, np.zeros(len(counts) - len(self._seen), np.uint64)])
        magnitude = np.left_shift(np.uint64(1), np.frexp(counts.astype(np.float64))[1].astype(np.uint64))
        found = np.where(counts > 0, magnitude, np.uint64(0))
        is_new = bool((found & ~self._seen).any())
        self._seen |= found
        return is_new

    def reached(self) -> int:
        """How many blocks were ever reached."""
        return int((self._seen > 0).sum())


class _CountingLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, blocks: Blocks) -> None:
        super().__init__(name, path)
        self._blocks = blocks

    def get_code(self, fullname: str) -> CodeType | None:
        """Compiled from the source; a cached file has no counters."""
        path = self.get_filename(fullname)
        source = self._blocks.change(fullname, self.get_data(path).decode())
        tree = _Counted(self._blocks.hits).visit(ast.parse(source, path))
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _HITS, self._blocks.hits)
        super().exec_module(module)


class _Counted(ast.NodeTransformer):
    """Puts `hits[n] += 1` before the first statement of every function, branch and loop."""

    def __init__(self, hits: array[int]) -> None:
        self._hits = hits

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.Module | ast.ClassDef):
            return node
        if isinstance(node, ast.If) and not node.orelse:
            node.orelse = [ast.copy_location(ast.Pass(), node)]
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                body.insert(1 if _is_docstring(body[0]) else 0, self._count(body[0]))
        return node

    def _count(self, statement: ast.stmt) -> ast.stmt:
        self._hits.append(0)
        (count,) = ast.parse(f"{_HITS}[{len(self._hits) - 1}] += 1").body
        return ast.copy_location(count, statement)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
