"""Resharding whole checkpoints: DCP reads equal tensors, a round trip gives equal bytes, any stop leaves them whole."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from tests.support.reshard_states import (
    DTYPES,
    MESHES,
    SMALL,
    STEP,
    assert_dcp_reads,
    data_bytes,
    emptied,
    leaves,
    llama,
    random_rules,
    random_tensor,
    resharded,
    saved,
)
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import AlreadyExistsError, DamagedError, StoreError, TitanError
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.resharding.estimate import estimate_reshard
from titan_ckpt.resharding.placement_rules import PlacementRule
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.pipeline import PipelineSpec
from titan_ckpt.sharding.placement import Shard
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.open import open_store
from titan_ckpt.upkeep.copy import copy_checkpoint


@pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("seed", range(40))
def test_random_tensors_equal_dcps_and_survive_a_round_trip(tmp_path: Path, seed: int) -> None:
    """13 tensors per seed, each of a different dtype: 520 cases of shape, dtype, and source and target mesh and cut."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 17, 23]
    shapes = {f"t{n}": tuple(chance.choices(sizes, k=chance.randint(0, 3))) for n in range(len(DTYPES))}
    state = {name: random_tensor(shape, DTYPES[n], generator) for n, (name, shape) in enumerate(shapes.items())}
    mesh_a, mesh_b = chance.choice(MESHES), chance.choice(MESHES)
    rules_a, rules_b = (random_rules(shapes, shapes, chance) for _ in range(2))
    whole = saved(str(tmp_path / "whole"), state)
    a = resharded(whole, str(tmp_path / "a"), mesh_a, rules_a)
    b = resharded(a, str(tmp_path / "b"), mesh_b, rules_b)
    assert_dcp_reads(str(tmp_path / "b"), state)
    again = resharded(b, str(tmp_path / "again"), mesh_a, rules_a)
    assert data_bytes(again) == data_bytes(a)


def test_a_resharded_checkpoint_names_the_digest_of_each_file(tmp_path: Path) -> None:
    state = {"a": torch.arange(60.0).reshape(6, 10), "b": torch.ones(7, dtype=torch.bfloat16), "n": 3}
    rules = (PlacementRule("a", {"dp_shard": Shard(0)}),)
    checkpoint = resharded(saved(str(tmp_path / "whole"), state), str(tmp_path / "out"), "dp_shard=3", rules)
    found = {file.path: (file.size_bytes, file.digest) for file in checkpoint.manifest.files}
    data = {path: checkpoint.store.read(checkpoint.path(path)) for path in found}
    assert found == {path: (len(held), xxhash.xxh3_128_digest(held)) for path, held in data.items()}
    assert len(found) == 3


def cuts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Each tensor's stages and sharded dimensions, without the axes of degree 1 that a manifest may record."""
    mesh = checkpoint.manifest.mesh
    assert mesh is not None
    return {
        t.fqn: (t.stages, {axes: s.dim for axes, s in (t.placements or {}).items() if mesh.degree(axes) > 1})
        for t in checkpoint.manifest.tensors
    }


PAIRS = [
    "1",
    "dp_shard=4",
    "dp_replicate=2,dp_shard=2",
    "dp_shard=2,tp=2",
    "pp=2,dp_shard=2",
    "cp=2",
    "pp=2,dp_shard=2,tp=2",
]


@pytest.fixture(scope="module")
def on_every_mesh(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Checkpoint]]:
    """A small Llama's state and its checkpoint resharded to every mesh in PAIRS."""
    folder, state = tmp_path_factory.mktemp("meshes"), llama()
    whole = saved(str(folder / "whole"), state, pipeline=PipelineSpec(num_layers=4).to_dict())
    return state, {mesh: resharded(whole, str(folder / mesh), mesh) for mesh in PAIRS}


