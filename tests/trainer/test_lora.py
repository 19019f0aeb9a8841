"""Adapters: only adapter weights are trained and saved, with equal results on every mesh; the converters read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.model.lora import LoraConfig, adapters_of, add_adapters, start_adapters
from titan_ckpt.trainer.parallel.config import ParallelConfig, mesh_spec
from titan_ckpt.trainer.parallel.optimizer import OptimizerConfig, build_optimizer
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from tools.paths import DEBUG_CONFIG
from tools.rank_pool import RankPool
from tools.training.curves import SMALL

LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"))
SETS = ("lora.rank=4", "lora.alpha=8.0", 'lora.targets=["q_proj", "o_proj"]', "optimizer.lr=0.02", "save.every=2")


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train into tmp_path / name; returns the exit code."""
    cache = tmp_path_factory.getbasetemp() / "tokens"

    def train(name: str, *sets: str, more: tuple[str, ...] = ()) -> int:
        fixed = (f"data.cache={cache}", f"save.url={tmp_path}/{name}", "log.tensorboard=false", "train.device=cpu")
        return main(["train", DEBUG_CONFIG, *more, *(part for text in (*fixed, *sets) for part in ("--set", text))])

    return train


def _tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {tensor.fqn: checkpoint.read(tensor.fqn) for tensor in checkpoint.manifest.tensors}


def _losses(folder: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["event"] == "step"}


def test_adapters_are_saved_alone_resumed_and_merged_on_export(tmp_path: Path, run: Any) -> None:
    assert run("base", "train.steps=6") == 0
    base = f"resume.from={tmp_path}/base"
    assert run("whole", base, *SETS, "train.steps=6") == 0
    assert run("halves", base, *SETS, "train.steps=6", "train.max_seconds=0.0001") == 0
    assert max(_losses(tmp_path / "halves")) == 1
    assert run("halves", base, *SETS, "train.steps=6") == 0
    assert _losses(tmp_path / "halves") == _losses(tmp_path / "whole")

    found = _tensors(open_checkpoint(f"{tmp_path}/whole"))
    modules = [f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "o_proj")]
    factors = {f"{module}.lora_{side}.weight" for module in modules for side in "AB"}
    assert {name for name in found if name.startswith("model.")} == {f"model.{factor}" for factor in factors}
    moments = {f"optimizer.state.{factor}.{kind}" for factor in factors for kind in ("exp_avg", "exp_avg_sq", "step")}
    assert set(found) == {f"model.{factor}" for factor in factors} | moments

    assert run("whole", base, *SETS, more=("--export-adapter", f"{tmp_path}/adapter")) == 0
    assert run("whole", base, *SETS, more=("--export-adapter", f"{tmp_path}/adapter")) == 3  # it is there already
    assert str(tmp_path) not in (tmp_path / "adapter" / "adapter_config.json").read_text()
    merging = ["--merge-lora", f"{tmp_path}/adapter", "--dtype", "float32"]
    assert main(["convert", "to-hf", f"{tmp_path}/base", f"{tmp_path}/hf", *merging]) == 0
    plain, merged = _tensors(open_checkpoint(f"{tmp_path}/base")), open_checkpoint(f"{tmp_path}/hf")
    for module in modules:
        a, b = (found[f"model.{module}.lora_{side}.weight"] for side in "AB")
        expected = plain[f"model.{module}.weight"] + 2.0 * b @ a
        assert torch.allclose(merged.read(f"model.{module}.weight"), expected, atol=1e-6)
        assert (b != 0).any()


