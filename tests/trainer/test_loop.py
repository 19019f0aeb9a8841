"""Whole training runs: the files they write, how they resume, how they end."""

from __future__ import annotations

import gc
import io
import itertools
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.console import progress
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.model.decoder import ModelConfig
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.report.logs import RankLogging
from titan_ckpt.trainer.report.metrics import flops_per_token
from titan_ckpt.trainer.run.gc_at_steps import Collector
from titan_ckpt.trainer.run.stop_signals import StopRequest
from tools.paths import DEBUG_CONFIG

LIMIT_S = 120.0


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One tokenised standard library for all tests of this process."""
    return str(tmp_path_factory.getbasetemp() / "tokens")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread: threads that spin on a shared core slow down small steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _arguments(cache: str, url: object, *sets: str) -> list[str]:
    fixed = [f"data.cache={cache}", f"save.url={url}", "log.tensorboard=false", "train.device=cpu"]
    return ["train", DEBUG_CONFIG, *(part for text in [*fixed, *sets] for part in ("--set", text))]


def _train(cache: str, url: object, *sets: str) -> int:
    return main(_arguments(cache, url, *sets))


def _events(folder: Path, event: str = "step") -> list[dict[str, Any]]:
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def _losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in _events(folder)}


# ------------------------------------------------------------------------------------------------- one rank


def test_run_lowers_the_loss_and_writes_its_files(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path, "train.steps=25", "train.global_batch_size=8", "save.every=10") == 0
    losses = _losses(tmp_path)
    assert sorted(losses) == list(range(1, 26))
    assert losses[25] < losses[1] - 1.5
    assert [info.step for info in list_checkpoints(str(tmp_path)) if info.is_resumable] == [10, 20, 25]
    training = open_checkpoint(str(tmp_path)).manifest.training
    assert (training["step"], training["tokens_seen"], training["data"]["position"]) == (25, 25 * 8 * 64, 200)
    assert re.search(r"INFO \[rank 0\] .*step 25/25 ", (tmp_path / "logs" / "rank_00000.log").read_text())
    assert json.loads((tmp_path / "logs" / "config.json").read_text())["train"]["steps"] == 25
    record = _events(tmp_path)[-1]
    assert record["tokens_per_s"] > 0
    assert record["committed_step"] in (10, 20)
    assert record["mfu"] is None


def test_a_checkpoint_carries_config_pipeline_and_tokenizer(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path, "train.steps=1") == 0
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.manifest.config["model"]["dim"] == 64
    assert checkpoint.manifest.pipeline is not None
    assert checkpoint.manifest.pipeline["num_layers"] == 2
    assert json.loads(checkpoint.asset("tokenizer.json"))["model"]["type"] == "BPE"


def test_resumed_run_repeats_the_losses_bit_for_bit(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path / "whole", "save.every=4") == 0
    assert _train(cache, tmp_path / "resumed", f"resume.from={tmp_path}/whole@4") == 0
    whole, resumed = _losses(tmp_path / "whole"), _losses(tmp_path / "resumed")
    assert sorted(resumed) == [5, 6, 7, 8, 9, 10]
    assert resumed == {step: whole[step] for step in resumed}


def test_run_resumes_from_its_newest_committed_checkpoint(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path, "train.steps=4") == 0
    assert _train(cache, tmp_path, "train.steps=6") == 0
    assert [record["step"] for record in _events(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in _events(tmp_path, "start")] == [0, 4]


def test_old_checkpoints_are_deleted_as_the_policy_says(tmp_path: Path, cache: str) -> None:
    policy = ("save.every=1", "save.keep_last=2", "save.keep_every=4", "train.steps=7", "save.codec=planes-zstd")
    assert _train(cache, tmp_path, *policy) == 0
    assert [info.step for info in list_checkpoints(str(tmp_path))] == [4, 6, 7]


def test_a_finished_run_started_again_does_nothing(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path, "train.steps=2") == 0
    assert _train(cache, tmp_path, "train.steps=2") == 0
    assert [record["step"] for record in _events(tmp_path)] == [1, 2]


def test_model_only_takes_the_weights_and_begins_at_step_0(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path / "first", "train.steps=20", "train.global_batch_size=8") == 0
    again = (f"resume.from={tmp_path}/first", "resume.model_only=true", "train.steps=2", "train.seed=5")
    assert _train(cache, tmp_path / "second", *again) == 0
    assert _losses(tmp_path / "second")[1] < _losses(tmp_path / "first")[1] - 1.0


def test_another_model_is_refused_even_where_all_shapes_agree(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(cache, tmp_path, "train.steps=1") == 0
    capsys.readouterr()
    assert _train(cache, tmp_path, "train.steps=2", "model.rope_theta=50000.0") == 2
    assert "rope_theta: checkpoint 10000.0, config 50000.0" in capsys.readouterr().err


def test_other_data_are_refused_unless_allowed(tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.txt").write_text("another text " * 1000)
    assert _train(cache, tmp_path / "run", "train.steps=1") == 0
    other = ("train.steps=2", f"data.source={tmp_path}/other.txt")
    assert _train(cache, tmp_path / "run", *other) == 3
    assert "was trained on other data" in capsys.readouterr().err
    assert _train(cache, tmp_path / "run", *other, "resume.other_data=true") == 0


def test_a_gradient_that_is_not_finite_stops_before_the_update(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(cache, tmp_path, "optimizer.lr=1e30", "optimizer.warmup_steps=0", "save.every=1") == 3
    error = capsys.readouterr().err
    assert re.search(r"error: step \d: the gradient norm is (nan|inf)", error)
    assert "the last checkpoint is of step" in error
    assert "Traceback" in (tmp_path / "logs" / "rank_00000.log").read_text()


@pytest.fixture
def bad_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the gradient of the n-th step from now infinite."""

    def arrange(number: int) -> None:
        true_norm, calls = Parallelized.clip_grad_norm, itertools.count(1)

        def norm(self: Parallelized, max_norm: float) -> torch.Tensor:
            found = true_norm(self, max_norm)
            return torch.tensor(math.inf) if next(calls) == number else found

        monkeypatch.setattr(Parallelized, "clip_grad_norm", norm)

    return arrange


