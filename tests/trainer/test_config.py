"""Configs: TOML files, their bases and `--set`; error messages for invalid ones."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConfigError
from titan_ckpt.store.local import FileStore
from titan_ckpt.trainer.config.toml_records import as_dict, parse_set, render, resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, check_config, fixed_world_size, resolve_mesh
from titan_ckpt.trainer.model.decoder import Decoder
from tools.paths import CONFIGS, DEBUG_CONFIG

TINY = str(CONFIGS / "tiny.toml")


def _tiny(*sets: str) -> TrainConfig:
    return resolve(TrainConfig, TINY, sets).config


def _write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.toml")))
def test_every_config_that_is_shipped_is_valid(name: str) -> None:
    check_config(resolve(TrainConfig, str(CONFIGS / name)).config)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("tiny", 0.00607), ("135m", 0.1345), ("llama3_8b", 8.030), ("llama3_70b", 70.55), ("llama3_405b", 405.85)],
)
def test_a_shipped_model_has_the_size_it_is_named_for(name: str, billions: float) -> None:
    model = resolve(TrainConfig, str(CONFIGS / f"{name}.toml")).config.model
    with torch.device("meta"):
        decoder = Decoder(model)
    assert sum(p.numel() for p in decoder.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(("name", "world_size"), [("llama3_8b", 8), ("llama3_70b", 256), ("llama3_405b", 512)])
def test_a_large_config_fits_the_mesh_it_is_made_for(name: str, world_size: int) -> None:
    assert resolve_mesh(resolve(TrainConfig, str(CONFIGS / f"{name}.toml")).config, world_size).world_size == world_size


def test_a_base_is_merged_under_the_file_and_set_comes_last() -> None:
    resolved = resolve(TrainConfig, TINY, ["model.dim=128", "save.url=s3://bucket/run"])
    assert (resolved.config.model.dim, resolved.config.model.n_layers, resolved.config.model.vocab_size) == (
        128,
        8,
        320,
    )
    assert resolved.config.save.url == "s3://bucket/run"
    origins = [resolved.origins[f"model.{key}"] for key in ("dim", "n_layers", "vocab_size")]
    assert origins == ["--set model.dim", TINY, DEBUG_CONFIG]


def test_printed_config_reads_back_as_the_same_config(tmp_path: Path) -> None:
    resolved = resolve(TrainConfig, TINY, ["mesh.tp=2", 'resume.from="a b"'])
    again = resolve(TrainConfig, _write(tmp_path, "printed.toml", render(resolved)))
    assert again.config == resolved.config
    assert "# --set mesh.tp" in render(resolved)
    assert "# default" in render(resolved)


def test_recorded_config_is_json_with_the_toml_keys() -> None:
    record = json.loads(json.dumps(as_dict(_tiny("resume.from=x"))))
    assert record["resume"]["from"] == "x"
    assert "sliding_window" not in record["model"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mesh.tpp=2", "unknown key mesh.tpp; did you mean 'mesh.tp'?"),
        ("modell.dim=2", "unknown key modell; did you mean 'model'?"),
        ("train.steps=1.5", "train.steps: expected a whole number, found 1.5"),
        ("train.steps=true", "train.steps: expected a whole number, found true"),
        ("save.url=5", "save.url: expected a string, found 5"),
        ("mesh.compile=1", "mesh.compile: expected true or false, found 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas: expected a list of 2 values"),
        ("mesh.pp_layers_per_stage=[1, 'x']", "mesh.pp_layers_per_stage[1]: expected a whole number"),
        (
            "model.family=gpt2",
            'or "deepseek_v2" or "deepseek_v3" or "gpt_oss", found "gpt2"',
        ),
        ("model=3", "model: expected a table"),
        ("train", "write section.key=value"),
        ("train.steps=[1", "is not a TOML value"),
    ],
)
def test_a_bad_value_is_refused_by_name(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _tiny(text)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["train.steps=0"], "train.steps = 0: must be at least 1"),
        (["save.every=5"], "save.url is empty"),
        (["validation.every=5"], "holds nothing out"),
        (["save.url=/tmp/run@5"], "names a step"),
        (["save.keep_every=5"], "save.keep_last = 0"),
        (["data.source="], "either source"),
        (["data.mixture=[{url='a', weight=0.0}]", "data.source="], "must be more than 0"),
    ],
)
def test_values_that_make_no_sense_together_are_refused(sets: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(_tiny(*sets))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["model.n_layers=1000000000"], "model.n_layers = 1000000000: must be at most 10000"),
        (["model.vocab_size=1000000000"], "model.vocab_size = 1000000000: must be at most"),
        (["optimizer.lr=nan"], "optimizer.lr = nan: must be at least 0"),
        (["optimizer.lr=inf"], "optimizer.lr = inf: must be at most 1e+38"),
        (["optimizer.eps=nan"], "optimizer.eps = nan: must be at least 0"),
        (["model.dim=-1"], "model.dim = -1: must be at least 1"),
        ([f"model.dim={10**100}"], "model.dim = a number of 333 bits: must be at most"),
        (["data.seq_len=1000000000000"], "data.seq_len = 1000000000000: must be at most"),
        (
            ["train.microbatch_size=1000000", "data.seq_len=8192"],
            "train.microbatch_size 1000000 x data.seq_len 8192 = 8192000000",
        ),
        (["train.global_batch_size=1000000000"], "train.global_batch_size = 1000000000: must be at most"),
        (["data.prefetch=1000000"], "data.prefetch = 1000000: must be at most 1024"),
        (["save.timeout_s=nan"], "save.timeout_s = nan: must be at least 0"),
        (["debug.stall_s=inf"], "debug.stall_s = inf: must be at most"),
        (["model.n_layers=10000", "model.dim=1048576", "model.ffn_dim=16777216"], "parameters; at most 1e+14"),
        (
            ["save.url=/tmp/run", "save.mirror=s3://b/mir?sig=1"],
            "save.mirror: 's3://b/mir?***': a run's URL has no query",
        ),
        (["export.url=s3:/bucket"], "export.url: s3:/bucket: did you mean s3://bucket?"),
        (
            ["model.head_dim=15"],
            "model: heads of 15 elements are odd, and positions turn pairs; change dim or head_dim",
        ),
    ],
)
def test_absurd_values_are_refused_with_their_limit(sets: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(_tiny(*sets))
    assert expected in str(caught.value)


def test_weights_beyond_this_machine_are_refused_early(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    sets = [f"save.url={tmp_path / 'run'}", "model.ffn_dim=16777216", "model.n_layers=1000", "model.dim=128"]
    assert main(["train", TINY, *(part for text in sets for part in ("--set", text))]) == 2
    assert "of memory; make model.dim" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("nproc", ["0", "-1", "100000", "99999999999999"])
def test_absurd_numbers_of_ranks_start_none(nproc: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TINY, "--nproc", nproc]) == 2
    assert nproc in capsys.readouterr().err


SECRET = "Zx9Qw8Er7Ty6Ui5Op4"


def test_the_record_of_a_config_hides_secrets() -> None:
    sets = [
        f"export.url=https://u:{SECRET}@h/x", f"save.mirror=az://c/run?sig={SECRET}", f"resume.from=s3://k:{SECRET}@b/r",
        f'data.mixture=[{{url="https://h/a.jsonl?X-Amz-Signature={SECRET}"}}]', f"log.wandb=hf_{SECRET * 2}",
    ]  # fmt: skip
    shown = json.dumps(as_dict(_tiny(*sets)))
    assert "Zx9Q" not in shown
    assert "https://***@h/x" in shown


def test_a_bad_mirror_is_refused_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mirror in (f"file://{tmp_path}/mir?sig={SECRET}", f"nosuchscheme://{SECRET}@h/x"):
        sets = [f"save.url={tmp_path / 'run'}", f"save.mirror={mirror}"]
        assert main(["train", TINY, *(part for text in sets for part in ("--set", text))]) == 2
        assert "Zx9Q" not in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "adapter_config.json", ".metadata"])
def test_a_folder_of_another_program_is_left_alone(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / name).write_text("{}")
    assert main(["train", DEBUG_CONFIG, "--set", f"save.url={tmp_path / 'theirs'}"]) == 2
    assert f"holds {name} of another program and no run; give the run a folder of its own" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["theirs", name]


def test_a_disk_too_small_for_a_checkpoint_is_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FileStore, "free_bytes", lambda _self: 1000)
    assert main(["train", TINY, "--set", f"save.url={tmp_path / 'run'}"]) == 3
    assert "are to be written, 1,000 are free on that disk" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_circular_base_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, "a.toml", 'base = "b.toml"')
    path = _write(tmp_path, "b.toml", 'base = "a.toml"')
    with pytest.raises(ConfigError, match="circular"):
        resolve(TrainConfig, path)


def test_a_missing_base_is_named_with_the_file_that_wants_it(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.toml", 'base = "gone.toml"')
    with pytest.raises(ConfigError, match=r"gone.toml \(the `base` of .*a.toml\): no such config file"):
        resolve(TrainConfig, path)


def test_a_file_that_is_no_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bad.toml: not valid TOML: .*line 2"):
        resolve(TrainConfig, _write(tmp_path, "bad.toml", "[model]\ndim = = 3\n"))


def test_a_missing_value_without_a_default_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size: missing"):
        resolve(TrainConfig, _write(tmp_path, "short.toml", "[model]\ndim = 3\n"))


def test_a_set_value_is_toml_and_a_bare_url_needs_no_quotes() -> None:
    assert parse_set('data.mixture=[{url="a", weight=2}]') == ("data.mixture", [{"url": "a", "weight": 2}])
    assert parse_set("save.url=s3://b/r") == ("save.url", "s3://b/r")


def test_mesh_fixes_the_world_size_unless_dp_shard_is_open() -> None:
    assert fixed_world_size(_tiny()) is None
    assert fixed_world_size(_tiny("mesh.dp_shard=2", "mesh.tp=2")) == 4


def test_print_config_writes_toml_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TINY, "--print-config", "--set", "mesh.tp=4"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["mesh"]["tp"] == 4


@pytest.mark.parametrize(
    ("sets", "exit_code", "expected"),
    [
        (["trian.steps=3"], 2, "did you mean 'train'?"),
        (["mesh.dp_shard=2", "mesh.tp=3"], 2, "tp"),
        (["data.tokenizer=/nowhere/tokenizer.json"], 2, "/nowhere/tokenizer.json"),
        (["model.vocab_size=200"], 2, "set model.vocab_size to at least 257"),
        (["data.source=/nowhere/*.txt"], 3, "nothing at /nowhere/*.txt"),
        (["resume.from=/nowhere"], 3, "/nowhere"),
        (["save.url=/proc/nowhere"], 3, "/proc"),
        (["model.n_heads=7"], 2, "7"),
        (["train.device=cuda"], 2, "no accelerator"),
    ],
)
def test_bad_input_is_one_clear_line_and_no_traceback(
    sets: list[str], exit_code: int, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if torch.cuda.is_available() and expected == "no accelerator":
        pytest.skip("there is an accelerator here")
    places = [f"log.folder={tmp_path}", f"data.cache={tmp_path}"]
    arguments = ["train", TINY, *(part for text in [*places, *sets] for part in ("--set", text))]
    assert main(arguments) == exit_code
    error = capsys.readouterr().err
    assert error.startswith("titan-ckpt: error: ")
    assert expected in error
    assert error.count("\n") == 1


def test_nproc_that_contradicts_the_mesh_shows_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TINY, "--nproc", "3", "--set", "mesh.dp_shard=2", "--set", "mesh.tp=2"]) == 2
    assert "dp_shard 2 x cp 1 x tp 2 = 4, but there are 3 ranks" in capsys.readouterr().err


def test_freezing_every_weight_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"train.freeze = \['model.\*', 'lm_head.\*'\] freezes every weight"):
        check_config(_tiny('train.freeze=["model.*", "lm_head.*"]'))
    check_config(_tiny('train.freeze=["model.*"]'))


EARLY = ("optimizer.in_backward=true", "optimizer.grad_clip=0", "train.global_batch_size=4", "train.microbatch_size=2")


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ("optimizer.grad_clip=1.0", "optimizer.grad_clip = 0"),
        ('optimizer.not_finite="skip"', "not_finite"),
        ('optimizer.name="muon"', "adamw"),
        ('optimizer.groups=[{weights=["**.q_proj.weight"], name="muon"}]', "adamw"),
        ("mesh.pp=2", "mesh.pp = 1"),
        ("mesh.cpu_offload=true", "mesh.cpu_offload = false"),
        ("train.global_batch_size=5", "train.global_batch_size <= 4"),
    ],
)
def test_updates_in_the_backward_need_no_whole_gradient(change: str, needed: str) -> None:
    resolve_mesh(_tiny(*EARLY), 2)
    with pytest.raises(ConfigError, match=f"optimizer.in_backward .* it needs .*{re.escape(needed)}"):
        resolve_mesh(_tiny(*EARLY, change), 4 if "pp" in change else 2)
