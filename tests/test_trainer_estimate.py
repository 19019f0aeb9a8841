"""Estimates against what torchtitan publishes, and against what the arithmetic must be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_ckpt.cli import main
from titan_ckpt.trainer.config import TrainConfig, resolve_mesh
from titan_ckpt.trainer.estimate import GIB, Estimate, best_interval_s, estimate
from titan_ckpt.trainer.settings import resolve

CONFIGS = Path(__file__).parent.parent / "configs"
TITAN_LOGIT_BYTES = 14  # eager cross-entropy: bfloat16 logits; float32 copy, log-softmax and gradient


def _estimate(name: str, world_size: int, *sets: str, logit_bytes: float = TITAN_LOGIT_BYTES) -> Estimate:
    config = resolve(TrainConfig, str(CONFIGS / f"{name}.toml"), sets).config
    return estimate(config, resolve_mesh(config, world_size), logit_bytes=logit_bytes)


@pytest.mark.parametrize(("world_size", "published_gib"), [(8, 82.4), (128, 67.0)])
def test_memory_of_the_8b_model_is_within_ten_percent_of_torchtitans_table(
    world_size: int, published_gib: float
) -> None:
    """arXiv 2410.06511, tables 1 and 2: FSDP, selective checkpointing, 2 samples of 8192 tokens per rank, eager."""
    found = _estimate("llama3_8b", world_size, "train.microbatch_size=2", "mesh.compile=false")
    assert found.memory.total / GIB == pytest.approx(published_gib, rel=0.10)


def test_state_is_cut_by_every_axis_that_shards_and_not_by_replicas() -> None:
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
    assert chunked.memory.logits == whole.memory.logits / 8


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


def test_the_save_interval_grows_with_the_cost_and_with_the_time_between_failures() -> None:
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
