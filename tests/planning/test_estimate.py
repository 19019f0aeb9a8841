"""Estimates against torchtitan's published peaks, and against arithmetic."""

from __future__ import annotations

import json

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.config.recipes import find_config, published
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, fixed_world_size, resolve_mesh
from titan_ckpt.trainer.launch.estimate import TrainingEstimate, estimate_training
from titan_ckpt.trainer.launch.gpus import GIB
from titan_ckpt.trainer.launch.published import ROWS, Published
from titan_ckpt.trainer.launch.save_schedule import best_interval_s
from tools.paths import CONFIGS


def _estimate(name: str, world_size: int, *sets: str) -> TrainingEstimate:
    config = resolve(TrainConfig, str(CONFIGS / f"{name}.toml"), sets).config
    return estimate_training(config, resolve_mesh(config, world_size))


WITH_MEMORY = [row for row in ROWS if row.memory_gib is not None]


@pytest.mark.parametrize("row", WITH_MEMORY, ids=lambda row: row.config)
def test_memory_is_within_ten_percent_of_torchtitans_tables(row: Published) -> None:
    config = resolve(TrainConfig, find_config(row.config), ()).config
    mesh = resolve_mesh(config, fixed_world_size(config) or 1)
    found = estimate_training(config, mesh, implementation=row.implementation)
    assert found.memory.total / GIB == pytest.approx(row.memory_gib, rel=0.10)


def test_every_published_row_is_a_config_of_the_package() -> None:
    assert sorted(row.config for row in ROWS) == published()
    assert len(WITH_MEMORY) == 20


def test_estimates_refuse_adapters() -> None:
    with pytest.raises(ConfigError, match="lora"):
        _estimate("tiny", 1, "lora.rank=8", "resume.from=base")


def test_sharding_axes_divide_the_state_and_replicas_do_not() -> None:
    whole = _estimate("tiny", 1)
    assert whole.memory.parameters == 4 * whole.num_parameters
    assert _estimate("tiny", 4, "mesh.tp=2").memory.optimizer == whole.memory.optimizer / 4
    assert _estimate("tiny", 4, "mesh.dp_replicate=2").memory.optimizer == whole.memory.optimizer / 2
    assert _estimate("tiny", 4).checkpoint_bytes == 12 * whole.num_parameters


@pytest.mark.parametrize("mode", ["full", "selective", "every_n"])
def test_every_checkpointing_mode_keeps_less_than_none(mode: str) -> None:
    some = _estimate("llama3_8b", 8, f"mesh.activation_checkpoint={mode}").memory.activations
    assert some < _estimate("llama3_8b", 8, "mesh.activation_checkpoint=none").memory.activations / 1.5


def test_our_loss_by_chunks_needs_less_than_whole_logits() -> None:
    whole, chunked = (_estimate("llama3_8b", 8, f"mesh.loss_chunk_tokens={n}") for n in (0, 1024))
    hidden = 2 * 8192 * 4096 * 2  # the head's input and its gradient are not chunked
    assert chunked.memory.logits - hidden == (whole.memory.logits - hidden) / 8


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        ([], ["FSDP all-gather", "FSDP reduce-scatter"]),
        (["mesh.tp=2", "mesh.dp_shard=1", "mesh.pp=4"], ["TP all-gather and reduce-scatter", "PP send and receive"]),
        (
            ["mesh.dp_replicate=2", "mesh.cp=2"],
            ["FSDP all-gather", "FSDP reduce-scatter", "HSDP all-reduce", "CP keys and values"],
        ),
    ],
)
def test_traffic_names_the_axes_that_are_used(sets: list[str], names: list[str]) -> None:
    assert [traffic.name for traffic in _estimate("tiny", 8, *sets).traffic] == names


@pytest.mark.parametrize(
    ("sets", "each"),
    [
        ([], 8),
        (["optimizer.moments=bfloat16"], 4),
        (["optimizer.moments=int8"], 2),
        (["optimizer.ema_decay=0.999"], 12),
    ],
)
def test_the_state_is_that_of_the_optimizer(sets: list[str], each: int) -> None:
    found = _estimate("tiny", 2, *sets)
    assert found.memory.optimizer == each * found.num_parameters / 2
    assert found.checkpoint_bytes == (4 + each) * found.num_parameters


def test_muon_keeps_one_momentum_of_the_blocks() -> None:
    found = _estimate("tiny", 1, "optimizer.name=muon")
    adamw = _estimate("tiny", 1)
    blocks = (adamw.memory.optimizer - found.memory.optimizer) / 4
    assert 0.5 * found.num_parameters < blocks < found.num_parameters


def test_weights_that_stay_gathered_are_counted() -> None:
    kept, cut = (_estimate("llama3_8b", 64, f"mesh.reshard_after_forward={mode}") for mode in ("never", "always"))
    assert kept.memory.gathered - cut.memory.gathered > kept.num_parameters  # of 2 bytes each, less those held anyway
    assert kept.memory.gathered > 2 * kept.num_parameters


def test_save_interval_grows_with_save_cost_and_mtbf() -> None:
    assert best_interval_s(5.0, 86_400.0) == pytest.approx(926, abs=1)
    assert best_interval_s(20.0, 86_400.0) > best_interval_s(5.0, 86_400.0)
    assert best_interval_s(100.0, 10.0) == 10.0


def test_estimate_prints_without_starting_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(CONFIGS / "llama3_405b.toml"), "--nproc", "512", "--estimate"]) == 0
    text = capsys.readouterr().out
    assert "512 ranks, 405.853 B parameters" in text
    assert "PP send and receive" in text
    assert "save every" in text


def test_estimate_as_json_has_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(CONFIGS / "llama3_8b.toml"), "--nproc", "8", "--estimate", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["mesh"] == "dp_shard=8"
    assert facts["peak_bytes"] > facts["memory"]["parameters"] > 0
    assert facts["saves"]["save_every_s"] > facts["saves"]["upload_s"] > facts["saves"]["stall_s"] > 0
