"""A pipeline stage: the whole model, in which modules of other stages pass on the hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from titan_ckpt.trainer.model.plan import Plan, build_on_meta, name_of
from titan_ckpt.trainer.seams.model import ModelSpec


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks [start, end) of a model: the first stage has the modules before them too, the last those after."""

    start: int
    end: int


class Elsewhere(nn.Module):
    """Stands for a module of another stage; returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


def build_stage(plan: Plan, blocks: BlockRange) -> nn.Module:
    """The stage with these blocks, on the meta device."""
    part = build_on_meta(plan.spec)
    absent = [*plan.blocks[: blocks.start], *plan.blocks[blocks.end :]]
    absent += plan.first if blocks.start > 0 else ()
    absent += plan.last if blocks.end < len(plan.blocks) else ()
    for fqn in absent:
        part.set_submodule(fqn, Elsewhere())
    return part


def blocks_of(plan: Plan, part: nn.Module) -> dict[str, nn.Module]:
    """The blocks that a stage has, and the units after them, by FQN."""
    return dict(here(part, (*plan.blocks, *plan.units)))


def here(part: nn.Module, fqns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    """Those of the modules that a stage has."""
    modules = dict(part.named_modules())
    return [(fqn, modules[fqn]) for fqn in fqns if fqn in modules and not isinstance(modules[fqn], Elsewhere)]


def named_weights(spec: ModelSpec, part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights of a stage by their names in checkpoints: a tied one has the name of the weight that it is."""
    for fqn, parameter in part.named_parameters():
        yield name_of(spec, fqn), parameter


def tie(spec: ModelSpec, part: nn.Module) -> None:
    """Make tied weights of a stage one; needed again after steps that replace weights."""
    weights = dict(part.named_parameters(remove_duplicate=False))
    for fqn in set(spec.tied.values()):
        aliases = [alias for alias, tied_to in spec.tied.items() if tied_to == fqn]
        first, *others = [name for name in (fqn, *aliases) if name in weights] or [""]
        for alias in others:
            owner, _, name = alias.rpartition(".")
            part.get_submodule(owner).register_parameter(name, weights[first])
