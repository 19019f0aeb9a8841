"""The mutations of a source file: one small change each, inside a function."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
}  # fmt: skip
UNSEEN_CALLS = ("log", "logger", "_log", "_logger", "print", "warnings")
"""Statements that call these change no behaviour that a test should hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """Replace a range of a file (lines from 1, columns in UTF-8 bytes from 0) by `text`."""

    kind: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str

    def apply(self, source: str) -> str:
        """The source with this change; a SyntaxError if that is no Python, which would pass for a killed mutant."""
        lines = source.encode().splitlines(keepends=True)
        before = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        after = lines[self.end_line - 1][self.end_column :] + b"".join(lines[self.end_line :])
        changed = (before + self.text.encode() + after).decode()
        ast.parse(changed)
        return changed


def find_mutations(source: str) -> list[Mutation]:
    """Every mutation of the functions of a module, in order."""
    found = [
        mutation
        for function in _functions(ast.parse(source))
        for statement in _body_without_docstring(function)
        for node in _walk(statement)
        for mutation in _mutations_of(node)
    ]
    return sorted(set(found), key=lambda mutation: (mutation.line, mutation.column, mutation.kind, mutation.text))


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _body_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and all below it, without annotations, assertions and f-strings (Python 3.11 gets columns in them wrong)."""
    if isinstance(
        node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef
    ):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name != "annotation":
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child)


def _mutations_of(node: ast.AST) -> Iterator[Mutation]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            yield _replace(node, "comparison", _with(node, ops=[SWAPS[type(operator)]()]))
        case ast.BoolOp():
            yield _replace(node, "and/or", f"({_with(node, op=SWAPS[type(node.op)]())})")
        case ast.BinOp() if type(node.op) in SWAPS and not _is_text(node.left) and not _is_text(node.right):
            yield _replace(node, "arithmetic", f"({_with(node, op=SWAPS[type(node.op)]())})")
        case ast.UnaryOp(op=ast.Not()):
            yield _replace(node, "negation", f"({ast.unparse(node.operand)})")
        case ast.Constant(value=bool(value)):
            yield _replace(node, "boolean", str(not value))
        case ast.Constant(value=int(value)):
            yield _replace(node, "number", str(value + 1))
        case ast.Return(value=ast.Constant(value=bool() | None)):
            pass  # a flag is changed as a constant, and None in place of False changes nothing
        case ast.Return(value=ast.expr()):
            yield _replace(node, "return None", "return None")
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.UnaryOp | ast.Compare | ast.BoolOp):
            yield _replace(node.test, "condition", f"(not ({ast.unparse(node.test)}))")
        case ast.Break() | ast.Continue():
            yield _replace(node, "loop", "continue" if isinstance(node, ast.Break) else "break")
        case ast.Raise() | ast.AugAssign() | ast.Delete():
            yield _replace(node, "removed statement", "pass")
        case ast.Expr(value=ast.Call(func=function)) if ast.unparse(function).split(".")[0] not in UNSEEN_CALLS:
            yield _replace(node, "removed statement", "pass")


def _replace(node: ast.expr | ast.stmt, kind: str, text: str) -> Mutation:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return Mutation(
        kind=kind,
        line=node.lineno,
        column=node.col_offset,
        end_line=node.end_lineno,
        end_column=node.end_col_offset,
        text=text,
    )


def _with(node: ast.expr, **fields: object) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return ast.unparse(changed)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