def test_skipped_steps_are_counted_across_restarts(tmp_path: Path, cache: str, bad_step: Callable[[int], None]) -> None:
    bad_step(2)
    assert _train(cache, tmp_path, "optimizer.not_finite=skip", "train.steps=3", "save.every=1") == 0
    assert [record["skipped_steps"] for record in _events(tmp_path)] == [0, 1, 1]
    assert _changed_between(tmp_path, 1, 2) == []
    assert _changed_between(tmp_path, 2, 3) != []
    assert _train(cache, tmp_path, "optimizer.not_finite=skip", "train.steps=4") == 0
    assert _events(tmp_path)[-1]["skipped_steps"] == 1


def test_too_many_steps_left_out_in_a_row_end_the_run(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    skip = ("optimizer.not_finite=skip", "optimizer.max_skipped=2", "train.steps=20")
    assert _train(cache, tmp_path, "optimizer.lr=1e30", "optimizer.warmup_steps=0", *skip) == 3
    error = capsys.readouterr().err
    assert re.search(
        r"error: step \d+: the gradient norm is (nan|inf); samples \d+ and following, 2 steps before it too", error
    )
    assert _events(tmp_path)[-1]["skipped_steps"] == 2


def test_documents_that_do_not_see_each_other_are_another_loss(tmp_path: Path, cache: str) -> None:
    (tmp_path / "data").mkdir()
    for number in range(300):
        (tmp_path / "data" / f"{number}.txt").write_text(f"file {number} " * 3)
    sets = (f"data.source={tmp_path}/data", "train.steps=2", "data.seq_len=128")
    assert _train(cache, tmp_path / "seen", *sets) == 0
    assert _train(cache, tmp_path / "hidden", *sets, "data.document_masks=true") == 0
    seen, hidden = _losses(tmp_path / "seen"), _losses(tmp_path / "hidden")
    assert seen[1] != hidden[1]
    assert seen == pytest.approx(hidden, rel=0.05)


def test_changed_settings_are_told_when_a_run_goes_on(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path, "train.steps=2") == 0
    assert _train(cache, tmp_path, "train.steps=4", "optimizer.schedule=linear", "optimizer.lr=1e-3") == 0
    log_text = (tmp_path / "logs" / "rank_00000.log").read_text()
    assert "optimizer.lr: 0.003 -> 0.001, optimizer.schedule: cosine -> linear, train.steps: 2 -> 4" in log_text
    assert _events(tmp_path)[-1]["lr"] == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5))


