"""What a stage computes from a batch: the model's forward with the fields it takes, and on the last stage the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from titan_ckpt.trainer.parallel.config import ParallelConfig
from titan_ckpt.trainer.parallel.precision import DTYPES
from titan_ckpt.trainer.seams.boundary import calling, kind_of, refuse
from titan_ckpt.trainer.seams.loss import Loss, sum_of
from titan_ckpt.trainer.seams.model import ModelSpec


def compute_loss_in(
    part: nn.Module, spec: ModelSpec, losses: Sequence[Loss], parallel: ParallelConfig, ends: tuple[bool, bool]
) -> None:
    """Replace `forward` of a stage by one that takes all fields of a batch by name; the last stage returns the sum of losses.

    Without losses it returns the model's output; without gradients the sums of all losses, those after the first being metrics.

    FSDP's hooks, which are around `forward`, then see the loss too. `ends`: whether the stage is the first, and the last.
    """
    part.forward = StageForward(part.forward, spec, losses, DTYPES[parallel.param_dtype], ends)


class StageForward:
    """The forward of a stage; on the last, the sum of the losses, shape (1,), or of each loss and metric."""

    def __init__(
        self,
        forward: Callable[..., Any],
        spec: ModelSpec,
        losses: Sequence[Loss],
        dtype: torch.dtype,
        ends: tuple[bool, bool],
    ) -> None:
        self._forward, self._taken, self._losses, self._dtype = forward, frozenset(spec.inputs[1:]), losses, dtype
        self._is_first, self._is_last = ends
        self._spec = spec
        self.returns_output = not losses  # the model's output as it is

    def __call__(self, x: Tensor, **fields: Tensor) -> Any:
        if self._is_first and x.is_floating_point():
            x = x.to(self._dtype)  # FSDP casts weights alone
        taken = {name: value for name, value in fields.items() if name in self._taken}
        with calling(f"{self._spec.name}: forward", self._spec.build):
            out = self._forward(x, **taken)
        if not self._is_last:
            if not isinstance(out, Tensor):
                what = f"returned {kind_of(out)} on a pipeline stage, expected the hidden states as they left the last block"
                refuse(f"{self._spec.name}: forward", self._spec.build, what)
            return out.contiguous()  # it is sent
        if self.returns_output:
            return out
        due = self._losses[:1] if torch.is_grad_enabled() else self._losses
        # torch joins it with those of other microbatches; FSDP refuses a view
        sums = torch.stack([sum_of(loss, out, fields) for loss in due])
        if torch.is_grad_enabled() and not sums.requires_grad:
            refuse("Loss", due[0], "depends on no weight that is trained: it has no gradient")
        return sums


@contextmanager
def returning_outputs(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Let the last stage return the model's output instead of losses, for as long as the context lasts."""
    stages = [part.forward for part in parts if isinstance(part.forward, StageForward)]
    before = [stage.returns_output for stage in stages]
    for stage in stages:
        stage.returns_output = True
    try:
        yield
    finally:
        for stage, was in zip(stages, before, strict=True):
            stage.returns_output = was


def on(device: torch.device, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The fields of a batch on a device."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
