"""The planner's pure functions: stages, rules, grids, groups."""

from __future__ import annotations

import numpy as np
import pytest

from titan_ckpt.console.cut_picture import CutBoxes, draw_cut
from titan_ckpt.errors import ConfigError, PlanError
from titan_ckpt.resharding.placement_rules import read_rules
from titan_ckpt.rewrite.row_strips import cut_strips
from titan_ckpt.sharding.box_columns import shard_columns
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.pipeline import PipelineSpec, stage_table
from titan_ckpt.sharding.placement import Box, Shard
from titan_ckpt.sharding.repeating_columns import Int64s


def layers(spec: PipelineSpec, pp: int) -> list[int]:
    table = stage_table(spec, pp)
    places = [table.coordinates(f"model.layers.{n}.mlp.up_proj.weight") for n in range(spec.num_layers)]
    return [place[0] for place in places if place is not None]


def test_layers_are_dealt_in_order_by_round_and_there_and_back() -> None:
    assert layers(PipelineSpec(num_layers=5), 2) == [0, 0, 0, 1, 1]
    assert layers(PipelineSpec(num_layers=8, stages_per_rank=2), 2) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layers(PipelineSpec(num_layers=8, stages_per_rank=2, style="v"), 2) == [0, 0, 1, 1, 1, 1, 0, 0]
    assert layers(PipelineSpec(num_layers=4, layers_per_stage=(1, 3)), 2) == [0, 1, 1, 1]


def test_embeddings_and_head_are_at_the_ends() -> None:
    tied = stage_table(PipelineSpec(num_layers=4, has_tied_embeddings=True), 2)
    assert tied.coordinates("model.model.embed_tokens.weight") == (0, 1)
    v_shaped = stage_table(PipelineSpec(num_layers=4, stages_per_rank=2, style="v"), 2)
    assert v_shaped.coordinates("optimizer.state.lm_head.weight.exp_avg") == (0,)
    assert v_shaped.coordinates("rng.cpu") is None


def test_a_pipeline_survives_json_and_nonsense_is_refused() -> None:
    spec = PipelineSpec(num_layers=6, stages_per_rank=2, style="v", has_tied_embeddings=True)
    assert PipelineSpec.from_dict(spec.to_dict()) == spec
    with pytest.raises(PlanError, match="cannot be understood"):
        PipelineSpec.from_dict({"layers": 6})
    with pytest.raises(PlanError, match="layer 9, but the pipeline was recorded with 6 layers"):
        stage_table(spec, 1).coordinates("layers.9.w")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "expected one table"),
        ('[placements]\n"*" = "tp:0"', "expected a list of axis:dim"),
        ('[placements]\n"*" = ["dp:0"]', "'dp:0' is not axis:dim"),
        ('[placements]\n"*" = ["tp:0", "tp:1"]', "each named once"),
        ("[placements", "not valid TOML"),
    ],
)
def test_a_bad_table_of_placements_names_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rules(text, where="table.toml")


def test_the_grid_shows_what_each_target_piece_is_made_of() -> None:
    rows, columns = ({"dp_shard": Shard(0)}, {"tp": Shard(1)})
    a, b = (
        shard_columns((4, 4), rows, MeshSpec.parse("dp_shard=2")),
        shard_columns((4, 4), columns, MeshSpec.parse("tp=2")),
    )
    source = CutBoxes(offsets=a.offsets, sizes=a.sizes, holders=["0", "1"])
    target = CutBoxes(offsets=b.offsets, sizes=b.sizes, holders=["0", "1"])
    line_a, line_b = " a0 a0 a1 a1", " b0 b0 b1 b1"
    assert draw_cut((4, 4), target, source=source, is_coloured=False).splitlines() == [line_a, line_a, line_b, line_b]
    assert "\x1b[30;48;5;" in draw_cut((4, 4), target, source=source)
    assert draw_cut((0, 4), target) == "(no elements)"


def taken(grid: Int64s, box: Box) -> Int64s:
    return grid[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].ravel()


@pytest.mark.parametrize("most", [1, 3, 7, 24, 1000])
def test_strips_cover_a_box_once_in_row_major_order(most: int) -> None:
    box = Box((2, 1, 0), (3, 4, 5))
    strips = list(cut_strips(box, most, 1))
    grid = np.arange(6 * 5 * 5).reshape(6, 5, 5)
    assert np.concatenate([taken(grid, strip) for strip in strips]).tolist() == taken(grid, box).tolist()
    assert max(strip.num_elements for strip in strips) <= most