def test_what_is_late_after_its_grace_is_told_what_ran_out() -> None:
    told: list[str] = []
    late = threading.Event()

    def end(what: str) -> None:
        told.append(what)
        late.set()

    with StopRequest(grace_s=0.01, on_late=end) as stop:
        stop.request(signal.SIGTERM)
        assert late.wait(LIMIT_S)
    with StopRequest(max_seconds=0.01, grace_s=0.01, on_late=end):
        late.clear()
        assert late.wait(LIMIT_S)
    assert told == ["SIGTERM and then save.grace_s = 0.01", "train.max_seconds = 0.01 and then save.grace_s = 0.01"]


def test_garbage_is_collected_at_chosen_steps_only() -> None:
    class Ring:
        def __init__(self) -> None:
            self.me = self

    with Collector(3) as collector:
        assert not gc.isenabled()
        gone = weakref.ref(Ring())
        collector.after(2)
        assert gone() is not None
        collector.after(3)
        assert gone() is None
    assert gc.isenabled()
    with Collector(0):
        assert gc.isenabled()


def test_held_out_loss_is_measured_at_intervals(tmp_path: Path, cache: str) -> None:
    validation = ("validation.every=5", "validation.fraction=0.01", "validation.samples=6")
    assert _train(cache, tmp_path, *validation, "train.microbatch_size=4") == 0
    events = _events(tmp_path, "validation")
    assert [record["step"] for record in events] == [5, 10]
    assert events[1]["loss"] < events[0]["loss"] < 6.0
    assert events[0]["tokens"] == 6 * 64


def test_a_time_limit_saves_and_exits_cleanly(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path, "train.max_seconds=0.001") == 0
    assert open_checkpoint(str(tmp_path)).step == 1
    assert _events(tmp_path, "end")[0]["reason"] == "time limit"


def test_remote_runs_logs_are_uploaded_and_fetched_again(tmp_path: Path, cache: str) -> None:
    url = f"memory://{tmp_path.name}"
    assert _train(cache, url, "train.steps=2", f"log.folder={tmp_path}/here") == 0
    store = open_store(url)
    assert b"step 2/2" not in store.read("logs/config.json")
    assert b"completed at step 2" in store.read("logs/rank_00000.log")
    assert _train(cache, url, "train.steps=3", f"log.folder={tmp_path}/there") == 0
    assert sorted(_losses(tmp_path / "there")) == [1, 2, 3]


def test_tensorboard_gets_every_number_of_a_step(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path, "train.steps=2", "log.tensorboard=true") == 0
    (file,) = (tmp_path / "tensorboard").iterdir()
    data = file.read_bytes()
    assert b"step/loss" in data
    assert b"step/tokens_per_s" in data


def test_records_at_intervals_account_for_every_step(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path, "train.steps=7", "log.every=3") == 0
    assert [(record["step"], record["steps"]) for record in _events(tmp_path)] == [(3, 3), (6, 3), (7, 1)]


def test_phases_of_chosen_steps_are_traced(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path, "train.steps=5", "save.every=3", "log.trace_steps=[3, 4]") == 0
    events = json.loads((tmp_path / "logs" / "trace.json").read_text())["traceEvents"]
    spans = {(event["name"], event["args"]["step"]) for event in events if event["ph"] == "X"}
    assert {("data", 3), ("forward_backward", 4), ("optimizer", 4), ("ckpt_stage", 3), ("ckpt_upload", 3)} <= spans
    assert {step for _, step in spans} == {3, 4}


def test_run_resumes_from_the_mirror_when_its_url_is_lost(tmp_path: Path, cache: str) -> None:
    tiers = (f"save.mirror={tmp_path}/safe", "save.every=2", "train.steps=5")
    assert _train(cache, tmp_path / "fast", *tiers) == 0
    assert [info.step for info in list_checkpoints(str(tmp_path / "safe"))] == [2, 4, 5]
    shutil.rmtree(tmp_path / "fast")
    assert _train(cache, tmp_path / "fast", *tiers, "train.steps=7") == 0
    assert [record["step"] for record in _events(tmp_path / "fast")] == [1, 2, 3, 4, 5, 6, 7]
    assert [record["step"] for record in _events(tmp_path / "fast", "start")] == [0, 5]
    assert open_checkpoint(str(tmp_path / "safe")).step == 7


