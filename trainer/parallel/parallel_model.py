"""A model on its mesh, as the training loop sees it: run a batch, clip, reduce, expose state.

Gradients are sums: each rank's loss is the sum over its tokens divided by the valid tokens of all ranks, so that summing over
data ranks, context ranks and pipeline microbatches gives the gradient of the mean over all tokens, however they are distributed.

Shapes: B samples of this rank, S sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import FOLD, MeshSpec
from titan_ckpt.trainer.device_mesh import RankMesh
from titan_ckpt.trainer.model.experts import BIAS, Router
from titan_ckpt.trainer.model.plan import Plan, routers_of
from titan_ckpt.trainer.model.stages import named_weights
from titan_ckpt.trainer.parallel.config import ParallelConfig
from titan_ckpt.trainer.parallel.context import head_tail_positions
from titan_ckpt.trainer.parallel.initialize import cut_axes
from titan_ckpt.trainer.parallel.local_weights import local_tensor
from titan_ckpt.trainer.parallel.pipeline import Pipeline
from titan_ckpt.trainer.parallel.stage_forward import returning_outputs
from titan_ckpt.trainer.seams.boundary import calling
from titan_ckpt.trainer.seams.model import ModelSpec


@dataclass(slots=True, kw_only=True)
class Parallelized:
    """This rank's pipeline stages of the model (`parts`), sharded, with the operations on all of them."""

    plan: Plan
    parallel: ParallelConfig
    ranks: RankMesh
    parts: list[nn.Module]
    stages: list[int]
    partial_over_tp: frozenset[str]
    tied_group: dist.ProcessGroup | None = None  # first and last stage, if both have the embedding
    pipeline: Pipeline | None = field(init=False)
    loads: dict[str, Tensor] = field(
        init=False, default_factory=dict
    )  # tokens of each expert in the last step, by router
    _has_new_grads: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.pipeline = None
        if self.mesh.degree("pp") > 1:
            self.pipeline = Pipeline(
                self.plan.spec,
                self.parallel,
                self.mesh,
                parts=self.parts,
                stages=self.stages,
                group=self.ranks.group("pp"),
                device=self.ranks.device,
            )

    @property
    def spec(self) -> ModelSpec:
        """The model's spec."""
        return self.plan.spec

    @property
    def mesh(self) -> MeshSpec:
        """The MeshSpec."""
        return self.ranks.spec

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's mesh, with the dimensions that weights are placed on."""
        return self.ranks.device_mesh

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's coordinate on the mesh."""
        return self.ranks.coordinate

    @property
    def data_rank(self) -> int:
        """Index of the data shard that this rank reads."""
        return self.ranks.data_rank

    @property
    def data_degree(self) -> int:
        """Number of data shards."""
        return self.ranks.data_degree

    def forward_backward(self, batch: Mapping[str, Tensor], *, count: Tensor | int) -> Tensor:
        """Add this batch's gradients; returns the sum of this rank's losses, detached (0 off the last stage).

        `count` is the number of losses in the whole step, over all ranks and microbatches.
        """
        self._has_new_grads = True
        for _, router in self.routers():
            router.loss_scale = 1.0 / count
        x, fields = self._shard_sequence(batch)
        if self.pipeline is not None:
            with self._calling():
                return self.pipeline.run(x, fields, count=count)
        loss: Tensor = self.parts[0](x, **fields).sum()
        with self._calling():
            (loss / count).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _calling(self) -> AbstractContextManager[None]:
        """Around a backward, in which autograd finds what a user's model or loss has done."""
        return calling(f"{self.spec.name}: backward", self.spec.build)

    @torch.no_grad()
    def forward_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Sums of this rank's losses without gradients, and of the metrics: shape (1 + number of metrics,)."""
        x, fields = self._shard_sequence(batch)
        if self.pipeline is not None:
            return self.pipeline.evaluate(x, fields)
        sums: Tensor = self.parts[0](x, **fields)
        return sums

    @torch.no_grad()
    def outputs(self, batch: Mapping[str, Tensor]) -> Any:
        """The model's output, of which no loss is computed; None on ranks without the last stage."""
        x, fields = self._shard_sequence(batch)
        with returning_outputs(self.parts):
            return self.parts[0](x, **fields) if self.pipeline is None else self.pipeline.outputs(x, fields)

    def reduce_loss(self, local_sum: Tensor) -> Tensor:
        """Sum a loss over all ranks' tokens; collective."""
        total = local_sum.detach().double()
        dist.all_reduce(total)
        return total / self.mesh.degree("tp")  # tensor parallel ranks computed the same loss

    def finish_gradients(self) -> None:
        """Reduce partial gradients, over tp or a pipeline's ends, and the load of experts; does nothing without new gradients."""
        if not self._has_new_grads:
            return
        self._has_new_grads = False
        self._add_loads()
        if self.tied_group is not None:
            self._add_up(self.tied_group, frozenset(self.spec.tied.values()))
        if self.partial_over_tp:
            self._add_up(self.ranks.group("tp"), self.partial_over_tp)

    def routers(self) -> list[tuple[str, Router]]:
        """The routers of this rank's stages, by FQN."""
        return [found for part in self.parts for found in routers_of(part)]

    @torch.no_grad()
    def _add_loads(self) -> None:
        """Sum the tokens of each expert over all ranks, and let every router see those of its layer; collective."""
        names = [fqn for fqn, _ in routers_of(self.plan.module)]
        if not names:
            return
        width = max(router.config.number for _, router in routers_of(self.plan.module))
        table = torch.zeros(len(names), width, dtype=torch.int64, device=self.ranks.device)
        mine = dict(self.routers())
        for fqn, router in mine.items():
            table[names.index(fqn), : router.config.number] = router.take_load()
        dist.all_reduce(table)
        if not self.parallel.sequence_parallel:
            table //= self.mesh.degree("tp")  # its ranks have counted the same tokens
        for fqn, router in mine.items():
            router.add_load(table[names.index(fqn), : router.config.number])
        self.loads = dict(zip(names, table.cpu(), strict=True))

    def _add_up(self, group: dist.ProcessGroup, names: frozenset[str]) -> None:
        grads = [
            local_tensor(parameter.grad)
            for fqn, parameter in self.named_parameters().items()
            if fqn in names and parameter.grad is not None
        ]
        if not grads:
            return
        flat = torch.cat([grad.flatten() for grad in grads]).to(
            self.ranks.device
        )  # offloaded gradients are on the host
        dist.all_reduce(flat, group=group)
        pieces = torch.split(flat, [grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [piece.view_as(grad) for piece, grad in zip(pieces, grads, strict=True)])

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, *, dropped: Tensor | None = None) -> Tensor:
        """Clip the gradient of the whole model, all shards and stages, to `max_norm`; returns the norm before clipping.

        Ranks exchange one number: the squared norms of their shards, each divided by the number of its replicas. `dropped` is
        this number of the gradients that are gone (`optimizer.in_backward`).
        """
        self.finish_gradients()
        by_copies: dict[int, list[Tensor]] = {}
        for fqn, parameter in self.named_parameters().items():
            if parameter.grad is not None:
                stages = 2 if self.tied_group is not None and fqn in self.spec.tied.values() else 1
                by_copies.setdefault(stages * copies(parameter, self.mesh), []).append(local_tensor(parameter.grad))
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        if dropped is not None:
            total += dropped.to(total.device)
        for count, grads in by_copies.items():
            norms = torch.stack(torch._foreach_norm(grads))
            total += norms.double().square().sum().to(total.device) / count
        dist.all_reduce(total)
        norm = total.sqrt()
        if math.isfinite(max_norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
            for grads in by_copies.values():
                torch._foreach_mul_(grads, scale.to(grads[0].device))
        return norm.float()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._has_new_grads = False
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def reshard(self) -> None:
        """Drop whole weights that FSDP still has from the last forward, so that the next one sees changed shards."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """FQN -> weight of this rank's stages; a tied weight appears once, under the embedding's name."""
        return {fqn: parameter for part in self.parts for fqn, parameter in named_weights(self.spec, part)}

    def model_state(self) -> dict[str, Tensor]:
        """FQN -> live tensor (a DTensor if sharded), for saving and for loading in place."""
        self.reshard()  # a forward without backward, as of validation, leaves the last weights whole
        weights = {fqn: unwrap_float8(parameter.detach()) for fqn, parameter in self.named_parameters().items()}
        biases = {f"{fqn}.{BIAS}": r.correction for fqn, r in self.routers() if r.correction is not None}
        return weights | biases

    def router_state(self) -> dict[str, Tensor]:
        """FQN of a router + `.total` -> tokens that each of its experts has had since step 0, the same on every rank."""
        return {f"{fqn}.total": router.total_E for fqn, router in self.routers()}

    def _shard_sequence(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The first input of a batch, and its other fields; under cp, this rank's part of those with a sequence.

        Positions are passed along whenever a stage cannot derive them from its input: under cp, and on later pipeline stages.
        """
        spec, fields = self.spec, dict(batch)
        if spec.derived is not None:
            with calling(f"{spec.name}: ModelSpec.derived", spec.derived):
                fields |= spec.derived(fields)
        cp = self.mesh.degree("cp")
        if spec.sequence and (cp > 1 or self.pipeline is not None):
            if missing := [name for name in spec.sequence[:1] if name not in fields]:
                raise ConfigError(
                    f"{spec.name}: ModelSpec.sequence: the batch has no {missing[0]!r}; it has {', '.join(fields)}"
                )
            whole = fields[spec.sequence[0]]
            mine_S = head_tail_positions(whole.shape[1], cp, self.coordinate["cp"], whole.device)
            if cp > 1:
                fields |= {name: fields[name][:, mine_S] for name in spec.sequence if name in fields}
            if "positions" in spec.inputs:
                own = fields.get("positions")  # of packed documents, which each begin at 0
                fields["positions"] = mine_S.expand(len(whole), -1) if own is None else own[:, mine_S]
        if spec.inputs[0] not in fields:
            raise ConfigError(
                f"{spec.name}: ModelSpec.inputs begins with {spec.inputs[0]!r}, which the batch lacks; it has {', '.join(fields)}"
            )
        return fields.pop(spec.inputs[0]), fields


def unwrap_float8(tensor: Tensor) -> Tensor:
    """The same storage without the wrapper that float8 all-gather puts around a shard; other tensors unchanged."""
    shard = local_tensor(tensor)
    inner = getattr(shard, "_tensor", None)  # torchao's WeightWithDynamicFloat8CastTensor
    if inner is None or not isinstance(tensor, DTensor):
        return tensor if inner is None else inner
    return DTensor.from_local(
        inner, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def copies(tensor: Tensor, mesh: MeshSpec) -> int:
    """Number of ranks with the same shard of `tensor`, within one pipeline stage."""
    ranks = mesh.world_size // mesh.degree("pp")
    cut = cut_axes(tensor)
    return ranks // mesh.degree(FOLD.join(cut)) if cut else ranks
