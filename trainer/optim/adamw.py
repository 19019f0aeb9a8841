"""AdamW (arXiv 1711.05101) with moments in float32 or bfloat16, or in 8 bits (`eight_bit`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from titan_ckpt.trainer.optim.eight_bit import Blocks, blocks_of, dequantize, quantize
from titan_ckpt.trainer.optim.rule import Trained, shard_of, zeros_like

ELEMENTS_AT_ONCE = 1 << 22  # float32 copies of narrow moments exist for so many elements at a time
FIRST, ROOT = "exp_avg", "exp_avg_root"  # what is kept in 8 bits: the first moment, and the root of the second


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """The rule; `fused` and `foreach` are torch's, and equal up to the last bit's rounding."""

    betas: tuple[float, float]
    eps: float
    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"

    def state(self, fqn: str, weight: Tensor) -> dict[str, Tensor]:
        """`exp_avg` and `exp_avg_sq`; in 8 bits codes and scales of the first moment and of the second one's root."""
        blocks = blocks_of(fqn, weight) if self.moments == "int8" else None
        if blocks is None:
            dtype = torch.bfloat16 if self.moments == "bfloat16" else torch.float32
            return {name: zeros_like(weight, dtype) for name in ("exp_avg", "exp_avg_sq")}
        state = {}
        for name in (FIRST, ROOT):
            state[f"{name}_codes"] = zeros_like(weight, torch.uint8)
            state[f"{name}_scales"] = zeros_like(weight, torch.float32, columns=(blocks.whole, blocks.here))
            shard_of(state[f"{name}_codes"]).copy_(quantize(torch.zeros(()), blocks, signed=name == FIRST)[0])
        return state

    def update(self, weights: Sequence[Trained], *, lr: float, decay: float) -> None:
        """Update weights in place; those with float32 moments in one call."""
        wide = []
        for each in weights:
            if "exp_avg" not in each.state:
                self._update_codes(each, lr, decay)
            elif each.state["exp_avg"].dtype == torch.float32:
                wide.append(each)
            else:
                self._update_narrow(each, lr, decay)
        if wide:
            self._update_wide(wide, lr, decay)

    def _update_wide(self, weights: Sequence[Trained], lr: float, decay: float) -> None:
        adamw(
            [shard_of(each.weight) for each in weights],
            [shard_of(each.gradient) for each in weights],
            [shard_of(each.state["exp_avg"]) for each in weights],
            [shard_of(each.state["exp_avg_sq"]) for each in weights],
            [],
            list(torch._foreach_sub([each.step for each in weights], 1.0)),  # torch counts the update itself
            fused=self.implementation == "fused",
            foreach=self.implementation == "foreach",
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=self.eps,
            maximize=False,
        )

    def _update_narrow(self, each: Trained, lr: float, decay: float) -> None:
        parts = [shard_of(part).view(-1) for part in (each.weight, each.state["exp_avg"], each.state["exp_avg_sq"])]
        gradient = shard_of(each.gradient).reshape(-1)
        for start in range(0, len(gradient), ELEMENTS_AT_ONCE):
            weight, first, second = (part[start : start + ELEMENTS_AT_ONCE] for part in parts)
            wide = first.float(), second.float()
            self._step(weight, gradient[start : start + ELEMENTS_AT_ONCE], *wide, float(each.step), lr, decay)
            first.copy_(wide[0])
            second.copy_(wide[1])

    def _update_codes(self, each: Trained, lr: float, decay: float) -> None:
        blocks = blocks_of(each.fqn, each.weight)
        assert blocks is not None
        parts = {name: shard_of(tensor).flatten(0, -2) for name, tensor in each.state.items()}
        parts |= {"weight": shard_of(each.weight).flatten(0, -2), "gradient": shard_of(each.gradient).flatten(0, -2)}
        rows = max(1, ELEMENTS_AT_ONCE // blocks.columns)
        for start in range(0, len(parts["weight"]), rows):
            part = {name: tensor[start : start + rows] for name, tensor in parts.items()}
            self._step_codes(part, blocks, float(each.step), lr, decay)

    def _step_codes(self, kept: dict[str, Tensor], blocks: Blocks, step: float, lr: float, decay: float) -> None:
        first = dequantize(kept[f"{FIRST}_codes"], kept[f"{FIRST}_scales"], blocks, signed=True)
        second = dequantize(kept[f"{ROOT}_codes"], kept[f"{ROOT}_scales"], blocks, signed=False).square_()
        self._step(kept["weight"], kept["gradient"], first, second, step, lr, decay)
        for name, value in ((FIRST, first), (ROOT, second.sqrt_())):
            codes, scales = quantize(value, blocks, signed=name == FIRST)
            kept[f"{name}_codes"].copy_(codes)
            kept[f"{name}_scales"].copy_(scales)

    def _step(
        self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: float, lr: float, decay: float
    ) -> None:
        """One update with moments in float32, all in place."""
        first.lerp_(gradient.float(), 1.0 - self.betas[0])
        second.mul_(self.betas[1]).addcmul_(gradient.float(), gradient.float(), value=1.0 - self.betas[1])
        root = (1.0 - self.betas[1] ** step) ** 0.5
        weight.mul_(1.0 - lr * decay)
        weight.addcdiv_(first, (second.sqrt() / root).add_(self.eps), value=-lr / (1.0 - self.betas[0] ** step))
