"""Complete training runs: the files they write, how they resume, how they end."""

from __future__ import annotations

import gc
import io
import itertools
import json
import logging
import math
import re
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.training_runs import (
    FREEZE,
    changed_between,
    changed_weights,
    is_frozen,
    read_events,
    read_losses,
    train,
)
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.console import progress
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.job.rank_process import Collector
from titan_ckpt.trainer.job.stop_signals import StopRequest
from titan_ckpt.trainer.model.decoder import ModelConfig, flops_per_token
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.report.logs import RankLogging

LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread: threads that spin on a shared core slow down small steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_run_lowers_the_loss_and_writes_its_files(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path, "train.steps=25", "train.global_batch_size=8", "save.every=10") == 0
    losses = read_losses(tmp_path)
    assert sorted(losses) == list(range(1, 26))
    assert losses[25] < losses[1] - 1.5
    assert [info.step for info in list_checkpoints(str(tmp_path)) if info.is_resumable] == [10, 20, 25]
    training = open_checkpoint(str(tmp_path)).manifest.training
    assert (training["step"], training["tokens_seen"], training["data"]["position"]) == (25, 25 * 8 * 64, 200)
    assert re.search(r"INFO \[rank 0\] .*step 25/25 ", (tmp_path / "logs" / "rank_00000.log").read_text())
    assert json.loads((tmp_path / "logs" / "config.json").read_text())["train"]["steps"] == 25
    record = read_events(tmp_path)[-1]
    assert record["tokens_per_s"] > 0
    assert record["committed_step"] in (10, 20)
    assert record["mfu"] is None


def test_a_checkpoint_carries_config_pipeline_and_tokenizer(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path, "train.steps=1") == 0
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.manifest.config["model"]["dim"] == 64
    assert checkpoint.manifest.pipeline is not None
    assert checkpoint.manifest.pipeline["num_layers"] == 2
    assert json.loads(checkpoint.asset("tokenizer.json"))["model"]["type"] == "BPE"


def test_resumed_run_repeats_the_losses_bit_for_bit(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path / "whole", "save.every=4") == 0
    assert train(cache, tmp_path / "resumed", f"resume.from={tmp_path}/whole@4") == 0
    whole, resumed = read_losses(tmp_path / "whole"), read_losses(tmp_path / "resumed")
    assert sorted(resumed) == [5, 6, 7, 8, 9, 10]
    assert resumed == {step: whole[step] for step in resumed}


