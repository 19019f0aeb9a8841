"""Estimates against torchtitan's published peaks, and against arithmetic."""

from __future__ import annotations

import json

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, resolve_mesh
from titan_ckpt.trainer.launch.estimate import GIB, TrainingEstimate, best_interval_s, estimate_training
from tools.paths import CONFIGS

TITAN_LOGIT_BYTES = 14  # eager cross-entropy: bfloat16 logits; float32 copy, log-softmax and gradient
TITAN_CUT_LOGIT_BYTES = 18  # DTensor's loss parallel: two float32 temporaries for the gradient besides its shards


def _estimate(name: str, world_size: int, *sets: str, logit_bytes: float = TITAN_LOGIT_BYTES) -> TrainingEstimate:
    config = resolve(TrainConfig, str(CONFIGS / f"{name}.toml"), sets).config
    return estimate_training(config, resolve_mesh(config, world_size), logit_bytes=logit_bytes)


SMALL_BATCH, EAGER = ["train.microbatch_size=2"], ["train.microbatch_size=2", "mesh.compile=false"]
LARGE_BATCH = ["train.microbatch_size=32", "mesh.microbatches=8"]
INTERLEAVED = ["train.microbatch_size=32", "mesh.microbatches=16", "mesh.pp_schedule=Interleaved1F1B"]


@pytest.mark.parametrize(
    ("name", "world_size", "sets", "logit_bytes", "published_gib"),
    [
        ("llama3_8b", 8, EAGER, TITAN_LOGIT_BYTES, 82.4),
        ("llama3_8b", 8, SMALL_BATCH, TITAN_LOGIT_BYTES, 77.0),
        ("llama3_8b", 128, EAGER, TITAN_LOGIT_BYTES, 67.0),
        ("llama3_8b", 128, SMALL_BATCH, TITAN_LOGIT_BYTES, 62.0),
        ("llama3_70b", 256, ["train.microbatch_size=16"], TITAN_CUT_LOGIT_BYTES, 71.9),
        ("llama3_405b", 512, LARGE_BATCH, TITAN_CUT_LOGIT_BYTES, 82.5),
        ("llama3_405b", 512, INTERLEAVED, TITAN_CUT_LOGIT_BYTES, 72.7),
    ],
)
def test_memory_is_within_ten_percent_of_torchtitans_tables(
    name: str, world_size: int, sets: list[str], logit_bytes: float, published_gib: float
) -> None:
    """torchtitan's benchmarks of December 2024, tables 1, 3, 4 and 5: peaks of reserved memory."""
    found = _estimate(name, world_size, *sets, logit_bytes=logit_bytes)
    assert found.memory.total / GIB == pytest.approx(published_gib, rel=0.10)


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
    whole, chunked = (_estimate("llama3_8b", 8, f"mesh.loss_chunk_tokens={n}", logit_bytes=8) for n in (0, 1024))
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
