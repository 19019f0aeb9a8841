"""Estimates against torchtitan's published peaks, and against arithmetic."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.trainer.config.recipes import find_config, published
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, fixed_world_size, resolve_mesh
from titan_ckpt.trainer.launch.estimate import TrainingEstimate, estimate_training
from titan_ckpt.trainer.launch.gpus import GIB
from titan_ckpt.trainer.launch.published import ROWS, Published
from titan_ckpt.trainer.launch.save_schedule import best_interval_s
from tools.paths import CONFIGS, DOCS


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


def test_published_rows_print_performance_mds_figures(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"^\| (\S+) +\| ([\d.]+) / ([\d.]+) \|", (DOCS / "performance.md").read_text(), re.MULTILINE)
    assert len(rows) == len(WITH_MEMORY)
    for name, there, ours in rows:
        assert main(["train", f"torchtitan/{name}", "--estimate", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["published"]
        assert [f"{found[key] / GIB:.1f}" for key in ("published_peak_bytes", "peak_bytes")] == [there, ours]


def test_a_changed_recipe_is_no_published_row(capsys: pytest.CaptureFixture[str]) -> None:
    for sets, is_row in (([], True), (["--set", "log.every=7"], True), (["--set", "mesh.loss_chunk_tokens=9"], False)):
        assert main(["train", "torchtitan/70b_256/tp", "--estimate", *sets]) == 0
        assert ("published 71.90, -9.2% off" in capsys.readouterr().out) == is_row


def test_every_published_row_is_a_config_of_the_package() -> None:
    assert sorted(row.config for row in ROWS) == list(published())
    assert len(WITH_MEMORY) == 20


def test_updates_in_the_backward_keep_one_groups_gradients() -> None:
    sets = ("optimizer.grad_clip=0", "train.global_batch_size=8", "train.microbatch_size=1")
    whole, early = (_estimate("llama3_8b", 8, *sets, f"optimizer.in_backward={flag}") for flag in ("false", "true"))
    assert early.memory.gradients == 4 * 2 * 128256 * 4096 / 8  # embedding and head, which FSDP reduces together
    assert whole.memory.total - early.memory.total == whole.memory.gradients - early.memory.gradients


ADAPTERS = ("lora.rank=8", "resume.from=base")


def test_of_adapters_only_the_factors_have_gradients_and_moments() -> None:
    whole, tuned = _estimate("llama3_8b", 8), _estimate("llama3_8b", 8, *ADAPTERS)
    factors = 32 * 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    assert (tuned.num_parameters, tuned.num_trained) == (whole.num_parameters, factors)
    assert tuned.memory.parameters == whole.memory.parameters + 4 * factors / 8
    assert (tuned.memory.gradients, tuned.memory.optimizer) == (4 * factors / 8, 8 * factors / 8)
    assert tuned.checkpoint_bytes == 12 * factors
    assert tuned.memory.gathered < whole.memory.gathered
    sent = {t.name: t.size_bytes for t in tuned.traffic}
    before = {t.name: t.size_bytes for t in whole.traffic}
    assert sent["FSDP reduce-scatter"] < before["FSDP reduce-scatter"] / 100
    assert sent["FSDP all-gather"] == pytest.approx(before["FSDP all-gather"], rel=0.01)


def test_a_base_in_nf4_takes_half_a_byte_on_every_data_rank() -> None:
    sets = (*ADAPTERS, 'lora.targets=["q_proj","k_proj","v_proj","o_proj","gate_proj","up_proj","down_proj"]')
    for ranks in (1, 8):
        plain, small = (_estimate("llama3_8b", ranks, *sets, f"lora.base={base}") for base in ("float32", "nf4"))
        moved = 32 * 4096 * (4096 + 1024 + 1024 + 4096 + 3 * 14336)
        expected = plain.memory.parameters - 4 * moved / ranks + moved * (1 / 2 + 1 / 64 + 4 / (64 * 256))
        assert small.memory.parameters == pytest.approx(expected, rel=1e-9)
        assert small.memory.block == plain.memory.block + 20 * 4096 * 14336
        assert small.memory.gradients == plain.memory.gradients
    more = (*sets, "lora.base=nf4", "train.microbatch_size=2")
    staged, copied = (_estimate("llama3_8b", 2, *more, f"mesh.{axis}=2").memory for axis in ("pp", "dp_replicate"))
    assert staged.parameters == pytest.approx(copied.parameters / 2, rel=0.01)


def test_tp_divides_one_factor_of_each_adapter() -> None:
    tuned = _estimate("llama3_8b", 2, *ADAPTERS, "mesh.tp=2", 'lora.targets=["q_proj"]')
    assert tuned.memory.gradients == 4 * 32 * 8 * (4096 + 4096 / 2)


def test_the_number_of_trained_values_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    sets = [part for text in (*ADAPTERS, "lora.base=nf4") for part in ("--set", text)]
    assert main(["train", "llama3_8b", "--nproc", "8", "--estimate", *sets]) == 0
    assert "8.030 B parameters, 6.82 M trained in adapters\n" in capsys.readouterr().out


@pytest.mark.parametrize("nproc", [1, 8])
def test_offloaded_state_is_in_host_memory(nproc: int) -> None:
    plain, moved = (_estimate("llama3_8b", nproc, f"mesh.cpu_offload={word}") for word in ("false", "true"))
    memory = plain.memory
    assert (moved.host.parameters, moved.host.optimizer) == (memory.parameters, memory.optimizer)
    assert moved.host.total == 16 * moved.num_parameters / nproc > plain.host.total == 0
    assert moved.memory.parameters == moved.memory.gradients == moved.memory.optimizer == 0
    assert moved.memory.gathered > max(
        plain.memory.gathered, moved.num_parameters / 4
    )  # and a block's shards, passing through
    assert moved.memory.total < memory.total


def test_host_memory_is_printed_if_offloaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split("train llama3_8b --nproc 8 --estimate --set mesh.cpu_offload=true")) == 0
    text = capsys.readouterr().out
    assert "host memory of a rank, with mesh.cpu_offload" in text
    assert "14.96 GiB" in text


@pytest.mark.parametrize(
    "words",
    ["torchtitan/70b_256/tp", "torchtitan/405b_cp/cp8", "llama3_8b --nproc 8 --set mesh.activation_checkpoint=full"],
)
def test_printed_parts_add_up_to_the_peak(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words.split(), "--estimate"]) == 0
    text = capsys.readouterr().out.partition("collectives")[0]
    *parts, peak = (float(size) for size in re.findall(r"^  .* ([\d.]+) GiB$", text, re.MULTILINE))
    assert sum(parts) == pytest.approx(peak, abs=0.05)
    assert "which is in " in text
    assert main(["train", *words.split(), "--estimate", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert sum(facts["peak_parts"].values()) == pytest.approx(facts["peak_bytes"])


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


def _sent(name: str, ranks: int, *sets: str) -> float:
    found = _estimate("llama3_8b", ranks, "train.global_batch_size=64", *sets).traffic
    return next(traffic.size_bytes for traffic in found if traffic.name.startswith(name))


@pytest.mark.parametrize("name", ["FSDP all-gather", "FSDP reduce-scatter", "TP", "CP", "HSDP"])
def test_every_axis_counts_the_bytes_that_a_rank_sends(name: str) -> None:
    """Of n ranks (n - 1) / n of what is gathered; a rank's microbatches grow as its data ranks become fewer."""

    def sent(n: int) -> float:
        match name:
            case "TP":
                return _sent(name, n, f"mesh.tp={n}", "mesh.dp_shard=1")
            case "CP":
                return _sent(name, n, f"mesh.cp={n}", "mesh.dp_shard=1", "mesh.cp_method=all_gather")
            case "HSDP":
                return _sent(
                    name, 8 * n, f"mesh.dp_replicate={n}", "mesh.dp_shard=8", f"train.global_batch_size={8 * n}"
                )
            case _:
                return _sent(name, n, f"train.global_batch_size={n}")

    assert sent(8) / sent(2) == pytest.approx((7 / 8) / (1 / 2))


def test_traffic_is_what_a_rank_of_the_model_sends() -> None:
    layers, tokens, dim, kv, runs = 32, 8192, 4096, 1024, 64
    assert _sent("TP", 2, "mesh.tp=2") == runs * layers * 8 * tokens * dim * 2 / 2
    ring = 2 * (3 * 2 + 3 * 2 + 4 * 4)  # keys and values: on thrice, forward and backward; float32 gradients four times
    assert _sent("CP", 4, "mesh.cp=4") == runs * layers * tokens / 4 * kv * ring
    pipeline = _estimate(
        "llama3_8b", 4, "mesh.pp=2", "mesh.cp=2", "mesh.microbatches=4", "train.microbatch_size=4"
    ).traffic
    assert next(t.calls for t in pipeline if t.name.startswith("CP")) % 4 == 0


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