@pytest.mark.parametrize("source", PAIRS)
def test_every_mesh_becomes_every_other(
    on_every_mesh: tuple[dict[str, Any], dict[str, Checkpoint]], tmp_path: Path, source: str
) -> None:
    state, checkpoints = on_every_mesh
    for target, expected in checkpoints.items():
        made = resharded(checkpoints[source], str(tmp_path / target), target)
        assert data_bytes(made) == data_bytes(expected), target
        assert cuts(made) == cuts(expected), target
    found = emptied(state)
    load(made, found, policy=LoadPolicy())
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(leaves(found), leaves(state), strict=True) if torch.is_tensor(a)
    )
    assert found["rng"] == state["rng"]
    assert made.manifest.training == {"step": STEP, "lr": 0.5}


@pytest.mark.parametrize("order", [("tp", "dp_shard"), ("dp_shard", "tp")])
def test_the_sources_order_of_cuts_is_kept(tmp_path: Path, order: tuple[str, str]) -> None:
    """Cuts of one dimension give other boxes in another order: FSDP2 divides what tensor parallelism left, others do not."""
    whole = saved(str(tmp_path / "whole"), {"model": {"w": torch.arange(48.0).reshape(24, 2)}})
    rules = (PlacementRule("*", {{"dp_shard": "dp_shard+cp"}.get(axis, axis): Shard(0) for axis in order}),)
    source = resharded(whole, str(tmp_path / "source"), "dp_shard=2,tp=2", rules)
    made = resharded(source, str(tmp_path / "made"), "dp_shard=3,tp=2")
    (tensor,) = made.manifest.tensors
    assert list((tensor.placements or {}).items()) == [(axis, Shard(0)) for axis in order]
    starts = {os.path.basename(chunk.file): chunk.box.offsets[0] for chunk in made.manifest.chunks_of(tensor)}
    by_rank = [starts[f"__{rank}_0.distcp"] for rank in range(6)]
    assert by_rank == ([0, 12, 4, 16, 8, 20] if order[0] == "tp" else [0, 4, 8, 12, 16, 20])


def test_each_rank_holds_its_shard_and_replicas_are_stored_once(tmp_path: Path) -> None:
    whole = saved(str(tmp_path / "whole"), llama(), pipeline=PipelineSpec(num_layers=4).to_dict())
    mesh = MeshSpec.parse("pp=2,dp_replicate=2,dp_shard=2,tp=2")
    plan = plan_reshard(whole, mesh)
    o_proj = next(t for t in plan.target.tensors if t.fqn == "model.model.layers.3.self_attn.o_proj.weight")
    assert list((o_proj.placements or {}).items()) == [("tp", Shard(1)), ("dp_shard", Shard(0))]
    assert o_proj.stages == (1,)
    assert o_proj.num_chunks == 4
    assert {
        mesh.coordinate(int(rank))["pp"] for rank in plan.target.rank[o_proj.first_chunk : o_proj.first_chunk + 4]
    } == {1}
    per_stage = plan.target.file_bytes().reshape(2, 8)
    assert (per_stage.max(axis=1) / per_stage.min(axis=1) < 1.6).all()
    made = run_plan(plan, str(tmp_path / "made")).checkpoint
    assert made is not None
    assert (
        sum(chunk.payload_length for t in made.manifest.tensors for chunk in made.manifest.chunks_of(t))
        == made.manifest.size_bytes
    )


def test_dry_run_estimate_matches_the_run(tmp_path: Path) -> None:
    whole = saved(str(tmp_path / "whole"), llama())
    a = resharded(whole, str(tmp_path / "a"), "dp_shard=4")
    plan, store = plan_reshard(a, MeshSpec.parse("dp_shard=2,tp=2")), open_store(str(tmp_path / "b"))
    facts = estimate_reshard(plan, store, memory_bytes=SMALL)
    report = run_plan(plan, str(tmp_path / "b"), memory_bytes=SMALL)
    assert facts.read_bytes == report.traffic.read_bytes
    assert facts.read_requests == report.traffic.read_requests
    assert facts.written_bytes == report.traffic.written_bytes
    assert facts.num_files == report.num_files


