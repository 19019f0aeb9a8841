"""Tensor names of each layout: tables of rules from Hugging Face's names to a trainer's.

A rule is (Hugging Face's pattern, the trainer's pattern, row order); `{}` is the layer number. Our trainer uses the names of
transformers' modules under `model.`; these stack a layer's experts, where the files have one tensor per expert. torchtitan's
Llama rotates adjacent pairs of rows, Hugging Face halves, so the rows of q and k are permuted within each head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from titan_ckpt.converters.models.families import EMBEDDING, FAMILIES, HEAD
from titan_ckpt.converters.models.spec import Experts, ModelSpec
from titan_ckpt.errors import PlanError
from titan_ckpt.sharding.placement import Box, Shape


class RowOrder(StrEnum):
    """The reordering of rows on the way TO the trainer; each has an inverse."""

    KEPT = ""
    HALVES_TO_PAIRS = "halves_to_pairs"


MODEL_PREFIX = "model."
TITAN, TORCHTITAN, TORCHTITAN_QKV = "titan", "torchtitan", "torchtitan-qkv"
TORCHTITAN_FAMILIES = ("llama", "qwen3")
_COMPUTED = re.compile(
    r"(?:model\.)?layers\.\d+\.(?:self_attn|attention)\.rotary_emb\.inv_freq|freqs_cis|rope\.cache|rope_cache"
)
_AHEAD = MODEL_PREFIX + "model.ahead."
_TORCHTITAN_ROOTS = ("tok_embeddings.", "layers.", "norm.", "output.", "lm_head.")


@dataclass(frozen=True, slots=True)
class NameRule:
    """One row of a table."""

    hf: str
    ours: str
    transform: RowOrder = RowOrder.KEPT


@dataclass(frozen=True, slots=True)
class Stacked:
    """The position of a smaller tensor in a stacked one of shape `whole`; `box` has length 1 in the extra first dimension."""

    whole: Shape
    box: Box

    @property
    def shape(self) -> Shape:
        """Shape of the smaller tensor."""
        return self.box.sizes[1:]


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor under both names, the row order between them, and its position if ours stacks several of Hugging Face's."""

    hf: str
    ours: str
    transform: RowOrder
    stacked: Stacked | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A trainer's naming. `stores_tied_head`: it keeps a tied head as a second, equal tensor."""

    name: str
    rules: tuple[NameRule, ...] = ()
    stores_tied_head: bool = False


def _torchtitan(name: str, *, attention: str, head: str) -> Layout:
    hf, ours = "model.layers.{}.", "layers.{}."
    rules = (
        NameRule(EMBEDDING, "tok_embeddings.weight"),
        NameRule(hf + "self_attn.q_proj.weight", f"{ours}{attention}.wq.weight", RowOrder.HALVES_TO_PAIRS),
        NameRule(hf + "self_attn.k_proj.weight", f"{ours}{attention}.wk.weight", RowOrder.HALVES_TO_PAIRS),
        NameRule(hf + "self_attn.v_proj.weight", f"{ours}{attention}.wv.weight"),
        NameRule(hf + "self_attn.o_proj.weight", ours + "attention.wo.weight"),
        NameRule(hf + "self_attn.q_norm.weight", ours + "attention.q_norm.weight"),
        NameRule(hf + "self_attn.k_norm.weight", ours + "attention.k_norm.weight"),
        NameRule(hf + "mlp.gate_proj.weight", ours + "feed_forward.w1.weight"),
        NameRule(hf + "mlp.up_proj.weight", ours + "feed_forward.w3.weight"),
        NameRule(hf + "mlp.down_proj.weight", ours + "feed_forward.w2.weight"),
        NameRule(hf + "input_layernorm.weight", ours + "attention_norm.weight"),
        NameRule(hf + "post_attention_layernorm.weight", ours + "ffn_norm.weight"),
        NameRule("model.norm.weight", "norm.weight"),
        NameRule(HEAD, head),
    )
    return Layout(name=name, rules=rules, stores_tied_head=True)


# TORCHTITAN_QKV: torchtitan's names since it groups the projections. Its head has had both names.
LAYOUTS = {
    TITAN: Layout(name=TITAN),
    TORCHTITAN: _torchtitan(TORCHTITAN, attention="attention", head="output.weight"),
    TORCHTITAN_QKV: _torchtitan(TORCHTITAN_QKV, attention="attention.qkv_linear", head="lm_head.weight"),
}


_ADAPTERS = (
    "a run of adapters holds no base: `titan-ckpt train RUN --export-adapter ADAPTER`, then "
    "`titan-ckpt convert to-hf BASE OUT --merge-lora ADAPTER`"
)


