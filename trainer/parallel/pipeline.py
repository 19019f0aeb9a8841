"""Pipeline parallelism: this rank's stages under one of torch's schedules.

The last stage returns the sum of its microbatch's losses, so the schedule's loss function only divides; the fields of the batch
are keyword arguments of every stage. A schedule is bound to the shapes of its microbatches: the first batch of a shape creates
one, with the shape that stages exchange given in advance, which saves torch a trial run.

Shapes: B batch of this rank, S sequence of this rank (cut by cp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.model.plan import build_on_meta, plan_of
from titan_ckpt.trainer.parallel.config import (
    SINGLE_STAGE,
    ParallelConfig,
    num_microbatches,
    num_stages,
    pp_rank_of_stage,
)
from titan_ckpt.trainer.parallel.precision import DTYPES
from titan_ckpt.trainer.seams.model import ModelSpec

Fields = Mapping[str, Tensor]


class Pipeline:
    """Runs a batch through the stages; `stages[i]` is the index of `parts[i]`."""

    def __init__(
        self,
        spec: ModelSpec,
        parallel: ParallelConfig,
        mesh: MeshSpec,
        *,
        parts: list[nn.Module],
        stages: list[int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.spec, self.parallel, self.mesh = spec, parallel, mesh
        self.parts, self.stages, self.group, self.device = parts, stages, group, device
        self.num_stages = num_stages(parallel, mesh)
        self.num_microbatches = num_microbatches(parallel, mesh)
        self._schedules: dict[tuple[Any, ...], Any] = {}
        self._hidden: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._count: Tensor | int = 1

    @property
    def has_first(self) -> bool:
        """Whether this rank has the first stage, which takes the model's input."""
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.num_stages - 1 in self.stages

    def run(self, x: Tensor, fields: Fields, *, count: Tensor | int) -> Tensor:
        """Forward and backward; the sum of losses, 0 on ranks without the last stage."""
        self._count = count
        losses: list[Tensor] = []
        self._schedule(x, fields).step(
            *((x,) if self.has_first else ()),
            target=x if self.has_last else None,  # not used: the last stage returns the loss
            losses=losses if self.has_last else None,
            **fields,
        )
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum() * self._count

    @torch.no_grad()
    def evaluate(self, x: Tensor, fields: Fields) -> Tensor:
        """Forward only: sums of losses and metrics. Stage by stage, since torch's zero-bubble schedules cannot omit backward."""
        total = torch.zeros(1, device=self.device)
        for part, some in self._pieces(x, fields):
            out = self._forward_one(part, some)
            total = total if out is None else total + out
        return total

    @torch.no_grad()
    def outputs(self, x: Tensor, fields: Fields) -> Tensor | None:
        """The outputs of the last stage for the whole batch; None on ranks without it."""
        found = [self._forward_one(part, some) for part, some in self._pieces(x, fields)]
        return torch.cat(found) if self.has_last else None

    def _pieces(self, x: Tensor, fields: Fields) -> list[tuple[Tensor, Fields]]:
        """The microbatches of a batch."""
        chunks = {name: value.chunk(self.num_microbatches) for name, value in fields.items()}
        parts = x.chunk(self.num_microbatches)
        return [(part, {name: some[index] for name, some in chunks.items()}) for index, part in enumerate(parts)]

    def _forward_one(self, x: Tensor, fields: Fields) -> Any:
        """What the last stage returns for a microbatch; None on ranks without it."""
        mine = dict(zip(self.stages, self.parts, strict=True))
        shape = self._hidden_shape(x, fields)
        out: Any = x
        for stage in sorted(mine):
            if stage > 0 and stage - 1 not in mine:
                out = torch.empty(shape, dtype=self._dtype, device=self.device)
                dist.recv(out, group=self.group, group_src=pp_rank_of_stage(self.parallel, self.mesh, stage - 1))
            out = mine[stage](out, **fields)
            if stage + 1 < self.num_stages and stage + 1 not in mine:
                owner = pp_rank_of_stage(self.parallel, self.mesh, stage + 1)
                dist.send(out.contiguous(), group=self.group, group_dst=owner)
        return out if self.has_last else None

    def _loss(self, loss_1: Tensor, _: Tensor) -> Tensor:
        return loss_1.sum() / self._count

    def _schedule(self, x: Tensor, fields: Fields) -> Any:
        key = _shapes(x, fields)
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(x, fields)
        return self._schedules[key]

    def _make_schedule(self, x: Tensor, fields: Fields) -> Any:
        count = self.num_microbatches
        if len(x) % count:
            raise ConfigError(f"a batch of {len(x)} samples does not cut into {count} microbatches")
        first, some = self._pieces(x, fields)[0]
        stages = [self._stage(part, index, first, some) for part, index in zip(self.parts, self.stages, strict=True)]
        kind: Any = get_schedule_class(self.parallel.pp_schedule)
        what = stages[0] if self.parallel.pp_schedule in SINGLE_STAGE else stages
        return kind(what, n_microbatches=count, loss_fn=self._loss, scale_grads=False)

    def _stage(self, part: nn.Module, index: int, x: Tensor, fields: Fields) -> PipelineStage:
        is_first, is_last = index == 0, index == self.num_stages - 1
        hidden = torch.empty(self._hidden_shape(x, fields), dtype=self._dtype, device="meta")
        loss_1 = torch.empty(1, dtype=torch.float32, device="meta")
        return PipelineStage(
            part,
            index,
            self.num_stages,
            self.device,
            input_args=(torch.empty_like(x, device="meta") if is_first else hidden.requires_grad_(),),
            output_args=(loss_1.requires_grad_() if is_last else hidden.requires_grad_(),),
            group=self.group,
        )

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.parallel.param_dtype]

    def _hidden_shape(self, x: Tensor, fields: Fields) -> tuple[int, ...]:
        """Shape of the hidden states sent to the next stage; under sequence parallelism only this rank's tokens."""
        key = _shapes(x, fields)
        if key not in self._hidden:
            batch, length, *rest = hidden_shape(self.spec, x, fields)
            cut = self.mesh.degree("tp") if self.parallel.sequence_parallel else 1
            if length % cut:
                raise ConfigError(
                    f"{self.spec.name}: {length} positions / tp {cut} = {length / cut:.2f} (sequence parallel): must be whole"
                )
            self._hidden[key] = (batch, length // cut, *rest)
        return self._hidden[key]


def _shapes(x: Tensor, fields: Fields) -> tuple[Any, ...]:
    return (*x.shape, *((name, *value.shape) for name, value in fields.items()))


class _ReachedError(Exception):
    """The first block was called."""


def hidden_shape(spec: ModelSpec, x: Tensor, fields: Fields) -> tuple[int, ...]:
    """The shape that enters the first block, from a run of the modules before it on the meta device."""
    module = build_on_meta(spec)
    found: list[tuple[int, ...]] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        hidden = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(hidden, Tensor) or hidden.ndim < 2:
            raise ConfigError(f"{spec.name}: {block}: its first argument must be the hidden states [B, S, ...]")
        found.append(tuple(hidden.shape))
        raise _ReachedError

    block = plan_of(spec).blocks[0]
    module.get_submodule(block).register_forward_pre_hook(stop, with_kwargs=True)
    taken = {name: value.to("meta") for name, value in fields.items() if name in spec.inputs}
    if "documents" in taken and "positions" in taken:  # under cp those of the whole sequence
        taken["documents"] = taken["documents"][:, : taken["positions"].shape[1]]
    try:
        with torch.no_grad():
            module(x.to("meta"), **taken)
    except _ReachedError:
        return found[0]
    raise ConfigError(f"{spec.name}: forward does not call {block}, which ModelSpec.blocks names")
