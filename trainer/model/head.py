"""The head of a language model: logits, or with labels the sum of token losses, without materialising all logits.

Shapes: B batch, S sequence, D model dim, V vocabulary (of this rank under tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from titan_ckpt.trainer.model.linear import Linear
from titan_ckpt.trainer.model.loss import TokenLoss


class LmHead(Linear):
    """A projection to the vocabulary. The trainer replaces `loss` and `gather` when the vocabulary is divided over tp."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.loss = TokenLoss()
        self.gather: Callable[[Tensor], Tensor] | None = None

    def forward(
        self, h_BSD: Tensor, labels_BS: Tensor | None = None, *, first: int | None = None, share: float = 0.0
    ) -> Tensor:
        """Logits [B, S, V], or the sum of the losses of the labels that are not IGNORED, shape (1,).

        Samples after the `first` ones, those of `Ahead`, add a `share` of their losses to the gradient and nothing to the sum.
        """
        if labels_BS is not None:
            loss = self.loss(h_BSD[:first], self.weight, labels_BS[:first])
            if first is not None and len(labels_BS) > first:
                more = share * self.loss(h_BSD[first:], self.weight, labels_BS[first:])
                loss = loss + (more - more.detach())
            return loss
        logits_BSV = super().forward(h_BSD)
        return logits_BSV if self.gather is None else self.gather(logits_BSV)
