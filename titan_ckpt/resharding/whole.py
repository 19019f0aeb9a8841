"""Reshard in one call: select tensors, plan, run; what the command `reshard` does, as a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from titan_ckpt.arguments import check_type, check_whole
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import as_checkpoint
from titan_ckpt.errors import PlanError, UsageError
from titan_ckpt.location import StrPath, run_location
from titan_ckpt.resharding.placement_rules import PlacementRule
from titan_ckpt.resharding.reshard import DEFAULT_MEMORY, ReshardPlan, ReshardReport, Workers, plan_reshard, run_plan
from titan_ckpt.rewrite.selection import Filter, select
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.store.base import Store
from titan_ckpt.store.clients.options import Options, using
from titan_ckpt.store.open import open_store


def reshard(
    source: Checkpoint | StrPath,
    destination: StrPath | Store,
    mesh: MeshSpec | str,
    *,
    only: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    dtype: str | None = None,
    rules: Sequence[PlacementRule] = (),
    stages_per_rank: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY,
    is_checked: bool = True,
    on_progress: Callable[[int], None] | None = None,
    workers: Workers | None = None,
    storage_options: Options = None,
) -> ReshardReport:
    """Write a checkpoint (open, or `URL[@STEP]`) for another mesh (`"pp=2,dp_shard=8,tp=4"`) into the run at `destination`.

    `only="model"` leaves everything else out; `include` and `exclude` are globs of names, `rename` maps globs to new names;
    `dtype` casts floating-point weights, not optimizer states (needs torch). The others, and the errors, are as of `plan_reshard`
    and `run_plan`.
    """
    check_type(rename, "rename", Mapping, or_none=True, hint="a mapping of names to names, such as {'model.*': '*'}")
    renames = tuple(f"{old}={new}" for old, new in (rename or {}).items())
    wanted = Filter(only=only, include=_globs(include, "include"), exclude=_globs(exclude, "exclude"), rename=renames)
    with using(storage_options, source, destination):
        store = destination if isinstance(destination, Store) else open_store(run_location(destination).url)
        opened = as_checkpoint(source)
    plan = plan_selected(opened, mesh, wanted, dtype=dtype, rules=rules, stages_per_rank=stages_per_rank)
    return run_plan(
        plan, store.url, store=store, memory_bytes=memory_bytes, is_checked=is_checked, on_progress=on_progress, workers=workers,
    )  # fmt: skip


def plan_selected(
    checkpoint: Checkpoint, mesh: MeshSpec | str, wanted: Filter, *, dtype: str | None = None,
    rules: Sequence[PlacementRule] = (), stages_per_rank: int | None = None,
) -> ReshardPlan:  # fmt: skip
    """`plan_reshard` of what `wanted` selects, with floating-point weights cast to `dtype`."""
    if stages_per_rank is not None:
        check_whole(stages_per_rank, "stages_per_rank", at_least=1)
        if MeshSpec.parse(str(mesh)).degree("pp") == 1:
            raise PlanError(
                f"stages_per_rank is {stages_per_rank}, but mesh {mesh} has no pipeline; leave it out, or add pp="
            )
    selection = select(checkpoint.manifest, wanted)
    if dtype is not None:
        from titan_ckpt.rewrite.cast import with_dtype  # torch takes a second to import, and only a cast needs it

        selection = with_dtype(selection, dtype)
    return plan_reshard(checkpoint, mesh, rules=rules, selection=selection, stages_per_rank=stages_per_rank)


def _globs(values: Sequence[str], name: str) -> tuple[str, ...]:
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise UsageError(f"{name} is {values!r}; give a list of globs, such as ['model.*']")
    return tuple(values)
