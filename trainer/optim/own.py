"""A user's OptimizerSpec as a rule: one call per weight, on this rank's shard or on whole matrices, with the answers checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_ckpt.trainer.optim.rule import Trained, shard_of, zeros_like
from titan_ckpt.trainer.seams.boundary import calling, refuse
from titan_ckpt.trainer.seams.optimizer import OptimizerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRule:
    """The rule of a spec."""

    spec: OptimizerSpec

    def state(self, fqn: str, weight: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 - a rule's signature
        """Zeros like the weight, by the names and dtypes of the spec."""
        return {name: zeros_like(weight, dtype) for name, dtype in self.spec.state.items()}

    def update(self, weights: Sequence[Trained], *, lr: float, decay: float) -> None:
        """One call of the spec's `update` per weight."""
        for each in weights:
            if self.spec.whole:
                self._update_whole(each, lr, decay)
            else:
                state = {name: shard_of(kept) for name, kept in each.state.items()}
                self._call(each, shard_of(each.weight), shard_of(each.gradient), state, lr, decay)

    def _update_whole(self, each: Trained, lr: float, decay: float) -> None:
        """Every rank computes the same from the whole tensors, and keeps its part."""
        weight, gradient = _whole(each.weight), _whole(each.gradient)
        state = {name: _whole(kept) for name, kept in each.state.items()}
        self._call(each, weight, gradient, state, lr, decay)
        for live, changed in ((each.weight, weight), *((each.state[name], state[name]) for name in state)):
            _keep_part(live, changed)

    def _call(
        self, each: Trained, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, decay: float
    ) -> None:
        seam = f"OptimizerSpec.update({each.fqn!r})"
        with calling(seam, self.spec.update):
            update: Callable[..., object] = self.spec.update
            answer = update(each.fqn, weight, gradient, state, step=int(each.step), lr=lr, weight_decay=decay)
        if answer is not None:
            refuse(seam, self.spec.update, "returned a value; it must change the weight and its state in place")


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor


def _keep_part(live: Tensor, changed: Tensor) -> None:
    if isinstance(live, DTensor):
        shape, offset = compute_local_shape_and_global_offset(live.shape, live.device_mesh, live.placements)
        box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        shard_of(live).copy_(changed[box])
