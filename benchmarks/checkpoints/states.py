"""The state that the benchmarks of saves and loads move."""

from __future__ import annotations

from typing import Any

import torch


def make_state(size_gb: float) -> dict[str, Any]:
    """`size_gb` of fp32 weights and Adam moments in the shapes of a Llama, 372 tensors at 1 GB."""
    torch.manual_seed(0)
    layers = 12
    dim = max(64, int((size_gb * 1e9 / 12 / layers / 12.2) ** 0.5) // 8 * 8)
    shapes = {"embed": (4096, dim), "norm": (dim,), "head": (4096, dim)}
    for n in range(layers):
        shapes |= {f"{n}.{k}": (dim, dim) for k in ("q", "k", "v", "o")}
        shapes |= {f"{n}.up": (dim * 8 // 3, dim), f"{n}.gate": (dim * 8 // 3, dim), f"{n}.down": (dim, dim * 8 // 3)}
        shapes |= {f"{n}.norm1": (dim,), f"{n}.norm2": (dim,)}
    return {
        part: {name: torch.randn(shape) for name, shape in shapes.items()}
        for part in ("model", "exp_avg", "exp_avg_sq")
    }


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [tensor for part in state.values() for tensor in part.values()]
