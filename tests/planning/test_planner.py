"""`train --plan`: what it finds fits, trains and is the fastest; what cannot fit is refused with its size."""

from __future__ import annotations

import json
import shlex

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.config.recipes import find_config
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, check_config, resolve_mesh
from titan_ckpt.trainer.launch.estimate import estimate_training
from titan_ckpt.trainer.launch.gpus import GIB, H100, H200, Gpu
from titan_ckpt.trainer.launch.planner import SHOWN, Search, search
from titan_ckpt.trainer.launch.throughput import predict


def _config(name: str, *sets: str) -> TrainConfig:
    return resolve(TrainConfig, find_config(name), sets).config


def _search(name: str, num_gpus: int, *sets: str, gpu: Gpu = H100) -> Search:
    return search(_config(name, *sets), num_gpus, gpu)


@pytest.mark.parametrize(
    ("name", "num_gpus", "sets"),
    [
        ("llama3_8b", 64, []),
        ("llama3_8b", 8, ["data.seq_len=131072", "train.global_batch_size=8"]),
        ("llama3_8b", 24, ["train.global_batch_size=48"]),
        ("llama3_70b", 128, ["train.global_batch_size=128", "mesh.float8=tensorwise", "mesh.async_tp=true"]),
        ("llama3_8b", 4, ["mesh.pp=2", "mesh.pp_layers_per_stage=[10,22]", "train.global_batch_size=4"]),
        ("tiny", 4, []),
    ],
)
def test_every_choice_is_a_config_that_fits(name: str, num_gpus: int, sets: list[str]) -> None:
    """Given to `--set`, each choice is a config that is accepted, fits and has the speed that was printed."""
    found = _search(name, num_gpus, *sets)
    assert 1 <= len(found.best) <= SHOWN
    for choice in found.best:
        again = _config(name, *sets, *choice.settings)
        check_config(again)
        mesh = resolve_mesh(again, num_gpus)
        assert mesh == choice.mesh
        assert estimate_training(again, mesh).memory.total == choice.estimate.memory.total <= H100.usable_bytes
        assert predict(again, mesh, H100).tokens_per_s == choice.speed.tokens_per_s


def test_the_fastest_meshes_come_first_each_once() -> None:
    best = _search("llama3_8b", 16).best
    speeds = [choice.speed.tokens_per_s for choice in best]
    assert speeds == sorted(speeds, reverse=True)
    assert len({choice.mesh for choice in best}) == len(best) == SHOWN
    config = _config("llama3_8b", "mesh.activation_checkpoint=full")
    assert speeds[0] >= predict(config, resolve_mesh(config, 16), H100).tokens_per_s


def test_more_memory_is_used_for_less_recomputation() -> None:
    small, large = (_search("llama3_8b", 8, gpu=gpu).best[0] for gpu in (H100, H200))
    assert small.estimate.memory.total < large.estimate.memory.total <= H200.usable_bytes
    assert large.speed.tokens_per_s > small.speed.tokens_per_s


def test_what_cannot_fit_is_refused_by_how_much() -> None:
    with pytest.raises(ConfigError, match=r"needs 133\.9 GiB per GPU, 63\.0 GiB\s+more than the 70\.9 GiB.*take 15 of"):
        _search("llama3_70b", 8)


@pytest.mark.parametrize(
    ("name", "num_gpus", "batch"), [("llama3_8b", 32, 1), ("llama3_8b", 64, 1), ("llama3_405b", 16384, 512)]
)
def test_short_parts_are_searched_where_long_ones_fail(name: str, num_gpus: int, batch: int) -> None:
    sets = [f"train.global_batch_size={batch}", "data.seq_len=8192"]
    for choice in _search(name, num_gpus, *sets, gpu=H200).best:
        again = _config(name, *sets, *choice.settings)
        check_config(again)
        assert resolve_mesh(again, num_gpus) == choice.mesh
        assert 2 < choice.mesh.degree("cp") <= 8


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["train.global_batch_size=3"], "no mesh of 1024 x H100"),
        (["train.global_batch_size=1"], r"at least 1024 tokens.*no such degrees make 1024\. Change the batch"),
        (["lora.rank=8", "resume.from=base"], "lora.rank"),
    ],
)
def test_what_no_mesh_takes_is_refused(sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _search("llama3_8b", 1024, *sets)


@pytest.mark.parametrize(
    ("name", "sets", "words"),
    [
        ("moe", [], "dense models"),
        ("llama3_8b", ["mesh.cpu_offload=true"], "cpu_offload"),
        ("llama3_8b", ["mesh.float8=mxfp8"], "MXFP8"),
    ],
)
def test_what_the_model_of_speed_lacks_is_refused(name: str, sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _search(name, 8, *sets)


def test_odd_sequences_are_planned_without_cp() -> None:
    best = _search("tiny", 2, "data.seq_len=255").best
    assert [choice.mesh.degree("cp") for choice in best] == [1] * len(best) != []


def test_plan_as_json_has_memory_speed_and_saves(capsys: pytest.CaptureFixture[str]) -> None:
    words = "train llama3_8b --plan --gpus 8 --gpu h200 --upload-rate 2GB --json"
    assert main(shlex.split(words)) == 0
    facts = json.loads(capsys.readouterr().out)
    first = facts["plans"][0]
    assert (facts["gpu"], facts["gpus"]) == ("H200 SXM 141 GB", 8)
    assert first["step_s"] == pytest.approx(sum(first["step"].values()))
    assert first["checkpoint_bytes_per_rank"] == pytest.approx(12 * 8.03e9 / 8, rel=0.01)
    assert first["checkpoint_upload_s"] == first["checkpoint_bytes_per_rank"] / 2e9
    assert 60 * GIB < first["memory_bytes"] < 139 * GIB


def test_the_plan_says_that_parts_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    for batch, is_said in ((1, True), (64, False)):
        assert main(shlex.split(f"train llama3_8b --plan --gpus 64 --set train.global_batch_size={batch}")) == 0
        assert ("so shorter parts were searched too" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(
    "words", ["--plan", "--plan --gpus 0", "--plan --gpus 200000", "--plan --gpus 8 --upload-rate 0"]
)
def test_a_cluster_without_a_size_is_a_usage_error(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "llama3_8b", *words.split()]) == 2
    assert "--gpus" in capsys.readouterr().err or "--upload-rate" in words
