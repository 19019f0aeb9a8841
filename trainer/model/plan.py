"""A ModelSpec compared with the model that it builds, on the meta device: every pattern resolved to FQNs, every mistake named."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor, nn

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.model.experts import Router
from titan_ckpt.trainer.model.head import LmHead
from titan_ckpt.trainer.seams.boundary import calling, kind_of, refuse
from titan_ckpt.trainer.seams.model import (
    Colwise,
    Head,
    Initial,
    ModelSpec,
    Normal,
    Region,
    Rowwise,
    Rule,
    Shared,
    Vocab,
    Whole,
)
from titan_ckpt.trainer.seams.patterns import ancestors_of, is_below, matching

# The modules that a rule can divide.
_KINDS: dict[type, tuple[type[nn.Module], ...]] = {
    Colwise: (nn.Linear,), Rowwise: (nn.Linear,), Head: (nn.Linear, LmHead), Vocab: (nn.Embedding,),
}  # fmt: skip
_DIMS = {Colwise: 0, Rowwise: 1, Head: 0, Vocab: 0}


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The FQNs of a spec's patterns, in the order of the model. `module` is the whole model on the meta device."""

    spec: ModelSpec
    module: nn.Module
    blocks: tuple[str, ...]
    first: tuple[str, ...]
    last: tuple[str, ...]
    rules: Mapping[str, Rule]
    attention: tuple[str, ...]
    experts: tuple[str, ...]
    units: tuple[str, ...]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Every weight once, under the name that checkpoints have."""
        return {name_of(self.spec, fqn): weight for fqn, weight in self.module.named_parameters()}

    @property
    def num_parameters(self) -> int:
        """The number of elements of all weights."""
        return sum(weight.numel() for weight in self.parameters.values())

    @property
    def linears(self) -> dict[str, nn.Linear]:
        """The projections in the blocks."""
        found, blocks = self.module.named_modules(), set(self.blocks)
        return {fqn: m for fqn, m in found if isinstance(m, nn.Linear) and is_below(fqn, blocks)}

    @functools.cached_property
    def regions(self) -> frozenset[str]:
        """The modules whose activations are divided over tp."""
        return frozenset(name for name, rule in self.rules.items() if isinstance(rule, Region))

    def is_in_region(self, fqn: str) -> bool:
        """Whether a module is one of `regions` or inside one."""
        return is_below(fqn, self.regions)

    def cut(self, fqn: str) -> int | None:
        """The dimension along which tp divides the weight of a module; None for a whole weight."""
        return _DIMS.get(type(self.rules.get(fqn)))


def routers_of(module: nn.Module) -> list[tuple[str, Router]]:
    """The routers in a module, whose buffers are state that the trainer keeps and saves."""
    return [(fqn, each) for fqn, each in module.named_modules() if isinstance(each, Router)]


def name_of(spec: ModelSpec, fqn: str) -> str:
    """The name of a weight in checkpoints: that of the weight it is tied to."""
    return spec.tied.get(fqn, fqn)


@functools.lru_cache(maxsize=8)
def plan_of(spec: ModelSpec) -> Plan:
    """Build the model on the meta device and resolve the spec's patterns; ConfigError for what does not fit."""
    _check_fields(spec)
    module = build_on_meta(spec)
    modules = {fqn: m for fqn, m in module.named_modules() if fqn}
    blocks = _matched(spec, "blocks", [spec.blocks], modules)
    outer = set(blocks)
    for fqn in blocks:
        if any(name in outer for name in ancestors_of(fqn)):
            raise ConfigError(f"{spec.name}: blocks {spec.blocks!r} matches {fqn}, which lies inside another block")
    plan = Plan(
        spec=spec, module=module, blocks=blocks,
        first=_matched(spec, "first", spec.first, modules), last=_matched(spec, "last", spec.last, modules),
        rules=_resolve_rules(spec, modules),
        attention=_matched(spec, "attention", [spec.attention] if spec.attention else [], modules),
        experts=_matched(spec, "experts", [spec.experts] if spec.experts else [], modules),
        units=_matched(spec, "units", [spec.units] if spec.units else [], modules),
    )  # fmt: skip
    _check_ends(plan)
    _check_tensors(plan)
    for fqn in plan.parameters:
        initial_of(spec, fqn)
    for fqn in plan.attention:
        if not hasattr(modules[fqn], "attend"):
            raise ConfigError(f"{spec.name}: {fqn} (ModelSpec.attention) has no attribute `attend`")
    for fqn in plan.experts:
        _check_experts(spec, fqn, modules[fqn])
    return plan


def initial_of(spec: ModelSpec, fqn: str) -> Initial:
    """The initial values of a weight, as the spec gives them, checked."""
    seam = f"{spec.name}: ModelSpec.initial({fqn!r})"
    with calling(seam, spec.initial):
        values: object = spec.initial(fqn)
    if not isinstance(values, Initial):
        refuse(seam, spec.initial, f"returned {kind_of(values)}, expected Normal or Constant")
    number: object = values.std if isinstance(values, Normal) else values.value
    if not isinstance(number, Real) or not math.isfinite(number) or (isinstance(values, Normal) and number < 0.0):
        refuse(seam, spec.initial, f"returned {values}, expected a finite number")
    return values


