"""The pipeline coordinate of a tensor, from its FQN alone.

A trainer records `PipelineSpec(...).to_dict()` as `SaveOptions.pipeline`, even if `pp` is 1, since a later reshard to `pp=2`
needs the number of layers. The trainer splits its model by `stage_layers` and `coordinate_of_stage`, so that it agrees with an
offline reshard. A mismatch costs locality, not correctness: `load` finds every byte wherever it is.

    PipelineSpec(num_layers=32).to_dict()                              one stage per coordinate (GPipe, 1F1B)
    PipelineSpec(num_layers=32, stages_per_rank=2).to_dict()           interleaved: stage s is on coordinate s % pp
    PipelineSpec(num_layers=32, stages_per_rank=2, style="v").to_dict()      V-shaped (ZBV, DualPipeV)
    PipelineSpec(num_layers=4, layers_per_stage=(1, 3)).to_dict()      an uneven split, for that number of stages only
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from titan_ckpt.arguments import check_flag, check_type, check_whole, check_word
from titan_ckpt.errors import PlanError, UsageError

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)(?:\.|$)")
_FIRST = re.compile(r"(?:^|\.)(?:embed_tokens|tok_embeddings|wte)\.")
_LAST = re.compile(r"(?:^|\.)(?:norm|lm_head|output|ln_f|ahead)\.")


class PipelineStyle(StrEnum):
    """How stages are assigned to pipeline coordinates: in a loop (0, 1, 0, 1), or back and forth (0, 1, 1, 0)."""

    LOOP = "loop"
    V = "v"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """How layers are assigned to pipeline stages.

    `layers_per_stage` None: evenly, with one more on the earlier stages if the division has a remainder. `has_tied_embeddings`:
    the first stage's embedding is also the last stage's head, so both stages hold it. UsageError for values that cannot be.
    """

    num_layers: int
    stages_per_rank: int = 1
    style: str = PipelineStyle.LOOP
    layers_per_stage: tuple[int, ...] | None = None
    has_tied_embeddings: bool = False

    def __post_init__(self) -> None:
        check_whole(self.num_layers, "num_layers", at_least=0)
        check_whole(self.stages_per_rank, "stages_per_rank", at_least=1)
        check_word(self.style, PipelineStyle, "style")
        check_flag(self.has_tied_embeddings, "has_tied_embeddings")
        if self.style == PipelineStyle.V and self.stages_per_rank != 2:
            raise UsageError(f"stages_per_rank is {self.stages_per_rank}; the style 'v' has 2")
        if self.layers_per_stage is not None:
            check_type(self.layers_per_stage, "layers_per_stage", tuple, list, hint="a tuple of whole numbers")
            for stage, count in enumerate(self.layers_per_stage):
                check_whole(count, f"layers_per_stage[{stage}]", at_least=0)
            object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))
            if sum(self.layers_per_stage) != self.num_layers:
                raise UsageError(
                    f"layers_per_stage is {self.layers_per_stage}, which adds up to {sum(self.layers_per_stage)}; "
                    f"num_layers is {self.num_layers}"
                )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form stored in a manifest."""
        split = None if self.layers_per_stage is None else list(self.layers_per_stage)
        return {
            "num_layers": self.num_layers,
            "stages_per_rank": self.stages_per_rank,
            "style": str(self.style),
            "layers_per_stage": split,
            "has_tied_embeddings": self.has_tied_embeddings,
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> PipelineSpec:
        """Parse the JSON form; PlanError if it is invalid."""
        try:
            return PipelineSpec(
                num_layers=content["num_layers"],
                stages_per_rank=content.get("stages_per_rank", 1),
                style=content.get("style", PipelineStyle.LOOP),
                layers_per_stage=content.get("layers_per_stage"),
                has_tied_embeddings=content.get("has_tied_embeddings", False),
            )
        except KeyError as error:
            raise PlanError(f"pipeline {dict(content)!r} cannot be understood: it has no {error}") from error
        except UsageError as error:
            raise PlanError(f"pipeline {dict(content)!r} cannot be understood: {error}") from error


def stage_layers(num_layers: int, num_stages: int, layers_per_stage: tuple[int, ...] | None = None) -> list[range]:
    """The layers of each stage.

    >>> stage_layers(5, 2), stage_layers(4, 2, (1, 3))
    ([range(0, 3), range(3, 5)], [range(0, 1), range(1, 4)])
    """
    if num_stages > num_layers:
        raise PlanError(f"a pipeline of {num_stages} stages does not fit a model of {num_layers} layers: lower pp")
    base, more = divmod(num_layers, num_stages)
    counts = layers_per_stage or tuple(base + (stage < more) for stage in range(num_stages))
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 0:
        raise PlanError(f"layers per stage {list(counts)} do not split {num_layers} layers into {num_stages} stages")
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def coordinate_of_stage(stage: int, pp: int, style: str = PipelineStyle.LOOP) -> int:
    """The `pp` coordinate that holds `stage`: in a loop, or back and forth for the V shape.

    >>> [coordinate_of_stage(s, 2) for s in range(4)], [coordinate_of_stage(s, 2, "v") for s in range(4)]
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    turn, place = divmod(stage, pp)
    return pp - 1 - place if style == PipelineStyle.V and turn % 2 else place


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """Pipeline coordinates by layer, for one degree of `pp`."""

    by_layer: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]

    def coordinates(self, fqn: str) -> tuple[int, ...] | None:
        """The `pp` coordinates that hold `fqn`; None if it belongs to no stage, so that all coordinates hold it.

        >>> stage_table(PipelineSpec(num_layers=4), pp=2).coordinates("model.model.layers.3.mlp.up_proj.weight")
        (1,)
        """
        layer = _LAYER.search(fqn)
        if layer:
            index = int(layer.group(1))
            if index >= len(self.by_layer):
                raise PlanError(f"{fqn}: layer {index}, but the pipeline was recorded with {len(self.by_layer)} layers")
            return (self.by_layer[index],)
        if _FIRST.search(fqn):
            return self.first
        return self.last if _LAST.search(fqn) else None


def stage_table(spec: PipelineSpec, pp: int) -> StageTable:
    """The coordinates of all layers on a mesh with `pp` pipeline coordinates."""
    num_stages = pp * spec.stages_per_rank
    split = spec.layers_per_stage
    layers = stage_layers(spec.num_layers, num_stages, split if split and len(split) == num_stages else None)
    places = [coordinate_of_stage(stage, pp, spec.style) for stage in range(num_stages)]
    by_layer = [places[stage] for stage, some in enumerate(layers) for _ in some]
    first = {places[0], places[-1]} if spec.has_tied_embeddings else {places[0]}
    return StageTable(by_layer=tuple(by_layer), first=tuple(sorted(first)), last=(places[-1],))


def count_layers(fqns: list[str]) -> int:
    """The highest layer number in these names plus one; 0 if none has a layer number."""
    return max((int(match.group(1)) + 1 for fqn in fqns if (match := _LAYER.search(fqn))), default=0)