def test_a_first_step_from_a_base_has_the_base_s_loss(tmp_path: Path, run: Any) -> None:
    assert run("base", "train.steps=10", "train.global_batch_size=8") == 0
    assert run("lora", f"resume.from={tmp_path}/base", *SETS, "train.steps=1") == 0
    assert run("full", f"resume.from={tmp_path}/base", "resume.model_only=true", "train.steps=1") == 0
    assert _losses(tmp_path / "lora")[1] == pytest.approx(_losses(tmp_path / "full")[1], rel=1e-6)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("lora.rank=4",), "resume.from is empty"),
        (("lora.rank=4", 'lora.targets=["qproj"]', "resume.from=x"), "choose from down_proj, gate_proj, k_proj"),
    ],
)
def test_adapters_that_cannot_be_are_refused(
    sets: tuple[str, ...], message: str, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", *sets) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _curve(_rank: int, parallel: ParallelConfig, world_size: int) -> list[float]:
    """Losses of four steps on one batch, with adapters starting from zero."""
    mesh = mesh_spec(parallel, world_size)
    model = replace(SMALL, tied_embeddings=False)
    built = build_parallel_model(
        decoder(model), parallel, mesh, device=torch.device("cpu"), seed=1,
        extend=lambda part, plan, ranks: add_adapters(part, plan, LORA, ranks),
    )  # fmt: skip
    start_adapters(built.named_parameters())
    optimizer = build_optimizer(built, OptimizerConfig(lr=0.02), only=adapters_of(built.named_parameters()))
    generator, losses = torch.Generator().manual_seed(3), []
    tokens = torch.randint(model.vocab_size, (8, 33), generator=generator)
    each = 8 // built.data_degree
    mine = tokens[built.data_rank * each : (built.data_rank + 1) * each]
    for _ in range(4):
        local = built.forward_backward({"tokens": mine[:, :-1], "labels": mine[:, 1:]}, count=8 * 32)
        losses.append(float(built.reduce_loss(local)) / (8 * 32))
        built.clip_grad_norm(1.0)
        optimizer.step(0.02)
        optimizer.zero_grad()
    return losses


@pytest.mark.dist
def test_adapters_train_alike_on_every_mesh(ranks: RankPool) -> None:
    meshes = [
        ParallelConfig(dp_shard=4), ParallelConfig(tp=2, dp_shard=2), ParallelConfig(tp=2, sequence_parallel=False),
        ParallelConfig(pp=2, dp_shard=2, microbatches=2), ParallelConfig(cp=2, dp_shard=2),
        ParallelConfig(pp=2, tp=2, microbatches=2),
    ]  # fmt: skip
    curves = [ranks.run(_curve, mesh, 4)[0] for mesh in meshes]
    assert curves[0][-1] < curves[0][0] - 0.01
    for mesh, curve in zip(meshes, curves, strict=True):
        assert curve == pytest.approx(curves[0], rel=1e-5), mesh


@pytest.mark.dist
def test_adapters_train_on_a_base_in_float8(ranks: RankPool) -> None:
    """Emulated on a CPU: near the curve of float32, not on it, and alike on every mesh."""
    exact = ranks.run(_curve, ParallelConfig(dp_shard=4), 4)[0]
    meshes = [
        ParallelConfig(dp_shard=4, float8="rowwise"), ParallelConfig(tp=2, dp_shard=2, float8="rowwise"),
        ParallelConfig(dp_shard=4, float8="tensorwise", float8_all_gather=True),
        ParallelConfig(pp=2, dp_shard=2, microbatches=2, float8="rowwise"),
    ]  # fmt: skip
    for mesh in meshes:
        curve = ranks.run(_curve, mesh, 4)[0]
        assert curve == pytest.approx(exact, rel=3e-3), mesh
        assert curve != pytest.approx(exact, rel=1e-7), mesh


def test_adapters_are_exported_while_training_goes_on(tmp_path: Path, run: Any) -> None:
    assert run("base", "train.steps=2") == 0
    assert run("lora", f"resume.from={tmp_path}/base", *SETS, "train.steps=2", "export.every=2") == 0
    folder = tmp_path / "lora" / "hf" / "checkpoint-2"
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    assert (folder / "tokenizer.json").exists()
    merging = ["--merge-lora", str(folder), "--dtype", "float32"]
    assert main(["convert", "to-hf", f"{tmp_path}/base", f"{tmp_path}/hf", *merging]) == 0


def test_another_scale_of_the_adapters_is_refused(tmp_path: Path, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("base", "train.steps=1") == 0
    assert run("lora", f"resume.from={tmp_path}/base", *SETS, "train.steps=1") == 0
    assert run("lora", f"resume.from={tmp_path}/base", *SETS, "train.steps=2", "lora.alpha=16") == 2
    assert "lora.alpha: 8.0 -> 16.0" in capsys.readouterr().err


def test_adapters_alone_are_no_model_to_start_from(
    tmp_path: Path, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("base", "train.steps=1") == 0
    assert run("lora", f"resume.from={tmp_path}/base", *SETS, "train.steps=1") == 0
    for more in ((), SETS):
        assert run("next", f"resume.from={tmp_path}/lora", *more, "train.steps=1", "resume.model_only=true") == 3
        error = capsys.readouterr().err
        assert "adapters" in error, error
        assert "merge" in error, error