_TEXTS, _LISTS = ("name", "blocks", "attention", "experts", "units"), ("inputs", "first", "last", "sequence")


def _check_fields(spec: ModelSpec) -> None:
    """ConfigError for fields of a spec that have another type: Python does not check them."""
    for name in _TEXTS:
        if not isinstance(getattr(spec, name), str):
            raise ConfigError(f"{spec.name}: ModelSpec.{name} is {kind_of(getattr(spec, name))}, expected a text")
    for name in _LISTS:
        value = getattr(spec, name)
        if not isinstance(value, tuple | list) or not all(isinstance(part, str) for part in value):
            raise ConfigError(
                f"{spec.name}: ModelSpec.{name} is {value!r:.80}, expected a tuple of texts, such as ('tokens',)"
            )
    if not spec.inputs:
        raise ConfigError(
            f"{spec.name}: ModelSpec.inputs is empty; it names the fields of a batch that `forward` takes"
        )
    if not hasattr(spec.loss, "count") or not callable(spec.loss) or isinstance(spec.loss, type):
        raise ConfigError(
            f"{spec.name}: ModelSpec.loss is {spec.loss!r:.80}, expected an object with __call__ and count"
        )
    for pattern, rule in spec.tensor.items():
        if not isinstance(rule, Rule):
            raise ConfigError(
                f"{spec.name}: tensor: {pattern!r} has {rule!r:.80}, expected a rule such as Colwise() or Whole()"
            )
        unit = getattr(rule, "unit", 1)
        if not isinstance(unit, int) or isinstance(unit, bool) or unit < 1:
            raise ConfigError(f"{spec.name}: tensor: {pattern!r}: {rule}: unit must be a whole number from 1 on")


def _check_experts(spec: ModelSpec, fqn: str, module: nn.Module) -> None:
    """One number of experts, in the first dimension of all weights, and a place for the exchange."""
    sizes = {f"{fqn}.{name}": tuple(weight.shape) for name, weight in module.named_parameters()}
    if not hasattr(module, "exchange"):
        raise ConfigError(f"{spec.name}: {fqn} (ModelSpec.experts) has no attribute `exchange`")
    if not sizes or len({shape[:1] for shape in sizes.values()}) != 1:
        raise ConfigError(
            f"{spec.name}: {fqn} (ModelSpec.experts): weights must all be [experts, ...]; they are {sizes}"
        )


def build_on_meta(spec: ModelSpec) -> nn.Module:
    """The whole model on the meta device; ConfigError if it makes weights elsewhere."""
    with torch.device("meta"), calling(f"{spec.name}: ModelSpec.build", spec.build):
        module = spec.build()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{spec.name}: build returned {type(module).__name__}, expected an nn.Module")
    for fqn, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_meta:
            raise ConfigError(
                f"{spec.name}: build made {fqn} on {tensor.device}; leave the device to the trainer, which builds on meta"
            )
    return module


