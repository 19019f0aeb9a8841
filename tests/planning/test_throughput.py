"""Predicted speed: against torchtitan's published rows, and against arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.training.published import NAMES, fit, median_error, rank_correlation, rates, read
from titan_ckpt.trainer.config.recipes import find_config
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, resolve_mesh
from titan_ckpt.trainer.launch.estimate import OURS
from titan_ckpt.trainer.launch.gpus import H100, H200, Gpu
from titan_ckpt.trainer.launch.published import ROWS, fitted_and_judged
from titan_ckpt.trainer.launch.throughput import CALL_S, FITTED, NVLINK_HOP_S, Machine, Throughput, predict
from titan_ckpt.trainer.model.decoder import ModelConfig, flops_per_token


def _config(name: str, *sets: str) -> TrainConfig:
    return resolve(TrainConfig, find_config(name), sets).config


def _predict(name: str, world_size: int, *sets: str, gpu: Gpu = H100) -> Throughput:
    config = _config(name, *sets)
    return predict(config, resolve_mesh(config, world_size), gpu)


def test_rows_that_were_not_fitted_are_predicted() -> None:
    pairs = rates(read(fitted_and_judged()[1]))
    assert len(pairs) == 16
    assert median_error(pairs) <= 0.15
    assert rank_correlation([one for one, _ in pairs], [other for _, other in pairs]) >= 0.9


def test_the_constants_are_those_that_the_fit_finds() -> None:
    found = fit(read(fitted_and_judged()[0]))
    for name in NAMES:
        assert getattr(FITTED, name) == pytest.approx(getattr(found, name), rel=0.01), name


def test_every_second_row_is_judged() -> None:
    fitted, judged = fitted_and_judged()
    assert not {row.config for row in fitted} & {row.config for row in judged}
    assert {row.config for row in (*fitted, *judged)} == {row.config for row in ROWS}
    assert abs(len(fitted) - len(judged)) <= 1


def test_the_bubble_of_1f1b_is_its_share_of_a_run() -> None:
    sets = ["mesh.pp=4", "mesh.dp_shard=2", "train.microbatch_size=16", "mesh.microbatches=16"]
    step = _predict("llama3_8b", 8, *sets).step
    work = step.products + step.attention + step.elementwise + step.tp + step.cp
    assert step.bubble / work == pytest.approx(3 / 16)
    interleaved = _predict("llama3_8b", 8, *sets, "mesh.pp_schedule=Interleaved1F1B").step
    assert interleaved.bubble < 0.6 * step.bubble


def test_a_gather_within_a_node_is_latency_and_bandwidth() -> None:
    config = _config("llama3_8b", "mesh.tp=8")
    mesh = resolve_mesh(config, 64)
    machine = Machine(config=config, mesh=mesh, gpu=H100, efficiency=FITTED, implementation=OURS)
    near = CALL_S + 7 * NVLINK_HOP_S + 7 / 8 * 1e9 / (450e9 * FITTED.link)
    assert machine.gather_s("tp", 1e9) == pytest.approx(near)
    far = 7 / 8 * 1e9 / (50e9 * FITTED.link)  # one GPU of each node: its own 400 Gb/s
    assert machine.gather_s("dp_shard+cp", 1e9) == pytest.approx(far, rel=0.01)
    assert machine.gather_s("dp_replicate", 1e9) == 0.0


def test_mfu_is_the_model_flops_over_the_peak() -> None:
    found = _predict("llama3_8b", 8)
    config = _config("llama3_8b")
    assert isinstance(config.model, ModelConfig)
    expected = found.tokens_per_s * flops_per_token(config.model, config.data.seq_len) / 989.4e12
    assert found.mfu == pytest.approx(expected)
    assert 0.2 < found.mfu < 0.6


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ([], ["mesh.float8=tensorwise"]),
        (["mesh.compile=false"], []),
        (["mesh.activation_checkpoint=full"], ["mesh.activation_checkpoint=none"]),
        (["mesh.tp=8"], ["mesh.tp=8", "mesh.async_tp=true"]),
        (["data.seq_len=65536"], ["data.seq_len=8192"]),
    ],
)
def test_what_saves_work_is_predicted_to_be_faster(slower: list[str], faster: list[str]) -> None:
    assert _predict("llama3_8b", 64, *faster).tokens_per_s > _predict("llama3_8b", 64, *slower).tokens_per_s


def test_an_h200_is_no_slower_and_a_slow_network_costs() -> None:
    assert _predict("llama3_8b", 64, gpu=H200).tokens_per_s > _predict("llama3_8b", 64).tokens_per_s
    slow = _predict("llama3_8b", 64, gpu=replace(H100, network_rate=1e9))
    assert slow.step.fsdp > 0.5 * slow.step.total
    within = _predict("llama3_8b", 64, "mesh.dp_replicate=8", gpu=replace(H100, network_rate=1e9))
    assert within.step.fsdp < slow.step.fsdp


def test_skipped_projections_are_predicted_in_bfloat16() -> None:
    def products(*sets: str) -> float:
        return _predict("llama3_8b", 8, *sets).step.products

    none, whole = products("mesh.float8=none"), products("mesh.float8=tensorwise")
    ffn = products("mesh.float8=tensorwise", 'mesh.float8_skip=["**.mlp.*"]')
    half = products("mesh.float8=tensorwise", 'mesh.float8_skip=["model.layers.1?.mlp.*"]')
    assert whole < half < ffn < none
    layers = 32  # 10 of them skipped
    assert half == pytest.approx(whole + (ffn - whole) * 10 / layers)
