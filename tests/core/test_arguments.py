"""Options are checked where they are given: words, ranges, types, and metadata that JSON cannot hold."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import titan_ckpt
from titan_ckpt.arguments import text_of_file
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import TitanError, UsageError
from titan_ckpt.loading.load import LoadPolicy
from titan_ckpt.resharding.workers import Workers
from titan_ckpt.saving.options import SaveOptions
from titan_ckpt.saving.saver import SaveError, Saver, save
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.pipeline import PipelineSpec
from titan_ckpt.sharding.placement import Box
from titan_ckpt.upkeep.retention import RetentionPolicy

BAD: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (LoadPolicy, {"cast": "eror"}, "cast is 'eror'; did you mean 'error'?"),
    (LoadPolicy, {"missing": "Warn"}, "did you mean 'warn'"),
    (LoadPolicy, {"extra": None}, "extra is None"),
    (LoadPolicy, {"lossy_cast": True}, "lossy_cast is True"),
    (LoadPolicy, {"verify": "al"}, "did you mean 'all'"),
    (LoadPolicy, {"broadcast": "no"}, "broadcast is 'no'; give True or False"),
    (LoadPolicy, {"together": 1}, "together is 1"),
    (LoadPolicy, {"threads": 0}, "threads is 0; give a whole number from 1 on"),
    (LoadPolicy, {"threads": 2.0}, "threads is 2.0"),
    (SaveOptions, {"codec": "planes-zst"}, "did you mean 'planes-zstd'"),
    (SaveOptions, {"codec": 3}, "codec is 3"),
    (SaveOptions, {"mesh": "dp_shard=2"}, "mesh is 'dp_shard=2', of type str; give MeshSpec.parse"),
    (SaveOptions, {"pipeline": 4}, "pipeline is 4"),
    (SaveOptions, {"pipeline": {"layers": 6}}, "it has no 'num_layers'"),
    (SaveOptions, {"pipeline": {"num_layers": "6"}}, "num_layers is '6'"),
    (SaveOptions, {"incremental": "yes"}, "incremental is 'yes'"),
    (SaveOptions, {"is_exclusive": 0}, "is_exclusive is 0"),
    (SaveOptions, {"retention": 3}, "retention is 3, of type int; give RetentionPolicy"),
    (SaveOptions, {"mirror": 5}, "mirror is 5"),
    (SaveOptions, {"timeout_s": 0}, "timeout_s is 0; give a finite number above 0"),
    (SaveOptions, {"timeout_s": math.nan}, "timeout_s is nan"),
    (SaveOptions, {"timeout_s": math.inf}, "timeout_s is inf"),
    (SaveOptions, {"timeout_s": "60"}, "timeout_s is '60'"),
    (SaveOptions, {"in_use": frozenset()}, "in_use is"),
    (SaveOptions, {"phase": "ckpt"}, "phase is 'ckpt'"),
    (SaveOptions, {"replicas": "frist"}, "did you mean 'first'"),
    (RetentionPolicy, {"keep_last": 0}, "keep_last is 0"),
    (RetentionPolicy, {"keep_last": True}, "keep_last is True"),
    (RetentionPolicy, {"keep_last": 1.5}, "keep_last is 1.5"),
    (RetentionPolicy, {"keep_last": 1, "keep_every": 0}, "keep_every is 0"),
    (RetentionPolicy, {"keep_last": 1, "older_than_s": math.nan}, "older_than_s is nan"),
    (RetentionPolicy, {"keep_last": 1, "older_than_s": -1}, "older_than_s is -1"),
    (RetentionPolicy, {"keep_last": 1, "pins": 5}, "pins is 5"),
    (RetentionPolicy, {"keep_last": 1, "pins": frozenset({"5"})}, "a step in pins is '5'"),
    (RetentionPolicy, {"keep_last": 1, "is_incomplete": "x"}, "is_incomplete is 'x'"),
    (Workers, {"count": 0}, "count is 0"),
    (Workers, {"count": 2, "index": 2}, "index is 2; of 2 workers the last is 1"),
    (Workers, {"poll_s": -1}, "poll_s is -1"),
    (PipelineSpec, {"num_layers": -1}, "num_layers is -1"),
    (PipelineSpec, {"num_layers": 4.0}, "num_layers is 4.0"),
    (PipelineSpec, {"num_layers": 4, "stages_per_rank": 0}, "stages_per_rank is 0"),
    (PipelineSpec, {"num_layers": 4, "style": "vv"}, "style is 'vv'; did you mean 'v'?"),
    (PipelineSpec, {"num_layers": 4, "style": "v"}, "the style 'v' has 2"),
    (PipelineSpec, {"num_layers": 4, "layers_per_stage": 2}, "layers_per_stage is 2"),
    (PipelineSpec, {"num_layers": 4, "layers_per_stage": (5, -1)}, "layers_per_stage[1] is -1"),
    (PipelineSpec, {"num_layers": 4, "layers_per_stage": (1, 2)}, "adds up to 3; num_layers is 4"),
    (PipelineSpec, {"num_layers": 4, "has_tied_embeddings": "no"}, "has_tied_embeddings is 'no'"),
    (MeshSpec, {"degrees": (2, 2)}, "use MeshSpec.of or MeshSpec.parse"),
    (MeshSpec, {"degrees": (1, 1, 0, 1, 1, 1)}, "dp_shard: degree 0"),
]


@pytest.mark.parametrize(("make", "options", "text"), BAD)
def test_a_bad_option_is_refused_where_it_is_given(make: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as raised:
        make(**options)
    assert text in str(raised.value)


def test_pins_may_be_any_set_of_steps() -> None:
    assert RetentionPolicy(keep_last=1, pins=[3, 5]).pins == frozenset({3, 5})  # type: ignore[arg-type]


METADATA: list[tuple[dict[str, Any], str]] = [
    ({"user": {"loss": [1.0, math.nan]}}, "user.loss[1] is nan"),
    ({"training": {"lr": math.inf}}, "training.lr is inf"),
    ({"config": {"a": {1: "x"}}}, "config.a has the key 1"),
    ({"user": {"t": torch.ones(1)}}, "user.t is of type Tensor"),
    ({"user": "note"}, "user is 'note'"),
]


@pytest.mark.parametrize(("arguments", "text"), METADATA)
def test_metadata_that_json_cannot_hold_is_refused_early(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    with Saver(str(tmp_path)) as saver:
        with pytest.raises(SaveError) as raised:
            saver.save({"w": torch.ones(2)}, **{"step": 1, **arguments})
        assert text in str(raised.value)
        saver.save({"w": torch.ones(2)}, step=2, user={"nested": [1, {"a": None}]}).wait()
    assert not list(tmp_path.glob("step-00000001"))
    assert open_checkpoint(str(tmp_path)).manifest.user == {"nested": [1, {"a": None}]}


def test_a_mapping_that_contains_itself_is_refused(tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(SaveError, match="contains itself"):
        save(str(tmp_path), {"w": torch.ones(2)}, step=1, user=loop)


def test_a_reshard_refuses_metadata_with_nan_before_it_writes(tmp_path: Path) -> None:
    save(f"{tmp_path}/run", {"w": torch.ones(2)}, step=1, options=SaveOptions(mesh=MeshSpec()))
    checkpoint = open_checkpoint(f"{tmp_path}/run")
    bad = replace(checkpoint, manifest=replace(checkpoint.manifest, user={"loss": math.nan}))
    with pytest.raises(UsageError, match=r"user\.loss is nan"):
        titan_ckpt.plan_reshard(bad, MeshSpec())


def test_a_storage_writer_redacts_as_a_saver_does(tmp_path: Path) -> None:
    secret = {"store": "https://user:hunter2@host/x?token=abc", "lr": 0.1}
    save(f"{tmp_path}/a", {"w": torch.ones(2)}, step=1, training=secret, config=secret, user=secret)
    writer = titan_ckpt.StorageWriter(f"{tmp_path}/b@1", training=secret, config=secret, user=secret)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    ours, theirs = (open_checkpoint(f"{tmp_path}/{name}@1").manifest for name in "ab")
    for name in ("training", "config", "user"):
        assert getattr(ours, name) == getattr(theirs, name)
        assert "hunter2" not in json.dumps(getattr(theirs, name))
    with pytest.raises(UsageError, match=r"user\.loss is nan"):
        titan_ckpt.StorageWriter(f"{tmp_path}/c@1", user={"loss": math.nan})


@pytest.mark.parametrize(
    "call",
    [
        lambda url: titan_ckpt.load(url, {"w": torch.zeros(2)}, policy={"cast": "allow"}),  # type: ignore[arg-type]
        lambda url: titan_ckpt.Saver(url, {"codec": "raw"}),  # type: ignore[arg-type]
        lambda url: titan_ckpt.StorageReader(url, policy="all"),  # type: ignore[arg-type]
        lambda url: titan_ckpt.open_checkpoint(url, on_damage="fallback"),
    ],
)
def test_options_of_another_type_are_refused(tmp_path: Path, call: Callable[[str], Any]) -> None:
    save(str(tmp_path), {"w": torch.ones(2)}, step=1)
    with pytest.raises(TitanError, match=r"policy|options|fall_back"):
        call(str(tmp_path))


COMPARISONS: list[tuple[dict[str, Any], str]] = [
    ({"values": True, "rtol": -0.1}, "rtol is -0.1; give a finite number from 0 on"),
    ({"values": True, "rtol": math.nan}, "rtol is nan"),
    ({"values": True, "rtol": "0.1"}, "rtol is '0.1'"),
    ({"rtol": 0.1}, "rtol is 0.1 without values=True"),
    ({"values": 1}, "values is 1; give True or False"),
]


@pytest.mark.parametrize(("options", "text"), COMPARISONS)
def test_a_bad_tolerance_is_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    save(str(tmp_path), {"w": torch.ones(2)}, step=1)
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(UsageError) as raised:
        titan_ckpt.diff(checkpoint, checkpoint, **options)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"memory_bytes": "1 GB"}, "memory_bytes is '1 GB'"),
        ({"memory_bytes": 1e9}, "memory_bytes is 1000000000.0"),
        ({"memory_bytes": 1 << 20}, "too little"),
        ({"workers": 2}, "workers is 2, of type int; give Workers"),
        ({"is_checked": "yes"}, "is_checked is 'yes'"),
        ({"on_progress": 3}, "on_progress is 3"),
    ],
)
def test_a_bad_run_of_a_plan_writes_nothing(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    save(f"{tmp_path}/a", {"w": torch.ones(2)}, step=1)
    plan = titan_ckpt.plan_reshard(open_checkpoint(f"{tmp_path}/a"), MeshSpec.parse("dp_shard=2"))
    with pytest.raises(UsageError) as raised:
        titan_ckpt.run_plan(plan, f"{tmp_path}/b", **options)
    assert text in str(raised.value)
    assert not (tmp_path / "b").exists()


BOXES: list[Any] = [((0, 0), (1, 1)), (("a",), (1,)), ((0.0,), (2.0,)), ((0,), (-1,)), ((2,), (2,))]


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_a_box_outside_the_tensor_is_refused(box: tuple[Any, Any], tmp_path: Path) -> None:
    save(str(tmp_path / "run"), {"w": torch.arange(3.0)}, step=1)
    with pytest.raises(UsageError, match=r"w: Box.* is no box of this tensor; give offsets and sizes"):
        open_checkpoint(tmp_path / "run").read("w", Box(*box))


def test_wrong_arguments_of_functions_say_what_to_give(tmp_path: Path) -> None:
    save(str(tmp_path / "run"), {"w": torch.arange(3.0)}, step=1)
    wrong: Any = 3
    with pytest.raises(UsageError, match="allow: expected a list of classes"):
        LoadPolicy(allow=wrong)
    with pytest.raises(UsageError, match="rules is 3, of type int; give a sequence of placement rules"):
        titan_ckpt.reshard(tmp_path / "run", tmp_path / "other", "1", rules=wrong)
    with pytest.raises(UsageError, match="a name in storage_options is 3"):
        titan_ckpt.list_checkpoints("memory://zz", storage_options={wrong: 2})


@pytest.mark.parametrize(
    "assets",
    [{"../x": b"1"}, {"/abs": b"1"}, {"": b""}, {"x" * 300: b"1"}, {"a/b": b"2", "a": b"1"}, {"a\\b": b""}],
    ids=str,
)
def test_a_bad_name_of_an_asset_is_refused_first(assets: dict[str, bytes], tmp_path: Path) -> None:
    with titan_ckpt.Saver(tmp_path / "run") as saver, pytest.raises(SaveError, match="assets: "):
        saver.save_now({"w": torch.ones(3)}, step=5, assets=assets)
    assert not (tmp_path / "run" / "step-00000005").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["reshard", "memory://x", "memory://y", "--mesh", "tp=1", "--placements", "PIPE"],
        ["train", "PIPE", "--print-config"],
        ["ls", "memory://x", "--storage-option", "token=@PIPE"],
    ],
    ids=["placements", "config", "secret"],
)
def test_a_pipe_without_a_writer_is_not_waited_for(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "settings.toml"
    os.mkfifo(pipe)
    assert main([word.replace("PIPE", str(pipe)) for word in command]) == 2
    assert str(pipe) in capsys.readouterr().err


def test_what_comes_through_a_pipe_is_read_to_its_end() -> None:
    reader, writer = os.pipe()
    text = "x" * 200_000

    def write() -> None:
        with open(writer, "w", encoding="utf-8") as file:
            file.write(text)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert text_of_file(f"/dev/fd/{reader}", 1 << 20) == text
    finally:
        os.close(reader)
        thread.join()
