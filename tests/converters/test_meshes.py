"""An export does not depend on how many ranks saved the checkpoint or how they sharded its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hf_models import config, contents, tensors, write_model
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.resharding.placement_rules import PlacementRule
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Shard

COLUMNS = (PlacementRule("*norm*", {}), PlacementRule("*", {"dp_shard": Shard(1)}))
BOTH = (PlacementRule("*norm*", {"dp_shard": Shard(0)}), PlacementRule("*", {"tp": Shard(1), "dp_shard": Shard(0)}))
MESHES: dict[str, tuple[str, tuple[PlacementRule, ...]]] = {
    "two ranks by rows": ("dp_shard=2", ()),
    "four ranks by rows": ("dp_shard=4", ()),
    "five ranks, uneven": ("dp_shard=5", ()),
    "four ranks by columns": ("dp_shard=4", COLUMNS),
    "three ranks by columns": ("dp_shard=3", COLUMNS),
    "two by two": ("dp_shard=2,tp=2", BOTH),
    "stages": ("pp=2,dp_shard=2,tp=2", ()),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model imported under our names and under torchtitan's."""
    folder = tmp_path_factory.mktemp("runs")
    model = write_model(folder / "in", config(), tensors(config()), extra={"tokenizer_config.json": "{}"})
    import_hf(str(model), str(folder / "titan"))
    import_hf(str(model), str(folder / "torchtitan"), layout="torchtitan")
    return folder


# A mesh with stages needs names that show each layer's stage; only our names do.
@pytest.mark.parametrize(
    ("layout", "mesh"), [*(("titan", mesh) for mesh in MESHES), *(("torchtitan", m) for m in MESHES if m != "stages")]
)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_export_from_any_mesh_is_the_same_files(
    runs: Path, tmp_path: Path, layout: str, dtype: str | None, mesh: str
) -> None:
    shape, rules = MESHES[mesh]
    plan = plan_reshard(open_checkpoint(str(runs / layout)), MeshSpec.parse(shape), rules=rules)
    run_plan(plan, str(tmp_path / "run"))
    found = {}
    for name, source in (("one", runs / layout), ("many", tmp_path / "run")):
        export_hf(str(source), str(tmp_path / name), dtype=dtype, max_shard_bytes=20_000)
        found[name] = contents(tmp_path / name)
        found[name].pop("README.md")
    assert found["one"] == found["many"]
