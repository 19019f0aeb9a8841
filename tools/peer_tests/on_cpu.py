"""Test files written for GPUs and NCCL, changed in memory so that they run on the CPU over gloo."""

from __future__ import annotations

import ast
import re
from pathlib import Path

NUM_DEVICES = 4
"""What `torch.cuda.device_count()` is in the tests; their jobs have as many ranks."""

_GUARDS = frozenset({"skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend", "requires_gloo"})
_BOTH = re.compile(r"cpu:gloo,(cuda:nccl|xpu:xccl)")
_DEVICE = re.compile(r"\bcuda\b(:\d+)?")


def on_cpu(path: Path) -> ast.Module:
    """The module in `path`: devices are the CPU, backends gloo, and no test asks for GPUs."""
    tree = _OnCpu().visit(ast.parse(path.read_text(), filename=str(path)))
    return ast.fix_missing_locations(tree)  # type: ignore[no-any-return]


class _OnCpu(ast.NodeTransformer):
    """Changes names of devices and backends, and takes out calls that only move tensors to a GPU."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        text = _BOTH.sub("gloo", node.value)
        text = "gloo" if text == "nccl" else text
        return ast.copy_location(ast.Constant(_DEVICE.sub("cpu", text)), node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        """`f"cuda:{rank}"` is the only CPU there is: a number behind it would be another device."""
        parts: list[ast.expr] = []
        for part in node.values:
            is_number = isinstance(part, ast.FormattedValue) and parts and _ends_with_device(parts[-1])
            if is_number:
                parts[-1] = ast.Constant(str(getattr(parts[-1], "value", "")).removesuffix("cuda:") + "cpu")
            else:
                parts.append(part)
        return self.generic_visit(ast.JoinedStr(parts))  # type: ignore[return-value]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = ast.unparse(node.func)
        if called == "torch.cuda.device_count":
            return ast.Constant(NUM_DEVICES)
        if called == "torch.device" and len(node.args) > 1:
            node.args = node.args[:1]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            return self.visit(node.func.value)  # type: ignore[no-any-return]
        for keyword in node.keywords:
            if keyword.arg == "device" and "rank" in ast.unparse(keyword.value):
                keyword.value = ast.Constant("cpu")
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [each for each in node.decorator_list if not _is_guard(each)]
        return self.generic_visit(node)


def _ends_with_device(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).endswith("cuda:")


def _is_guard(decorator: ast.expr) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(name).rpartition(".")[2] in _GUARDS
