"""The numbers of a step, and the constants they are computed with."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from titan_ckpt.console.units import format_duration, format_size

# Dense bfloat16 FLOP per second, from the vendors' data sheets.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
}

# Float8 peak over bfloat16 peak, the same on every device above that supports Float8.
FLOAT8_PEAK_RATIO = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """A finished step; rates and times are means over the `steps` since the last record, on the slowest rank.

    `mfu` is relative to the bfloat16 peak, None if the device's is unknown; `mfu_float8` to the Float8 peak, when training in
    Float8. `skipped_steps` counts steps without an update since step 0. Upload numbers are rank 0's.

    For a mixture, of the last step: `expert_imbalance` is the largest load of an expert over the mean of its layer's, in the
    worst layer; `expert_entropy` that of the loads, averaged over layers, 1.0 for an even spread.
    """

    step: int
    time_s: float
    loss: float
    loss_max: float
    grad_norm: float
    lr: float
    step_s: float
    tokens_per_s: float
    tflops: float
    mfu: float | None
    data_wait_s: float
    memory_bytes: int
    tokens_seen: int
    mfu_float8: float | None = None
    steps: int = 1
    skipped_steps: int = 0
    checkpoint_stall_s: float = 0.0
    uploaded_bytes: int = 0
    upload_bytes_per_s: float = 0.0
    committed_step: int | None = None
    commit_age_s: float | None = None
    is_uploading: bool = False
    mirrored_step: int | None = None
    expert_imbalance: float | None = None
    expert_entropy: float | None = None

    def line(self, total_steps: int) -> str:
        """One line for the console."""
        width = len(str(total_steps))
        parts = [
            f"step {self.step:>{width}}/{total_steps}",
            f"loss {self.loss:.4f}",
            f"grad {self.grad_norm:.3f}",
            f"lr {self.lr:.2e}",
            f"{self.tokens_per_s:,.0f} tok/s",
            f"{self.step_s:.2f} s",
        ]
        if self.mfu is not None:
            parts.append(f"mfu {self.mfu:.1%}")
        if self.mfu_float8 is not None:
            parts.append(f"of float8 {self.mfu_float8:.1%}")
        if self.expert_imbalance is not None:
            parts.append(f"experts {self.expert_imbalance:.2f}x")
        if self.data_wait_s > 0.05 * self.step_s:
            parts.append(f"data {format_duration(self.data_wait_s)}")
        if self.checkpoint_stall_s:
            parts.append(f"stall {format_duration(self.checkpoint_stall_s)}")
        if self.skipped_steps:
            parts.append(f"skipped {self.skipped_steps}")
        if self.is_uploading:
            parts.append(f"uploading {format_size(self.upload_bytes_per_s)}/s")
        if self.committed_step is not None:
            parts.append(f"committed {self.committed_step}")
        return "  ".join(parts)


def expert_spread(loads: Iterable[Sequence[int]]) -> tuple[float, float] | None:
    """`StepMetrics.expert_imbalance` and `.expert_entropy` of the tokens of each expert, by layer; None without a token.

    >>> expert_spread([[4, 4, 4, 4], [8, 8, 0, 0]])
    (2.0, 0.75)
    """
    imbalance, entropies = 0.0, []
    for load in loads:
        total = sum(load)
        if total:
            imbalance = max(imbalance, max(load) * len(load) / total)
            shares = [count / total for count in load if count]
            entropies.append(-sum(s * math.log(s) for s in shares) / math.log(max(len(load), 2)))
    return (imbalance, sum(entropies) / len(entropies)) if entropies else None


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bfloat16 peak, None if it is unknown (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: of the accelerator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
