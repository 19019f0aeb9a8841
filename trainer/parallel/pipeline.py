"""Pipeline parallelism: this rank's stages under one of torch's schedules.

The last stage returns the sum of its microbatch's token losses, so the schedule's loss function only divides; labels are a
keyword argument of every stage, used by the last. A schedule is bound to the shape of its microbatches: the first batch of a
shape creates one, with the shapes that stages exchange given in advance, which saves torch a trial run.

Shapes: B batch of this rank, S sequence of this rank (cut by cp), D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.model.decoder import Decoder, ModelConfig
from titan_ckpt.trainer.parallel.config import (
    SINGLE_STAGE,
    ParallelConfig,
    num_microbatches,
    num_stages,
    pp_rank_of_stage,
)
from titan_ckpt.trainer.parallel.precision import DTYPES


class Pipeline:
    """Runs a batch through the stages; `stages[i]` is the index of `parts[i]`."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        mesh: MeshSpec,
        *,
        parts: list[Decoder],
        stages: list[int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.model, self.parallel, self.mesh = model, parallel, mesh
        self.parts, self.stages, self.group, self.device = parts, stages, group, device
        self.num_stages = num_stages(parallel, mesh)
        self.num_microbatches = num_microbatches(parallel, mesh)
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._tokens: Tensor | int = 1

    @property
    def has_first(self) -> bool:
        """Whether this rank has the first stage, which takes token ids."""
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.num_stages - 1 in self.stages

    def run(self, tokens_BS: Tensor, kwargs: dict[str, Tensor], *, global_valid_tokens: Tensor | int) -> Tensor:
        """Forward and backward; the sum of token losses, 0 on ranks without the last stage."""
        self._tokens = global_valid_tokens
        losses: list[Tensor] = []
        self._schedule(tuple(tokens_BS.shape)).step(
            *((tokens_BS,) if self.has_first else ()),
            target=kwargs["labels_BS"] if self.has_last else None,
            losses=losses if self.has_last else None,
            **kwargs,
        )
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum() * self._tokens

    @torch.no_grad()
    def evaluate(self, tokens_BS: Tensor, kwargs: dict[str, Tensor]) -> Tensor:
        """Forward only; same result as `run`. Goes stage by stage, since torch's zero-bubble schedules cannot omit backward."""
        total = torch.zeros((), device=self.device)
        pieces = {name: value.chunk(self.num_microbatches) for name, value in kwargs.items()}
        for index, x in enumerate(tokens_BS.chunk(self.num_microbatches)):
            total += self._evaluate_one(x, {name: chunks[index] for name, chunks in pieces.items()})
        return total

    def _evaluate_one(self, x: Tensor, kwargs: dict[str, Tensor]) -> Tensor:
        mine = dict(zip(self.stages, self.parts, strict=True))
        for stage in sorted(mine):
            if stage > 0 and stage - 1 not in mine:
                x = torch.empty(self._hidden_shape(*kwargs["labels_BS"].shape), dtype=self._dtype, device=self.device)
                dist.recv(x, group=self.group, group_src=pp_rank_of_stage(self.parallel, self.mesh, stage - 1))
            x = mine[stage](x, **kwargs)
            if stage + 1 < self.num_stages and stage + 1 not in mine:
                owner = pp_rank_of_stage(self.parallel, self.mesh, stage + 1)
                dist.send(x.contiguous(), group=self.group, group_dst=owner)
        return x.sum() if self.has_last else torch.zeros((), device=self.device)

    def _loss(self, out_1: Tensor, _labels_BS: Tensor) -> Tensor:
        return out_1.sum() / self._tokens

    def _schedule(self, shape: tuple[int, ...]) -> Any:
        if shape not in self._schedules:
            self._schedules[shape] = self._make_schedule(*shape)
        return self._schedules[shape]

    def _make_schedule(self, batch: int, seq_len: int) -> Any:
        count = self.num_microbatches
        if batch % count:
            raise ConfigError(f"a batch of {batch} samples does not cut into {count} microbatches")
        stages = [
            self._stage(part, index, batch // count, seq_len)
            for part, index in zip(self.parts, self.stages, strict=True)
        ]
        kind: Any = get_schedule_class(self.parallel.pp_schedule)
        what = stages[0] if self.parallel.pp_schedule in SINGLE_STAGE else stages
        return kind(what, n_microbatches=count, loss_fn=self._loss, scale_grads=False)

    def _stage(self, part: Decoder, index: int, batch: int, seq_len: int) -> PipelineStage:
        is_first, is_last = index == 0, index == self.num_stages - 1
        hidden_BSD = torch.empty(self._hidden_shape(batch, seq_len), dtype=self._dtype, device="meta")
        ids_BS = torch.empty(batch, seq_len, dtype=torch.int64, device="meta")
        loss_1 = torch.empty(1, dtype=torch.float32, device="meta")
        return PipelineStage(
            part,
            index,
            self.num_stages,
            self.device,
            input_args=(ids_BS if is_first else hidden_BSD.requires_grad_(),),
            output_args=(loss_1.requires_grad_() if is_last else hidden_BSD.requires_grad_(),),
            group=self.group,
        )

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.parallel.param_dtype]

    def _hidden_shape(self, batch: int, seq_len: int) -> tuple[int, int, int]:
        """Shape of the hidden states sent to the next stage; under sequence parallelism only this rank's tokens."""
        cut = self.mesh.degree("tp") if self.parallel.sequence_parallel else 1
        return batch, seq_len // cut, self.model.dim
