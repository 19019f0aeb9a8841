"""Runs that start from checkpoints of torchtitan 0.3.0: same weights, same moments, same subsequent losses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.support.hf_models import config, tensors, write_model
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.converters.models.tensor_names import LAYOUTS, TORCHTITAN_QKV
from titan_ckpt.errors import LoadContractError, PlanError
from titan_ckpt.loading.load import load
from titan_ckpt.loading.policy import LoadPolicy, LoadReport
from titan_ckpt.loading.read_plan import ReadPlan
from titan_ckpt.sharding.placement import Box
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.resume import Start, TrainingProgress, open_for, restore
from titan_ckpt.trainer.model.decoder import ModelConfig, decoder
from titan_ckpt.trainer.parallel.config import ParallelConfig, mesh_spec
from titan_ckpt.trainer.parallel.optimizer import build_optimizer
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from tools.paths import DEBUG_CONFIG
from tools.rank_pool import RankPool
from tools.training.hf_shapes import to_hf
from tools.training.torchtitan_runs import (
    AFTER,
    BATCH,
    BEFORE,
    LENGTH,
    LLAMA,
    MODELS,
    OPTIMIZER,
    TORCHTITAN_RUNS,
    tokens,
)

MESHES = {
    "dp_shard=4": ParallelConfig(dp_shard=4),
    "dp_shard=2,tp=2": ParallelConfig(dp_shard=2, tp=2),
    "pp=2,dp_shard=2": ParallelConfig(pp=2, dp_shard=2),
    "pp=2,tp=2": ParallelConfig(pp=2, dp_shard=1, tp=2),
}
MESH_BOUND = 2e-6


def _saved(name: str) -> str:
    return str(TORCHTITAN_RUNS / name / "checkpoint" / f"step-{BEFORE}")


def _halves(pairs: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows from neighbouring pairs to halves."""
    return pairs.reshape(-1, head_dim // 2, 2, pairs.shape[-1]).transpose(1, 2).reshape(pairs.shape)


# --------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_converted_folder_bit_for_bit(name: str, tmp_path: Path) -> None:
    export_hf(_saved(name), str(tmp_path / "hf"), config=to_hf(MODELS[name]))
    converted, direct = open_checkpoint(str(tmp_path / "hf")), open_for(MODELS[name], _saved(name))
    names = [fqn for fqn in direct.manifest.by_fqn if fqn.startswith("model.")]
    assert names == list(converted.manifest.by_fqn)
    assert all(torch.equal(direct.read(fqn), converted.read(fqn)) for fqn in names)


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_moments_of_fused_projections_are_split_by_row(moment: str) -> None:
    layer, H, G, K = "layers.1.attention.qkv_linear.wqkv.weight", LLAMA.n_heads, LLAMA.n_kv_heads, LLAMA.head_size
    fused = open_checkpoint(_saved("llama")).read(f"optimizer.state.{layer}.{moment}").reshape(G, H // G + 2, K, -1)
    expected = {
        "q": _halves(fused[:, : H // G].reshape(H * K, -1), K),
        "k": _halves(fused[:, H // G].reshape(G * K, -1), K),
        "v": fused[:, H // G + 1].reshape(G * K, -1),
    }
    checkpoint = open_for(LLAMA, _saved("llama"))
    for which, tensor in expected.items():
        fqn = f"optimizer.state.model.layers.1.self_attn.{which}_proj.weight"
        assert torch.equal(checkpoint.read(f"{fqn}.{moment}"), tensor)
        assert checkpoint.read(f"{fqn}.step") == BEFORE


def test_any_part_of_a_permuted_weight_is_read_without_the_rest() -> None:
    checkpoint = open_for(LLAMA, _saved("llama"))
    entry = checkpoint.manifest.by_fqn["model.model.layers.0.self_attn.q_proj.weight"]
    whole = checkpoint.read(entry.fqn)
    for row in range(whole.shape[0]):
        target, report = torch.empty(3, 20), LoadReport()
        box = Box((min(row, whole.shape[0] - 3), 5), (3, 20))
        plan = ReadPlan(checkpoint, LoadPolicy(), report)
        plan.add_box(entry, box, target)
        plan.run()
        assert torch.equal(target, whole[box.offsets[0] :, 5:][:3, :20])
        assert report.fetched_bytes < 2 * 3 * whole.shape[1] * 4


def test_progress_is_torchtitans_except_the_data_position() -> None:
    manifest = open_for(LLAMA, _saved("llama")).manifest
    assert manifest.kind == "full"
    assert manifest.training == {"step": BEFORE, "tokens_seen": BEFORE * BATCH * LENGTH}


@pytest.mark.parametrize(
    "spelled", ["llama/checkpoint", f"llama/checkpoint@{BEFORE}", f"llama/checkpoint/step-{BEFORE}"]
)
def test_a_run_and_a_step_of_it_open_alike(spelled: str) -> None:
    checkpoint = open_for(LLAMA, str(TORCHTITAN_RUNS / spelled))
    assert str(open_for(LLAMA, checkpoint.url, step=checkpoint.step)) == str(checkpoint)
    assert checkpoint.step == BEFORE


def test_our_copy_opens_the_same_with_digests_checked(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert main(["reshard", _saved("llama"), run, "--mesh", "dp_shard=3"]) == 0
    copy, original = open_for(LLAMA, run), open_for(LLAMA, _saved("llama"))
    assert copy.manifest.by_fqn.keys() == original.manifest.by_fqn.keys()
    assert all(torch.equal(copy.read(fqn), original.read(fqn)) for fqn in copy.manifest.by_fqn)
    report = load(
        copy, {"model": {"model.layers.0.mlp.up_proj.weight": torch.empty(48, 32)}}, policy=LoadPolicy(extra="allow")
    )
    assert report.unverified_bytes == 0


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_model_of_another_shape_is_refused_with_both_shapes() -> None:
    wider = ModelConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64)
    with pytest.raises(LoadContractError, match=r"gate_proj.weight.*48.*64"):
        open_for(wider, _saved("llama"))


def test_model_of_fewer_layers_is_refused_with_the_leftovers() -> None:
    shorter = ModelConfig(vocab_size=64, dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=48)
    with pytest.raises(LoadContractError, match=r"not part of a llama model.*layers\.1\."):
        open_for(shorter, _saved("llama"))


def test_another_family_is_refused_by_name() -> None:
    with pytest.raises(LoadContractError, match="q_norm"):
        open_for(LLAMA, _saved("qwen3"))
    mistral = ModelConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, family="mistral")
    with pytest.raises(PlanError, match="mistral model; its families are llama, qwen3"):
        open_for(mistral, _saved("llama"))


def test_a_checkpoint_of_neither_trainer_is_refused(tmp_path: Path) -> None:
    dcp.save({"transformer.wte.weight": torch.zeros(4, 4)}, checkpoint_id=str(tmp_path / "step-1"), no_dist=True)
    with pytest.raises(PlanError, match=r"transformer\.wte\.weight"):
        open_for(LLAMA, str(tmp_path / "step-1"))


# ------------------------------------------------------------------------------------------------------ how it goes on


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def _go_on(_rank: int, name: str, mesh: str, url: str, model_only: bool) -> tuple[TrainingProgress, list[float]]:
    """Resume from `url` on a mesh of this pool; returns the losses of the steps that torchtitan took after its save."""
    model = MODELS[name]
    ranks = build_parallel_model(
        decoder(model), MESHES[mesh], mesh_spec(MESHES[mesh], 4), device=torch.device("cpu"), seed=5
    )
    optimizer = build_optimizer(ranks, OPTIMIZER)
    start = Start(checkpoint=open_for(model, url), model_only=model_only)
    control = ControlGroup(timeout_s=60)
    progress = restore(start, ranks, optimizer, control=control, fingerprint="", other_data=False)
    losses = []
    for step in range(BEFORE, BEFORE + AFTER):
        size = BATCH // ranks.data_degree
        mine = tokens(step)[ranks.data_rank * size :][:size]
        loss = ranks.forward_backward({"tokens": mine[:, :-1], "labels": mine[:, 1:].clone()}, count=BATCH * LENGTH)
        optimizer.step(OPTIMIZER.lr)
        optimizer.zero_grad()
        losses.append(float(ranks.reduce_loss(loss)) / (BATCH * LENGTH))
    return progress, losses


@pytest.mark.dist
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_next_losses_are_those_of_torchtitans_continuation(pool: RankPool, name: str, mesh: str) -> None:
    expected = json.loads((TORCHTITAN_RUNS / name / "after.json").read_text())
    for progress, losses in pool.run(_go_on, name, mesh, _saved(name), False):
        assert progress == TrainingProgress(step=BEFORE, samples=0, tokens=BEFORE * BATCH * LENGTH)
        assert losses == pytest.approx(expected, rel=0, abs=MESH_BOUND)


@pytest.mark.dist
@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "pp=2,dp_shard=2"])
def test_weights_alone_resume_bit_equal_to_the_converted_folder(pool: RankPool, mesh: str, tmp_path: Path) -> None:
    export_hf(_saved("llama"), str(tmp_path / "hf"), config=to_hf(LLAMA))
    direct = pool.run(_go_on, "llama", mesh, _saved("llama"), True)
    assert direct == pool.run(_go_on, "llama", mesh, str(tmp_path / "hf"), True)
    assert direct[0][0] == TrainingProgress()


# ----------------------------------------------------------------------------------------------------- as a user does it


DEBUG: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 160, "head_dim": 16, "rope_theta": 10_000.0,
}  # fmt: skip


@pytest.fixture
def weights_only(tmp_path: Path) -> str:
    """The model of configs/debug.toml as torchtitan saves it at the end of a run: weights only."""
    of: dict[str, Any] = config(**DEBUG)
    import_hf(
        str(write_model(tmp_path / "hf", of, tensors(of))), str(tmp_path / "titan"), layout=LAYOUTS[TORCHTITAN_QKV].name
    )
    state = {e.fqn: torch.empty(e.global_shape) for e in open_checkpoint(str(tmp_path / "titan")).manifest.tensors}
    load(str(tmp_path / "titan"), state)
    dcp.save(state, checkpoint_id=str(tmp_path / "saved" / "step-7"), no_dist=True)
    return str(tmp_path / "saved" / "step-7")


def _train(tmp_path: Path, url: str, start: object) -> tuple[int, str]:
    sets = (f"save.url={tmp_path / url}", f"resume.from={start}", f"data.cache={tmp_path / 'tokens'}", "train.device=cpu",
            "log.tensorboard=false", "train.steps=2")  # fmt: skip
    code = main(["train", DEBUG_CONFIG, *(part for text in sets for part in ("--set", text))])
    log = tmp_path / url / "logs" / "rank_00000.log"
    return code, log.read_text() if log.exists() else ""


def test_train_from_torchtitan_logs_it_and_has_the_same_losses(tmp_path: Path, weights_only: str) -> None:
    code, log = _train(tmp_path, "direct", weights_only)
    assert code == 0
    assert "only the weights are taken, and training begins at step 0" in log
    assert "no tensor optimizer.state.tok_embeddings.weight.exp_avg" in log
    assert _train(tmp_path, "converted", tmp_path / "hf")[0] == 0

    def losses(url: str) -> list[float]:
        lines = (tmp_path / url / "logs" / "metrics.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if record["event"] == "step"]

    assert losses("direct") == losses("converted")
    assert len(losses("direct")) == 2


def test_weights_only_bfloat16_folder_is_a_start_unasked(tmp_path: Path) -> None:
    of: dict[str, Any] = config(**DEBUG)
    folder = write_model(tmp_path / "hf", of, tensors(of, dtype=torch.bfloat16))
    code, log = _train(tmp_path, "run", folder)
    assert code == 0
    assert "weights are cast: bfloat16 -> float32" in log
    assert re.search(r"resuming from .*hf@0 \(weights", log)


def test_train_refuses_the_weights_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(tmp_path, "run", _saved("llama"))[0] == 3
    assert "weights and config contradict each other" in capsys.readouterr().err