def find_layout(fqns: Iterable[str], where: str) -> Layout:
    """Detect the layout of these names; PlanError if none matches."""
    names = set(fqns)
    if MODEL_PREFIX + EMBEDDING in names:
        return LAYOUTS[TITAN]
    if "tok_embeddings.weight" in names:
        is_grouped = any(".attention.qkv_linear." in name for name in names)
        return _torchtitan(
            TORCHTITAN_QKV if is_grouped else TORCHTITAN,
            attention="attention.qkv_linear" if is_grouped else "attention",
            head="lm_head.weight" if "lm_head.weight" in names else "output.weight",
        )
    shown = ", ".join(sorted(names)[:3]) or "no tensor at all"
    raise PlanError(
        f"{where}: no model that can be converted: expected {MODEL_PREFIX}{EMBEDDING} (ours) or tok_embeddings.weight "
        f"(torchtitan's); found {shown}" + (f"; {_ADAPTERS}" if any(".lora_A" in name for name in names) else "")
    )


def name_in(layout: Layout, hf_name: str, spec: ModelSpec) -> Named:
    """Translate Hugging Face's `hf_name` to `layout`."""
    if layout.name == TITAN:
        return (
            Named(hf_name, MODEL_PREFIX + hf_name, RowOrder.KEPT)
            if spec.experts is None
            else _name_in_mixture(hf_name, spec)
        )
    layer = re.search(r"\.layers\.(\d+)\.", hf_name)
    pattern = hf_name if layer is None else hf_name.replace(f".{layer.group(1)}.", ".{}.", 1)
    rule = next((rule for rule in layout.rules if rule.hf == pattern), None)
    if rule is None or spec.family not in TORCHTITAN_FAMILIES:
        raise PlanError(
            f"torchtitan has no {hf_name} in a {spec.family} model; its families are {', '.join(TORCHTITAN_FAMILIES)}"
        )
    ours = rule.ours if layer is None else rule.ours.format(layer.group(1))
    return Named(hf_name, ours, rule.transform if spec.family == "llama" else RowOrder.KEPT)


def _name_in_mixture(hf_name: str, spec: ModelSpec) -> Named:
    """transformers' module names: gate and up of all experts are one tensor [E, 2 M, D], down is [E, D, M]."""
    assert spec.experts is not None
    family = FAMILIES[spec.family]
    prefix, layer, rest = re.fullmatch(r"(?:(model\.layers\.)(\d+)\.)?(.*)", hf_name).groups()  # type: ignore[union-attr]
    if prefix is None:
        return Named(hf_name, MODEL_PREFIX + hf_name, RowOrder.KEPT)
    ahead = int(layer) - spec.n_layers
    if ahead >= 0 and rest in _PREDICTION_NAMES:
        return Named(hf_name, f"{_AHEAD}depths.{ahead}.{_PREDICTION_NAMES[rest]}", RowOrder.KEPT)
    module = f"{MODEL_PREFIX}{prefix}{layer}." if ahead < 0 else f"{_AHEAD}depths.{ahead}.layer."
    block = module + "mlp."
    if rest == family.router and not rest.startswith("mlp."):
        return Named(hf_name, block + "gate.weight", RowOrder.KEPT)
    expert = re.search(r"\.experts\.(\d+)\.", rest)
    if expert is None:
        return Named(hf_name, module + rest, RowOrder.KEPT)
    number = expert.group(1)
    role = family.experts.index(rest.replace(f".{number}.", ".{}.", 1))
    return Named(hf_name, block + _EXPERT_NAMES[role], RowOrder.KEPT, _place(spec.experts, spec.dim, int(number), role))


# Hugging Face's names in a module that predicts further tokens, and ours.
_PREDICTION_NAMES = {
    "enorm.weight": "enorm.weight", "hnorm.weight": "hnorm.weight", "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "norm.weight",
}  # fmt: skip
_EXPERT_NAMES = ("experts.gate_up_proj", "experts.gate_up_proj", "experts.down_proj")


def _place(experts: Experts, dim: int, number: int, role: int) -> Stacked:
    width = experts.ffn_dim
    if role == 2:
        return Stacked((experts.number, dim, width), Box((number, 0, 0), (1, dim, width)))
    return Stacked((experts.number, 2 * width, dim), Box((number, role * width, 0), (1, width, dim)))


def is_weight(fqn: str, layout: Layout) -> bool:
    """Whether the name is a model weight: no optimizer or loader state, no computed buffer."""
    if layout.name == TITAN:
        return fqn.startswith(MODEL_PREFIX) and not is_computed(fqn) and not is_ahead(fqn)
    return fqn.startswith(_TORCHTITAN_ROOTS) and not is_computed(fqn)


def is_ahead(fqn: str) -> bool:
    """Whether a tensor of a checkpoint belongs to a module that predicts further tokens (`[model.ahead]`)."""
    return fqn.startswith(_AHEAD)


def is_computed(name: str) -> bool:
    """Whether this is a buffer that readers compute; old files store it (`rotary_emb.inv_freq`)."""
    return _COMPUTED.fullmatch(name.removeprefix(MODEL_PREFIX)) is not None