def test_cast_that_loses_values_names_the_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = llama()
    state["model"]["model.layers.2.mlp.up_proj.weight"][0, 1] = 1e6
    saved(str(tmp_path / "whole"), state)
    arguments = ["--mesh", "dp_shard=2", "--only", "model", "--dtype", "float16", "--json"]
    assert main(["reshard", str(tmp_path / "whole"), str(tmp_path / "out"), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["overflowed"] == ["model.model.layers.2.mlp.up_proj.weight"]


def test_only_the_model_in_bfloat16_under_new_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = llama()
    saved(str(tmp_path / "whole"), state)
    arguments = ["--mesh", "dp_shard=2", "--only", "model", "--dtype", "bfloat16", "--exclude", "*norm*"]
    code = main(
        [
            "reshard",
            str(tmp_path / "whole"),
            str(tmp_path / "out"),
            *arguments,
            "--rename",
            "model.model.layers.*.mlp.*=m.*.*",
        ]
    )
    assert code == 0
    assert "2 files written" in capsys.readouterr().out
    made = open_checkpoint(str(tmp_path / "out"))
    assert made.manifest.kind == "model"
    assert not any("norm" in fqn or fqn.startswith("optimizer") for fqn in made.manifest.by_fqn)
    up = state["model"]["model.layers.2.mlp.up_proj.weight"]
    assert torch.equal(made.read("m.2.up_proj.weight"), up.bfloat16())


def test_an_unknown_model_takes_its_placements_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(str(tmp_path / "whole"), {"model": {"conv.kernel": torch.arange(24.0).reshape(4, 6)}})
    command = ["reshard", str(tmp_path / "whole"), str(tmp_path / "out"), "--mesh", "tp=2"]
    assert main(command) == 2
    assert "model.conv.kernel: no placements known for axis tp" in capsys.readouterr().err
    table = tmp_path / "table.toml"
    table.write_text('[placements]\n"model.conv.*" = ["tp:1"]\n')
    assert main([*command, "--placements", str(table), "--show", "model.conv.kernel"]) == 0
    assert "cut tp:1: 2 chunks, by rank\n a0 a0 a0 a1 a1 a1\n" in capsys.readouterr().out
    made = open_checkpoint(str(tmp_path / "out"))
    assert torch.equal(made.read("model.conv.kernel"), torch.arange(24.0).reshape(4, 6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "pp=8"], "a pipeline of 8 stages does not fit a model of 4 layers"),
        (["--mesh", "dp=2"], "unknown mesh axis 'dp'"),
        (["--mesh", "pp=2", "--stages-per-rank", "0"], "stages_per_rank is 0; give a whole number from 1 on"),
        (["--mesh", "dp_shard=2,dp_shard=4"], "axis 'dp_shard' is given twice"),
        (
            ["--mesh", "dp_shard=2", "--only", "model", "--include", "nothing"],
            "--include 'nothing': no tensor or value",
        ),
        (["--mesh", "dp_shard=2", "--only", "model", "--include", "optimizer.*"], "nothing is left of the checkpoint"),
        (["--mesh", "dp_shard=2", "--rename", "*=*.*"], "write OLD=NEW with as many \\* on both sides"),
        (["--mesh", "dp_shard=2", "--rename", "model.model.layers.*=same"], "write OLD=NEW"),
        (["--mesh", "dp_shard=2", "--rename", "model.lm_head.weight=model.model.norm.weight"], "would both be named"),
        (["--mesh", "dp_shard=2", "--dtype", "int8"], "--dtype 'int8': use one of"),
        (["--mesh", "dp_shard=2", "--memory", "1MB"], "is too little for .*; the least is 8.39 MB"),
        (["--mesh", "dp_shard=2", "--show", "nobody"], "--show nobody: no such tensor"),
        (["--mesh", "dp_shard=2", "--placements", "/nowhere.toml"], "/nowhere.toml: No such file"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    saved(str(tmp_path / "whole"), llama())
    assert main(["reshard", str(tmp_path / "whole"), str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_existing_or_nested_destinations_are_refused(tmp_path: Path) -> None:
    whole = saved(str(tmp_path / "whole"), llama())
    plan = plan_reshard(whole, MeshSpec.parse("dp_shard=2"))
    with pytest.raises(TitanError, match="lies inside the source"):
        run_plan(plan, str(tmp_path / "whole" / "sub"))
    (tmp_path / "link").symlink_to(tmp_path / "whole")
    with pytest.raises(TitanError, match="lies inside the source"):
        run_plan(plan, str(tmp_path / "link" / "sub"))
    run_plan(plan, str(tmp_path / "out"))
    with pytest.raises(AlreadyExistsError, match="exists already"):
        run_plan(plan, str(tmp_path / "out"))


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = saved(str(tmp_path / "whole"), llama())
    monkeypatch.setattr(FileStore, "free_bytes", lambda _self: 1000)
    with pytest.raises(StoreError, match="are to be written, 1,000 are free"):
        run_plan(plan_reshard(whole, MeshSpec.parse("dp_shard=2")), str(tmp_path / "out"))
    with pytest.raises(StoreError, match="are to be written, 1,000 are free"):
        copy_checkpoint(whole, open_store(str(tmp_path / "copy")))
    dcp.save({"w": torch.zeros(4000)}, checkpoint_id=tmp_path / "theirs" / "step-3", no_dist=True)
    with pytest.raises(StoreError, match="bytes are to be written, 1,000 are free"):
        copy_checkpoint(open_checkpoint(str(tmp_path / "theirs" / "step-3")), open_store(str(tmp_path / "copy")))
    assert not [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    monkeypatch.undo()
    copy_checkpoint(whole, open_store(str(tmp_path / "copy")))
    monkeypatch.setattr(FileStore, "free_bytes", lambda _self: 1000)
    copy_checkpoint(whole, open_store(str(tmp_path / "copy")))  # has all of it


def test_a_foreign_checkpoint_is_cut_by_the_tables(tmp_path: Path) -> None:
    """A plain DCP save with torchtitan's names and no mesh information."""
    state = {
        "layers.0.attention.wo.weight": torch.randn(8, 6),
        "tok_embeddings.weight": torch.randn(9, 8),
        "step": torch.tensor(4),
    }
    dcp.save(state, checkpoint_id=str(tmp_path / "foreign" / "step-5"), no_dist=True)
    foreign = open_checkpoint(str(tmp_path / "foreign" / "step-5"))
    made = run_plan(plan_reshard(foreign, MeshSpec.parse("dp_shard=2,tp=2")), str(tmp_path / "out")).checkpoint
    assert made is not None
    assert made.manifest.by_fqn["layers.0.attention.wo.weight"].num_chunks == 4
    for name, value in state.items():
        assert torch.equal(made.read(name), value)


@pytest.mark.s3
def test_from_s3_to_s3(s3_url: str) -> None:
    state = llama()
    whole = saved(f"{s3_url}/whole", state)
    a = resharded_large(whole, f"{s3_url}/a", "dp_shard=2,tp=2")
    assert torch.equal(a.read("model.lm_head.weight"), state["model"]["lm_head.weight"])
    b = resharded_large(a, f"{s3_url}/b", "pp=2,dp_shard=2")
    assert data_bytes(resharded_large(b, f"{s3_url}/again", "dp_shard=2,tp=2")) == data_bytes(a)


def resharded_large(checkpoint: Checkpoint, url: str, mesh: str) -> Checkpoint:
    made = run_plan(plan_reshard(checkpoint, MeshSpec.parse(mesh)), url).checkpoint
    assert made is not None
    return made


def test_an_encoded_source_is_decoded_on_the_way_and_checked(tmp_path: Path) -> None:
    state = llama()
    encoded = saved(str(tmp_path / "encoded"), state, codec="planes-zstd")
    made = resharded(encoded, str(tmp_path / "made"), "dp_shard=2,tp=2")
    plain = resharded(saved(str(tmp_path / "plain"), state), str(tmp_path / "expected"), "dp_shard=2,tp=2")
    assert data_bytes(made) == data_bytes(plain)
    (path,) = Path(encoded.url).glob("step-*/a-*/__0_0.distcp")

    def rewrite(_: int) -> None:
        path.write_bytes(path.read_bytes())

    with pytest.raises(DamagedError, match="changed while it was read"):
        run_plan(plan_reshard(encoded, MeshSpec.parse("dp_shard=2")), str(tmp_path / "out"), on_progress=rewrite)