def test_two_tiers_that_are_one_are_refused(tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(cache, tmp_path, f"save.mirror={tmp_path}") == 2
    assert "is save.url itself" in capsys.readouterr().err


def test_a_run_does_not_begin_anew_because_a_tier_cannot_be_read(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = (f"save.mirror={tmp_path}/safe", "train.steps=2")
    assert _train(cache, tmp_path / "fast", *tiers) == 0
    for url in (tmp_path / "fast", tmp_path / "safe"):
        next(url.glob("*/COMMIT.json")).write_text("{damaged")
    capsys.readouterr()
    assert _train(cache, tmp_path / "fast", *tiers) != 0
    assert "COMMIT.json" in capsys.readouterr().err


def test_chosen_steps_are_profiled(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path, "train.steps=3", "log.profile_steps=[2, 2]") == 0
    events = json.loads((tmp_path / "logs" / "profile_00000.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


@pytest.mark.parametrize(
    ("sets", "code", "said"),
    [
        (("log.profile_steps=[3, 2]",), 2, "log.profile_steps = [3, 2]"),
        (("log.memory_steps=[1, 2]",), 2, "this run is on cpu"),
    ],
)
def test_what_cannot_be_inspected_is_refused(
    sets: tuple[str, ...], code: int, said: str, tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(cache, tmp_path, *sets) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("library", "setting"), [("wandb", "log.wandb=project"), ("datasets", "data.source=datasets:a/b")]
)
def test_missing_library_error_shows_the_pip_command(
    library: str, setting: str, tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, library, None)
    assert _train(cache, tmp_path, setting) == 2
    assert f"pip install 'titan-ckpt[{library}]'" in capsys.readouterr().err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_stays_below_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    console, mesh = _Terminal(), MeshSpec.parse("dp_shard=2")
    with RankLogging(str(tmp_path / "log"), rank=0, mesh=mesh, console=console, has_bar=True) as logging_:
        assert logging_.bar is not None
        logging_.bar.show(1, 4)
        logging.getLogger("titan_ckpt").info("a line")
        logging_.bar.show(3, 4)
    first, rest = console.getvalue().split("a line\n")
    assert "1/4" in first
    assert "1/4" in rest
    assert rest.index("1/4") < rest.index("3/4")
    assert "\n" not in first
    assert console.getvalue().endswith("\x1b[2K")
    with RankLogging(str(tmp_path / "log1"), rank=1, mesh=mesh, console=console, has_bar=True) as other:
        assert other.bar is None


def _changed_between(url: Path, first: int, last: int) -> list[str]:
    """The weights that differ."""
    before, after = (open_checkpoint(str(url), step=step) for step in (first, last))
    names = [tensor.fqn for tensor in before.manifest.tensors if tensor.fqn.startswith("model.")]
    return [name for name in names if not torch.equal(before.read(name), after.read(name))]


def _changed(url: Path) -> dict[str, bool]:
    """Whether each weight differs between steps 1 and 3."""
    first, last = (open_checkpoint(str(url), step=step) for step in (1, 3))
    names = [tensor.fqn for tensor in first.manifest.tensors if tensor.fqn.startswith("model.")]
    return {name: not torch.equal(first.read(name), last.read(name)) for name in names}


def _is_frozen(name: str) -> bool:
    return ".layers.0." in name or "embed_tokens" in name


FREEZE = ('train.freeze=["model.layers.0.*", "*embed_tokens*"]', "train.steps=3", "save.every=1")


def test_frozen_weights_stay_as_they_are(tmp_path: Path, cache: str) -> None:
    assert _train(cache, tmp_path, *FREEZE) == 0
    changed = _changed(tmp_path)
    assert changed == {name: not _is_frozen(name) for name in changed}


def test_a_freeze_that_matches_nothing_is_refused(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(cache, tmp_path, 'train.freeze=["model.layer.0.*"]') == 2
    assert "'model.layer.0.*' matches no weight" in capsys.readouterr().err


def test_uneven_microbatches_change_only_rounding(tmp_path: Path, cache: str) -> None:
    for size in (1, 3):
        assert _train(cache, tmp_path / str(size), f"train.microbatch_size={size}", "train.steps=5") == 0
    assert _losses(tmp_path / "1") == pytest.approx(_losses(tmp_path / "3"), abs=1e-4)


def test_flops_count_six_per_multiplied_weight_and_attention() -> None:
    model = ModelConfig(vocab_size=10, dim=4, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=8)
    weights = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8 + 10 * 4
    assert flops_per_token(model, seq_len=16) == 6 * weights + 12 * 4 * 16


# -------------------------------------------------------------------------------------------- several ranks


def _start(arguments: list[str], tmp_path: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(tmp_path / "stderr", "w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "titan_ckpt", *arguments], stderr=errors, stdout=errors, text=True, env=environment
        )


def _wait_for(condition: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    give_up_at = time.monotonic() + LIMIT_S
    while not condition():
        assert job.poll() is None, "the job ended too early"
        assert time.monotonic() < give_up_at, "the job did not come so far"
        time.sleep(0.05)


def _has_step(folder: Path, step: int) -> Callable[[], bool]:
    return lambda: (folder / "logs" / "metrics.jsonl").exists() and step in _losses(folder)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mesh", "model", "who"),
    [
        (("mesh.dp_shard=2",), (), "rank 1 dp_shard1"),
        (("mesh.pp=2", "mesh.dp_shard=1", "train.microbatch_size=2"), ("model.tied_embeddings=true",), "rank 1 pp1"),
    ],
    ids=["fsdp", "pipeline with tied embeddings"],
)
def test_two_ranks_train_save_and_go_on_as_one(
    mesh: tuple[str, ...], model: tuple[str, ...], who: str, tmp_path: Path, cache: str
) -> None:
    sets = (*mesh, *model, "train.steps=10", "save.every=5", "train.step_timeout_s=60.0")
    job = _start(_arguments(cache, tmp_path / "run", *sets), tmp_path)
    assert job.wait(LIMIT_S) == 0, (tmp_path / "stderr").read_text()
    assert f"[{who}]" in (tmp_path / "run" / "logs" / "rank_00001.log").read_text()
    assert _train(cache, tmp_path / "one", *model, f"resume.from={tmp_path}/run@5") == 0
    whole, resumed = _losses(tmp_path / "run"), _losses(tmp_path / "one")
    assert resumed == pytest.approx({step: whole[step] for step in range(6, 11)}, rel=2e-4)


@pytest.mark.dist
def test_ranks_copy_every_commit_to_the_mirror_and_go_on_from_it(tmp_path: Path, cache: str) -> None:
    sets = ("mesh.dp_shard=2", f"save.mirror={tmp_path}/safe", "save.every=2", "log.trace_steps=[1, 2]")
    for steps in (4, 6):
        job = _start(_arguments(cache, tmp_path / "fast", *sets, f"train.steps={steps}"), tmp_path)
        assert job.wait(LIMIT_S) == 0, (tmp_path / "stderr").read_text()
        assert open_checkpoint(str(tmp_path / "safe")).step == steps
        shutil.rmtree(tmp_path / "fast" / f"step-{steps:08d}")
    assert [record["step"] for record in _events(tmp_path / "fast", "start")] == [0, 4]
    events = json.loads((tmp_path / "fast" / "logs" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}


def _pid(folder: Path, rank: int) -> int:
    sidecar = next((folder / "debug").glob(f"*/rank_{rank:05d}.sidecar.json"))
    return int(json.loads(sidecar.read_text())["pid"])


@pytest.mark.dist
def test_stopped_rank_is_noticed_within_the_step_timeout(tmp_path: Path, cache: str) -> None:
    limits = ("train.init_timeout_s=600.0", "train.step_timeout_s=2.0", "save.grace_s=0.1")
    job = _start(_arguments(cache, tmp_path / "run", "mesh.dp_shard=2", "train.steps=100000", *limits), tmp_path)
    _wait_for(_has_step(tmp_path / "run", 3), job)
    os.kill(_pid(tmp_path / "run", 1), signal.SIGSTOP)
    assert job.wait(LIMIT_S) == 3
    error = (tmp_path / "stderr").read_text()
    assert "rank 0 failed: RuntimeError" in error
    assert "rank 1 did not answer: `titan-ckpt debug" in error


@pytest.mark.dist
def test_last_checkpoint_beyond_its_grace_is_an_error(tmp_path: Path, cache: str) -> None:
    sets = ("mesh.dp_shard=2", "train.steps=100000", "save.grace_s=0.5")
    job = _start(_arguments(cache, tmp_path / "run", *sets), tmp_path)
    _wait_for(_has_step(tmp_path / "run", 3), job)
    os.kill(_pid(tmp_path / "run", 1), signal.SIGSTOP)
    job.send_signal(signal.SIGTERM)
    assert job.wait(LIMIT_S) == 3
    assert (
        "rank 0 was still running: SIGTERM and then save.grace_s = 0.5 s are over" in (tmp_path / "stderr").read_text()
    )


@pytest.mark.dist
def test_frozen_weights_stay_as_they_are_when_they_are_sharded(tmp_path: Path, cache: str) -> None:
    job = _start(_arguments(cache, tmp_path / "run", "mesh.dp_shard=2", *FREEZE), tmp_path)
    assert job.wait(LIMIT_S) == 0, (tmp_path / "stderr").read_text()
    changed = _changed(tmp_path / "run")
    assert changed == {name: not _is_frozen(name) for name in changed}


@pytest.mark.dist
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_commits_a_last_checkpoint_and_exits_130(signum: signal.Signals, tmp_path: Path, cache: str) -> None:
    job = _start(_arguments(cache, tmp_path / "run", "mesh.dp_shard=2", "train.steps=100000"), tmp_path)
    _wait_for(_has_step(tmp_path / "run", 2), job)
    job.send_signal(signum)
    assert job.wait(LIMIT_S) == 130, (tmp_path / "stderr").read_text()
    last = max(_losses(tmp_path / "run"))
    assert open_checkpoint(str(tmp_path / "run")).step == last
    assert (
        f"signal at step {last}; step {last} is committed" in (tmp_path / "run" / "logs" / "rank_00000.log").read_text()
    )
    assert f"stopped by {signum.name}" in (tmp_path / "stderr").read_text()


@pytest.mark.dist
def test_rank_error_is_one_line_with_the_ranks_exit_code(tmp_path: Path, cache: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{broken\n')
    job = _start(_arguments(cache, tmp_path / "run", "mesh.dp_shard=2", f"data.source={tmp_path}/bad.jsonl"), tmp_path)
    assert job.wait(LIMIT_S) == 3
    error = (tmp_path / "stderr").read_text()
    assert "bad.jsonl: line 2: not JSON" in error
    assert "Traceback" not in error
    assert error.count("titan-ckpt: error:") == 1


@pytest.mark.dist
def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path, cache: str) -> None:
    job = _start(_arguments(cache, tmp_path / "run", "mesh.dp_shard=2", "train.steps=100000"), tmp_path)
    _wait_for(_has_step(tmp_path / "run", 2), job)
    sidecars = list((tmp_path / "run" / "debug").glob("*/rank_*.sidecar.json"))
    pids = [json.loads(sidecar.read_text())["pid"] for sidecar in sidecars]
    assert len(pids) == 2
    job.kill()
    job.wait(LIMIT_S)
    give_up_at = time.monotonic() + LIMIT_S
    while any(map(_is_running, pids)):
        assert time.monotonic() < give_up_at, "a rank is still there"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.dist
def test_a_killed_rank_is_named_and_not_the_one_that_noticed(tmp_path: Path, cache: str) -> None:
    job = _start(_arguments(cache, tmp_path / "run", "mesh.dp_shard=2", "train.steps=100000"), tmp_path)
    _wait_for(_has_step(tmp_path / "run", 2), job)
    sidecar = next((tmp_path / "run" / "debug").glob("*/rank_00001.sidecar.json"))
    os.kill(json.loads(sidecar.read_text())["pid"], signal.SIGKILL)
    assert job.wait(LIMIT_S) == 3
    error = (tmp_path / "stderr").read_text()
    assert "rank 1 was killed by SIGKILL" in error
    assert "Traceback" not in error