def _matched(spec: ModelSpec, what: str, patterns: Iterable[str], modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    found = []
    for pattern in patterns:
        names = matching(pattern, modules)
        if not names:
            raise ConfigError(f"{spec.name}: {what}: {pattern!r} matches no module; some are {_some(modules)}")
        found += names
    return tuple(dict.fromkeys(found))


def _resolve_rules(spec: ModelSpec, modules: Mapping[str, nn.Module]) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for pattern, rule in spec.tensor.items():
        for fqn in _matched(spec, "tensor", [pattern], modules):
            kinds = _KINDS.get(type(rule), (nn.Module,))
            if not isinstance(modules[fqn], kinds):
                raise ConfigError(
                    f"{spec.name}: {fqn} is a {type(modules[fqn]).__name__}; {type(rule).__name__} divides "
                    f"{' or '.join(kind.__name__ for kind in kinds)} alone. Another layout, as of fused q, k and v, cannot be "
                    "divided by one cut: make it several projections, or leave it Whole"
                )
            if rules.get(fqn, rule) != rule:
                raise ConfigError(f"{spec.name}: {fqn} has two rules in tensor, {rules[fqn]} and {rule} ({pattern!r})")
            rules[fqn] = rule
    return rules


def _check_ends(plan: Plan) -> None:
    spec, ends = plan.spec, (*plan.first, *plan.last)
    for fqn in ends:
        if is_below(fqn, plan.blocks) or any(is_below(block, [fqn]) for block in plan.blocks):
            raise ConfigError(f"{spec.name}: {fqn} is in first or last, and a block is in it or it is in a block")
    if outside := [fqn for fqn in plan.units if not is_below(fqn, plan.last)]:
        raise ConfigError(f"{spec.name}: units: {outside[0]} is not in one of the modules in last")
    if both := set(plan.first) & set(plan.last):
        raise ConfigError(f"{spec.name}: {min(both)} is in first and in last")
    all_names = {fqn for fqn, _ in plan.module.named_parameters(remove_duplicate=False)}
    for alias, fqn in spec.tied.items():
        if missing := {alias, fqn} - all_names:
            raise ConfigError(f"{spec.name}: tied: no weight is called {min(missing)}; some are {_some(all_names)}")
        if plan.module.get_parameter(alias) is not plan.module.get_parameter(fqn):
            raise ConfigError(f"{spec.name}: tied: {alias} and {fqn} are two weights in the model that build makes")


def _check_tensors(plan: Plan) -> None:
    """Refuse tensors that checkpoints would lose, and ties that the spec does not name."""
    spec, module = plan.spec, plan.module
    owners: dict[int, str] = {}
    for fqn, weight in module.named_parameters(remove_duplicate=False):
        other = owners.setdefault(id(weight), fqn)
        if other != fqn and spec.tied.get(fqn) != other and spec.tied.get(other) != fqn:
            raise ConfigError(f"{spec.name}: {fqn} is the same weight as {other}; say so in tied")
    ours = {f"{fqn}.{name}" for fqn, router in routers_of(module) for name, _ in router.named_buffers()}
    persistent = set(module.state_dict()) - {fqn for fqn, _ in module.named_parameters(remove_duplicate=False)} - ours
    if persistent:
        raise ConfigError(
            f"{spec.name}: {min(persistent)} is a persistent buffer, state that each rank would change by itself; "
            "register it with persistent=False if it is a constant, or use a layer without running statistics"
        )
    buffers = [fqn for fqn, _ in module.named_buffers() if fqn not in ours]
    if buffers and spec.fill_buffers is None:
        raise ConfigError(
            f"{spec.name}: {buffers[0]} is a buffer, which building on the meta device leaves empty; "
            "give ModelSpec.fill_buffers, which computes it"
        )


def check_stages(plan: Plan) -> None:
    """ConfigError if a pipeline cannot be cut: a weight that is on no stage."""
    placed = {*plan.blocks, *plan.first, *plan.last}
    for fqn in plan.parameters:
        if not is_below(fqn, placed):
            raise ConfigError(
                f"{plan.spec.name}: {fqn} is in no block and not in first or last, so no pipeline stage has it"
            )
    for alias, fqn in plan.spec.tied.items():
        if not (is_below(alias, plan.last) and is_below(fqn, plan.first)):
            raise ConfigError(
                f"{plan.spec.name}: {alias} is tied to {fqn}; with pp only a last to a first module can be tied"
            )


def check_tensor_cuts(plan: Plan, tp: int) -> None:
    """ConfigError if tp cannot divide the model: a weight without a rule, or a cut that does not divide."""
    spec = plan.spec
    if not spec.tensor:
        raise ConfigError(f"{spec.name}: ModelSpec.tensor is empty, so tp={tp} has nothing to divide; set mesh.tp = 1")
    covering = {fqn for fqn, rule in plan.rules.items() if isinstance(rule, Shared | Whole)}
    for fqn, weight in plan.module.named_parameters():
        owner, _, name = fqn.rpartition(".")
        rule, dim = plan.rules.get(owner), plan.cut(owner)
        if isinstance(rule, Region) and name in rule.divided:
            dim = 0
        if dim is not None:
            _check_cut(fqn, weight, plan.rules[owner], dim, tp)
        elif not is_below(owner, covering):
            raise ConfigError(
                f"{spec.name}: {fqn} has no rule in ModelSpec.tensor; with tp={tp} say whether it is divided, Shared or Whole"
            )
    for fqn, rule in plan.rules.items():
        if isinstance(rule, Colwise | Rowwise) != plan.is_in_region(fqn) and not isinstance(rule, Shared | Region):
            raise ConfigError(
                f"{spec.name}: {fqn}: {type(rule).__name__} belongs {'outside' if plan.is_in_region(fqn) else 'in'} a Region"
            )


def _check_cut(fqn: str, weight: Tensor, rule: Rule, dim: int, tp: int) -> None:
    if dim >= weight.ndim:
        return  # a row-wise projection's bias
    unit = rule.unit if isinstance(rule, Colwise | Rowwise) else 1
    of = rule.of if isinstance(rule, Colwise | Rowwise) else "vocab_size" if isinstance(rule, Vocab) else "outputs"
    size = weight.shape[dim]
    if size % unit:
        raise ConfigError(f"{fqn}: its dimension {dim} of {size} is not a multiple of the rule's unit {unit}")
    if (size // unit) % tp:
        raise ConfigError(f"{fqn}: {of} {size // unit} / tp {tp} = {size / unit / tp:.2f}: must be whole")


def _some(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:5])
