"""How many weights each pipeline stage has, and each of its ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.device_mesh import FSDP_AXES
from titan_ckpt.trainer.model.plan import Plan
from titan_ckpt.trainer.parallel.config import ParallelConfig, layer_ranges
from titan_ckpt.trainer.seams.patterns import is_below


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Weights of a pipeline rank: in all, and those of experts, which ep divides and tp does not."""

    all: int
    of_experts: int

    def over_model(self, mesh: MeshSpec) -> float:
        """Those of one rank of tp and ep."""
        return (self.all - self.of_experts) / mesh.degree("tp") + self.of_experts / mesh.degree("ep")

    def sharded(self, mesh: MeshSpec) -> float:
        """Those of one rank, with FSDP."""
        fsdp = mesh.degree(FSDP_AXES)
        return (self.all - self.of_experts) / (fsdp * mesh.degree("tp")) + self.of_experts / fsdp


def stage_parameters(
    plan: Plan, parallel: ParallelConfig, mesh: MeshSpec, *, among: Collection[str] | None = None
) -> list[int]:
    """Parameters of each pipeline stage, counted on the meta device; a tied weight counts on both its stages.

    `among`: only those of these modules.
    """
    weights = dict(plan.module.named_parameters(remove_duplicate=False))
    if among is not None:
        weights = {fqn: weight for fqn, weight in weights.items() if is_below(fqn, set(among))}
    ranges = layer_ranges(len(plan.blocks), parallel, mesh)
    counts = []
    for blocks in ranges:
        fqns = {*plan.blocks[blocks.start : blocks.end]}
        fqns |= set(plan.first if blocks.start == 0 else ())
        fqns |= set(plan.last if blocks.end == len(plan.blocks) else ())
        mine = {id(weight): weight for fqn, weight in weights.items() if is_below(fqn, fqns)}
        counts.append(sum(weight.numel() for weight in mine.values()))
    return counts