def test_run_resumes_from_its_newest_committed_checkpoint(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path, "train.steps=4") == 0
    assert train(cache, tmp_path, "train.steps=6") == 0
    assert [record["step"] for record in read_events(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in read_events(tmp_path, "start")] == [0, 4]


def test_policy_decides_which_old_checkpoints_are_deleted(tmp_path: Path, cache: str) -> None:
    policy = ("save.every=1", "save.keep_last=2", "save.keep_every=4", "train.steps=7", "save.codec=planes-zstd")
    assert train(cache, tmp_path, *policy) == 0
    assert [info.step for info in list_checkpoints(str(tmp_path))] == [4, 6, 7]


def test_a_finished_run_started_again_does_nothing(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path, "train.steps=2") == 0
    assert train(cache, tmp_path, "train.steps=2") == 0
    assert [record["step"] for record in read_events(tmp_path)] == [1, 2]


def test_model_only_takes_the_weights_and_begins_at_step_0(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path / "first", "train.steps=20", "train.global_batch_size=8") == 0
    again = (f"resume.from={tmp_path}/first", "resume.model_only=true", "train.steps=2", "train.seed=5")
    assert train(cache, tmp_path / "second", *again) == 0
    assert read_losses(tmp_path / "second")[1] < read_losses(tmp_path / "first")[1] - 1.0


def test_another_model_is_refused_even_where_all_shapes_agree(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(cache, tmp_path, "train.steps=1") == 0
    capsys.readouterr()
    assert train(cache, tmp_path, "train.steps=2", "model.rope_theta=50000.0") == 2
    assert "rope_theta: checkpoint 10000.0, config 50000.0" in capsys.readouterr().err


def test_other_data_are_refused_unless_allowed(tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.txt").write_text("another text " * 1000)
    assert train(cache, tmp_path / "run", "train.steps=1") == 0
    other = ("train.steps=2", f"data.source={tmp_path}/other.txt")
    assert train(cache, tmp_path / "run", *other) == 3
    assert "was trained on other data" in capsys.readouterr().err
    assert train(cache, tmp_path / "run", *other, "resume.other_data=true") == 0


def test_a_gradient_that_is_not_finite_stops_before_the_update(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(cache, tmp_path, "optimizer.lr=1e30", "optimizer.warmup_steps=0", "save.every=1") == 3
    error = capsys.readouterr().err
    assert re.search(r"error: step \d: the gradient norm is (nan|inf)", error)
    assert "the last checkpoint is of step" in error
    assert "Traceback" in (tmp_path / "logs" / "rank_00000.log").read_text()


@pytest.fixture
def bad_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the gradient of the n-th step from now infinite."""

    def arrange(number: int) -> None:
        true_norm, calls = Parallelized.clip_grad_norm, itertools.count(1)

        def norm(self: Parallelized, max_norm: float, *, dropped: torch.Tensor | None = None) -> torch.Tensor:
            found = true_norm(self, max_norm, dropped=dropped)
            return torch.tensor(math.inf) if next(calls) == number else found

        monkeypatch.setattr(Parallelized, "clip_grad_norm", norm)

    return arrange


def test_skipped_steps_are_counted_across_restarts(tmp_path: Path, cache: str, bad_step: Callable[[int], None]) -> None:
    bad_step(2)
    assert train(cache, tmp_path, "optimizer.not_finite=skip", "train.steps=3", "save.every=1") == 0
    assert [record["skipped_steps"] for record in read_events(tmp_path)] == [0, 1, 1]
    assert changed_between(tmp_path, 1, 2) == []
    assert changed_between(tmp_path, 2, 3) != []
    assert train(cache, tmp_path, "optimizer.not_finite=skip", "train.steps=4") == 0
    assert read_events(tmp_path)[-1]["skipped_steps"] == 1


def test_too_many_steps_left_out_in_a_row_end_the_run(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    skip = ("optimizer.not_finite=skip", "optimizer.max_skipped=2", "train.steps=20")
    assert train(cache, tmp_path, "optimizer.lr=1e30", "optimizer.warmup_steps=0", *skip) == 3
    error = capsys.readouterr().err
    assert re.search(
        r"error: step \d+: the gradient norm is (nan|inf); samples \d+ and following, 2 steps before it too", error
    )
    assert read_events(tmp_path)[-1]["skipped_steps"] == 2


def test_documents_that_do_not_see_each_other_are_another_loss(tmp_path: Path, cache: str) -> None:
    (tmp_path / "data").mkdir()
    for number in range(300):
        (tmp_path / "data" / f"{number}.txt").write_text(f"file {number} " * 3)
    sets = (f"data.source={tmp_path}/data", "train.steps=2", "data.seq_len=128")
    assert train(cache, tmp_path / "seen", *sets) == 0
    assert train(cache, tmp_path / "hidden", *sets, "data.document_masks=true") == 0
    seen, hidden = read_losses(tmp_path / "seen"), read_losses(tmp_path / "hidden")
    assert seen[1] != hidden[1]
    assert seen == pytest.approx(hidden, rel=0.05)


def test_resumed_run_logs_its_changed_settings(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path, "train.steps=2") == 0
    assert train(cache, tmp_path, "train.steps=4", "optimizer.schedule=linear", "optimizer.lr=1e-3") == 0
    log_text = (tmp_path / "logs" / "rank_00000.log").read_text()
    assert "optimizer.lr: 0.003 -> 0.001, optimizer.schedule: cosine -> linear, train.steps: 2 -> 4" in log_text
    assert read_events(tmp_path)[-1]["lr"] == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5))


def test_late_stop_reports_which_limit_ran_out() -> None:
    reported: list[str] = []
    late = threading.Event()

    def end(what: str) -> None:
        reported.append(what)
        late.set()

    with StopRequest(grace_s=0.01, on_late=end) as stop:
        stop.request(signal.SIGTERM)
        assert late.wait(LIMIT_S)
    with StopRequest(max_seconds=0.01, grace_s=0.01, on_late=end):
        late.clear()
        assert late.wait(LIMIT_S)
    assert reported == ["SIGTERM and then save.grace_s = 0.01", "train.max_seconds = 0.01 and then save.grace_s = 0.01"]


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
    assert train(cache, tmp_path, *validation, "train.microbatch_size=4") == 0
    events = read_events(tmp_path, "validation")
    assert [record["step"] for record in events] == [5, 10]
    assert events[1]["loss"] < events[0]["loss"] < 6.0
    assert events[0]["tokens"] == 6 * 64


def test_a_time_limit_saves_and_exits_cleanly(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path, "train.max_seconds=0.001") == 0
    assert open_checkpoint(str(tmp_path)).step == 1
    assert read_events(tmp_path, "end")[0]["reason"] == "time limit"


def test_remote_runs_logs_are_uploaded_and_fetched_again(tmp_path: Path, cache: str) -> None:
    url = f"memory://{tmp_path.name}"
    assert train(cache, url, "train.steps=2", f"log.folder={tmp_path}/here") == 0
    store = open_store(url)
    assert b"step 2/2" not in store.read("logs/config.json")
    assert b"completed at step 2" in store.read("logs/rank_00000.log")
    assert train(cache, url, "train.steps=3", f"log.folder={tmp_path}/there") == 0
    assert sorted(read_losses(tmp_path / "there")) == [1, 2, 3]


def test_tensorboard_gets_every_number_of_a_step(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path, "train.steps=2", "log.tensorboard=true") == 0
    (file,) = (tmp_path / "tensorboard").iterdir()
    data = file.read_bytes()
    assert b"step/loss" in data
    assert b"step/tokens_per_s" in data


def test_records_at_intervals_account_for_every_step(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path, "train.steps=7", "log.every=3") == 0
    assert [(record["step"], record["steps"]) for record in read_events(tmp_path)] == [(3, 3), (6, 3), (7, 1)]


def test_phases_of_chosen_steps_are_traced(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path, "train.steps=5", "save.every=3", "log.trace_steps=[3, 4]") == 0
    events = json.loads((tmp_path / "logs" / "trace.json").read_text())["traceEvents"]
    spans = {(event["name"], event["args"]["step"]) for event in events if event["ph"] == "X"}
    assert {("data", 3), ("forward_backward", 4), ("optimizer", 4), ("ckpt_stage", 3), ("ckpt_upload", 3)} <= spans
    assert {step for _, step in spans} == {3, 4}


def test_run_resumes_from_the_mirror_when_its_url_is_lost(tmp_path: Path, cache: str) -> None:
    tiers = (f"save.mirror={tmp_path}/safe", "save.every=2", "train.steps=5")
    assert train(cache, tmp_path / "fast", *tiers) == 0
    assert [info.step for info in list_checkpoints(str(tmp_path / "safe"))] == [2, 4, 5]
    shutil.rmtree(tmp_path / "fast")
    assert train(cache, tmp_path / "fast", *tiers, "train.steps=7") == 0
    assert [record["step"] for record in read_events(tmp_path / "fast")] == [1, 2, 3, 4, 5, 6, 7]
    assert [record["step"] for record in read_events(tmp_path / "fast", "start")] == [0, 5]
    assert open_checkpoint(str(tmp_path / "safe")).step == 7


def test_two_tiers_that_are_one_are_refused(tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(cache, tmp_path, f"save.mirror={tmp_path}") == 2
    assert "is save.url itself" in capsys.readouterr().err


def test_a_run_does_not_begin_anew_because_a_tier_cannot_be_read(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = (f"save.mirror={tmp_path}/safe", "train.steps=2")
    assert train(cache, tmp_path / "fast", *tiers) == 0
    for url in (tmp_path / "fast", tmp_path / "safe"):
        next(url.glob("*/COMMIT.json")).write_text("{damaged")
    capsys.readouterr()
    assert train(cache, tmp_path / "fast", *tiers) != 0
    assert "COMMIT.json" in capsys.readouterr().err


def test_chosen_steps_are_profiled(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path, "train.steps=3", "log.profile_steps=[2, 2]") == 0
    events = json.loads((tmp_path / "logs" / "profile_00000.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::silu" for event in events)


@pytest.mark.parametrize(
    ("sets", "code", "message"),
    [
        (("log.profile_steps=[3, 2]",), 2, "log.profile_steps = [3, 2]"),
        (("log.memory_steps=[1, 2]",), 2, "this run is on cpu"),
    ],
)
def test_what_cannot_be_inspected_is_refused(
    sets: tuple[str, ...], code: int, message: str, tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(cache, tmp_path, *sets) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("library", "setting"), [("wandb", "log.wandb=project"), ("datasets", "data.source=datasets:a/b")]
)
def test_missing_library_error_shows_the_pip_command(
    library: str, setting: str, tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, library, None)
    assert train(cache, tmp_path, setting) == 2
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


def test_frozen_weights_stay_as_they_are(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path, *FREEZE) == 0
    changed = changed_weights(tmp_path)
    assert changed == {name: not is_frozen(name) for name in changed}


def test_a_freeze_that_matches_nothing_is_refused(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(cache, tmp_path, 'train.freeze=["model.layer.0.*"]') == 2
    assert "'model.layer.0.*' matches no weight" in capsys.readouterr().err


def test_uneven_microbatches_change_only_rounding(tmp_path: Path, cache: str) -> None:
    for size in (1, 3):
        assert train(cache, tmp_path / str(size), f"train.microbatch_size={size}", "train.steps=5") == 0
    assert read_losses(tmp_path / "1") == pytest.approx(read_losses(tmp_path / "3"), abs=1e-4)


def test_flops_count_six_per_multiplied_weight_and_attention() -> None:
    model = ModelConfig(vocab_size=10, dim=4, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=8)
    weights = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8 + 10 * 4
    assert flops_per_token(model, seq_len=16) == 6 * weights + 12 * 4 * 16


# -------------------------------------------------------------------------------------------- several ranks
