"""How many weights each pipeline stage has, and each of its ranks."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.device_mesh import FSDP_AXES
from titan_ckpt.trainer.model.linear import nf4_bytes
from titan_ckpt.trainer.model.lora import LoraConfig, adapter_sizes, targets_of
from titan_ckpt.trainer.model.plan import Plan, plan_of
from titan_ckpt.trainer.parallel.config import ParallelConfig, layer_ranges
from titan_ckpt.trainer.seams.model import ModelSpec
from titan_ckpt.trainer.seams.patterns import ancestors_of, is_below

WIDTH = {"float32": 4, "bfloat16": 2}  # bytes of an element


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Weights of a pipeline rank: in all, those of experts, which ep and etp divide, and those that are not trained.

    Beside them, on every data rank: `nf4_bytes` of a base in NF4, whose largest weight has `decoded` values.
    """

    all: int
    of_experts: int
    etp: int = 1
    frozen: int = 0
    nf4_bytes: float = 0.0
    decoded: int = 0

    @property
    def trained(self) -> Parameters:
        """Those with gradients and moments."""
        return Parameters(all=self.all - self.frozen, of_experts=0 if self.frozen else self.of_experts, etp=self.etp)

    def over_model(self, parallel: ParallelConfig) -> float:
        """Those of one rank of tp and ep."""
        return (self.all - self.of_experts) / parallel.tp + self.of_experts / (parallel.ep * self.etp)

    def sharded(self, mesh: MeshSpec) -> float:
        """Those of one rank, with FSDP."""
        fsdp = mesh.degree(FSDP_AXES)
        return (self.all - self.of_experts) / (fsdp * mesh.degree("tp")) + self.of_experts / (fsdp * self.etp)


def stage_parameters(
    plan: Plan, parallel: ParallelConfig, mesh: MeshSpec, *, among: Collection[str] | None = None
) -> list[int]:
    """Parameters of each pipeline stage, counted on the meta device; a tied weight counts on both its stages.

    `among`: only those of these modules.
    """
    owned = _owned(plan.spec, None if among is None else frozenset(among))
    ranges = layer_ranges(len(plan.blocks), parallel, mesh)
    counts = []
    for blocks in ranges:
        fqns = [*plan.blocks[blocks.start : blocks.end]]
        fqns += plan.first if blocks.start == 0 else ()
        fqns += plan.last if blocks.end == len(plan.blocks) else ()
        mine = {weight: size for fqn in fqns for weight, size in owned[fqn].items()}
        counts.append(sum(mine.values()))
    return counts


def with_adapters(weights: Parameters, lora: LoraConfig, plan: Plan, blocks: Sequence[str], tp: int) -> Parameters:
    """`weights`, which have these blocks, if only adapters are trained; a factor that tp does not divide counts `tp` times."""
    if not lora.rank:
        return weights
    targets = {fqn: linear for fqn, linear in targets_of(lora, plan).items() if is_below(fqn, blocks)}
    added = 0
    for fqn, linear in targets.items():
        a, b = adapter_sizes(lora, linear)
        cut = plan.cut(fqn)
        added += (a if cut == 1 else tp * a) + (b if cut == 0 else tp * b)
    moved = [linear.weight.numel() for linear in targets.values()] if lora.base == "nf4" else []
    frozen = weights.all - sum(moved)
    return Parameters(
        all=frozen + added,
        of_experts=0,
        frozen=frozen,
        nf4_bytes=sum(map(nf4_bytes, moved)),
        decoded=max(moved, default=0),
    )


@functools.lru_cache(maxsize=8)
def _owned(spec: ModelSpec, among: frozenset[str] | None) -> dict[str, dict[int, int]]:
    """The weights below each block and end, by identity, with their sizes."""
    plan = plan_of(spec)
    owned: dict[str, dict[int, int]] = {fqn: {} for fqn in (*plan.blocks, *plan.first, *plan.last)}
    for fqn, weight in plan.module.named_parameters(remove_duplicate=False):
        if among is None or is_below(fqn, among):
            for owner in owned.keys() & {fqn, *ancestors_of(fqn)}:
                owned[owner][id(weight)] = weight.numel()
    return owned
