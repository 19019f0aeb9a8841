"""Placements by name: a user's globs, and a table for Llama-shaped models. No torch, no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from titan_ckpt.errors import ConfigError, PlanError
from titan_ckpt.sharding.mesh import AXES, FOLD
from titan_ckpt.sharding.placement import Placements, Shard
from titan_ckpt.toml_text import parse_toml

FSDP_AXES = "dp_shard+cp"
_DIMENSIONS = frozenset(map(str, range(64)))
_COLUMN = re.compile(
    r"(?:^|\.)(?:(?:q_proj|k_proj|v_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|wq|wk|wv|wqkv|w1|w3)\.(?:weight|bias)|sinks)(?:\.|$)"
)
_TO_LATENT = re.compile(r"(?:^|\.)(?:q_a_proj|kv_a_proj_with_mqa)\.weight(?:\.|$)")
_ROW = re.compile(r"(?:^|\.)(?:o_proj|down_proj|wo|w2)\.(weight|bias)(?:\.|$)")
_VOCABULARY = re.compile(r"(?:^|\.)(?:embed_tokens|tok_embeddings|lm_head|output)\.(?:weight|bias)(?:\.|$)")
_NORM = re.compile(r"(?:^|\.)(?:\w*norm|ln_f)\.(?:weight|bias)(?:\.|$)")
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router)\.(?:weight|bias|e_score_correction_bias)(?:\.|$)")
_JOINED = re.compile(r"(?:^|\.)eh_proj\.weight(?:\.|$)")  # of modules that predict further tokens
_EXPERTS = re.compile(r"(?:^|\.)experts\.")


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """Tensors whose FQN matches `glob` get `placements`."""

    glob: str
    placements: Placements


def tensor_parallel(fqn: str) -> Placements | None:
    """How `tp` and `ep` cut a tensor of a Llama-shaped model, named as in Hugging Face or torchtitan; None for another name.

    >>> tensor_parallel("model.model.layers.0.self_attn.o_proj.weight"), tensor_parallel("model.norm.weight")
    ({'tp': Shard(dim=1)}, {})
    """
    if _EXPERTS.search(fqn):
        return {"ep": Shard(0)}
    if _COLUMN.search(fqn) or _VOCABULARY.search(fqn):
        return {"tp": Shard(0)}
    if row := _ROW.search(fqn):
        return {"tp": Shard(1)} if row.group(1) == "weight" else {}
    return {} if any(whole.search(fqn) for whole in (_NORM, _ROUTER, _TO_LATENT, _JOINED)) else None


def match_rule(rules: tuple[PlacementRule, ...], fqn: str) -> Placements | None:
    """The placements of the first rule that matches, or None."""
    return next((rule.placements for rule in rules if fnmatchcase(fqn, rule.glob)), None)


def read_rules(text: str, *, where: str) -> tuple[PlacementRule, ...]:
    """Read rules from a TOML table of globs; the first match wins.

    >>> read_rules('[placements]\\n"*.o_proj.weight*" = ["tp:1", "dp_shard+cp:0"]\\n"*.step" = []', where="t.toml")[1]
    PlacementRule(glob='*.step', placements={})
    """
    table = parse_toml(text, where)
    if set(table) != {"placements"} or not isinstance(table["placements"], dict):
        raise ConfigError(f'{where}: expected one table [placements] with lines such as \'"*.o_proj.*" = ["tp:1"]\'')
    return tuple(
        PlacementRule(glob, _placements(value, f"{where}: {glob}")) for glob, value in table["placements"].items()
    )


def _placements(value: Any, where: str) -> Placements:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: expected a list of axis:dim, in the order of the cuts, found {value!r:.80}")
    placements: dict[str, Shard] = {}
    for item in value:
        axes, _, dim = item.partition(":") if isinstance(item, str) else ("", "", "")
        unknown = [axis for axis in axes.split(FOLD) if axis not in AXES]
        if unknown or dim not in _DIMENSIONS or axes in placements:
            raise ConfigError(
                f"{where}: {item!r:.80} is not axis:dim with an axis of {', '.join(AXES)}, each named once"
            )
        placements[axes] = Shard(int(dim))
    return placements


def check_dims(fqn: str, placements: Mapping[str, Shard], ndim: int) -> None:
    """PlanError if a rule cuts a dimension that the tensor does not have."""
    for axes, shard in placements.items():
        if shard.dim >= ndim:
            raise PlanError(f"{fqn}: {axes} is to cut dimension {shard.dim}, but the tensor has {ndim} dimensions")
