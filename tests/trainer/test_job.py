"""Multi-process training jobs: stops, signals, lost ranks, the mirror."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException

from tests.support.training_runs import (
    FREEZE,
    changed_weights,
    is_frozen,
    read_events,
    read_losses,
    train,
    train_arguments,
)
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.job.rank_process import attempt_store
from titan_ckpt.trainer.launch import launch as launching
from titan_ckpt.trainer.launch.launch import RanksFailedError, launch
from titan_ckpt.trainer.report.logs import run_folder
from tools.paths import DEBUG_CONFIG

LIMIT_S = 240.0


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
    return lambda: (folder / "logs" / "metrics.jsonl").exists() and step in read_losses(folder)


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
    job = _start(train_arguments(cache, tmp_path / "run", *sets), tmp_path)
    assert job.wait(LIMIT_S) == 0, (tmp_path / "stderr").read_text()
    assert f"[{who}]" in (tmp_path / "run" / "logs" / "rank_00001.log").read_text()
    assert train(cache, tmp_path / "one", *model, f"resume.from={tmp_path}/run@5") == 0
    whole, resumed = read_losses(tmp_path / "run"), read_losses(tmp_path / "one")
    assert resumed == pytest.approx({step: whole[step] for step in range(6, 11)}, rel=2e-4)


@pytest.mark.dist
def test_ranks_copy_every_commit_to_the_mirror_and_go_on_from_it(tmp_path: Path, cache: str) -> None:
    sets = ("mesh.dp_shard=2", f"save.mirror={tmp_path}/safe", "save.every=2", "log.trace_steps=[1, 2]")
    for steps in (4, 6):
        job = _start(train_arguments(cache, tmp_path / "fast", *sets, f"train.steps={steps}"), tmp_path)
        assert job.wait(LIMIT_S) == 0, (tmp_path / "stderr").read_text()
        assert open_checkpoint(str(tmp_path / "safe")).step == steps
        shutil.rmtree(tmp_path / "fast" / f"step-{steps:08d}")
    assert [record["step"] for record in read_events(tmp_path / "fast", "start")] == [0, 4]
    events = json.loads((tmp_path / "fast" / "logs" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}


def _pid(folder: Path, rank: int) -> int:
    sidecar = next((folder / "debug").glob(f"*/rank_{rank:05d}.sidecar.json"))
    return int(json.loads(sidecar.read_text())["pid"])


@pytest.mark.dist
def test_stopped_rank_is_noticed_within_the_step_timeout(tmp_path: Path, cache: str) -> None:
    limits = ("train.init_timeout_s=600.0", "train.step_timeout_s=2.0", "save.grace_s=0.1")
    job = _start(train_arguments(cache, tmp_path / "run", "mesh.dp_shard=2", "train.steps=100000", *limits), tmp_path)
    _wait_for(_has_step(tmp_path / "run", 3), job)
    os.kill(_pid(tmp_path / "run", 1), signal.SIGSTOP)
    assert job.wait(LIMIT_S) == 3
    error = (tmp_path / "stderr").read_text()
    assert "rank 0 failed: RuntimeError" in error
    assert "rank 1 did not answer: `titan-ckpt debug" in error


@pytest.mark.dist
def test_last_checkpoint_beyond_its_grace_is_an_error(tmp_path: Path, cache: str) -> None:
    sets = ("mesh.dp_shard=2", "train.steps=100000", "save.grace_s=0.5")
    job = _start(train_arguments(cache, tmp_path / "run", *sets), tmp_path)
    _wait_for(_has_step(tmp_path / "run", 3), job)
    os.kill(_pid(tmp_path / "run", 1), signal.SIGSTOP)
    job.send_signal(signal.SIGTERM)
    assert job.wait(LIMIT_S) == 3
    assert (
        "rank 0 was still running: SIGTERM and then save.grace_s = 0.5 s are over" in (tmp_path / "stderr").read_text()
    )


@pytest.mark.dist
def test_frozen_weights_stay_as_they_are_when_they_are_sharded(tmp_path: Path, cache: str) -> None:
    job = _start(train_arguments(cache, tmp_path / "run", "mesh.dp_shard=2", *FREEZE), tmp_path)
    assert job.wait(LIMIT_S) == 0, (tmp_path / "stderr").read_text()
    changed = changed_weights(tmp_path / "run")
    assert changed == {name: not is_frozen(name) for name in changed}


@pytest.mark.dist
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_commits_a_last_checkpoint_and_exits_130(signum: signal.Signals, tmp_path: Path, cache: str) -> None:
    job = _start(train_arguments(cache, tmp_path / "run", "mesh.dp_shard=2", "train.steps=100000"), tmp_path)
    _wait_for(_has_step(tmp_path / "run", 2), job)
    job.send_signal(signum)
    assert job.wait(LIMIT_S) == 130, (tmp_path / "stderr").read_text()
    last = max(read_losses(tmp_path / "run"))
    assert open_checkpoint(str(tmp_path / "run")).step == last
    assert (
        f"signal at step {last}; step {last} is committed" in (tmp_path / "run" / "logs" / "rank_00000.log").read_text()
    )
    assert f"stopped by {signum.name}" in (tmp_path / "stderr").read_text()


@pytest.mark.dist
def test_sigterm_while_training_starts_is_an_interrupt_too(tmp_path: Path, cache: str) -> None:
    module = tmp_path / "slow.py"
    module.write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'began')!r}).touch()\ntime.sleep({LIMIT_S})\n"
    )
    job = _start([*train_arguments(cache, tmp_path / "run"), "--module", str(module)], tmp_path)
    _wait_for((tmp_path / "began").exists, job)
    job.send_signal(signal.SIGTERM)
    assert job.wait(LIMIT_S) == 130, (tmp_path / "stderr").read_text()


@pytest.mark.dist
def test_rank_error_is_one_line_with_the_ranks_exit_code(tmp_path: Path, cache: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{broken\n')
    job = _start(
        train_arguments(cache, tmp_path / "run", "mesh.dp_shard=2", f"data.source={tmp_path}/bad.jsonl"), tmp_path
    )
    assert job.wait(LIMIT_S) == 3
    error = (tmp_path / "stderr").read_text()
    assert "bad.jsonl: line 2: not JSON" in error
    assert "Traceback" not in error
    assert error.count("titan-ckpt: error:") == 1


@pytest.mark.dist
def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path, cache: str) -> None:
    job = _start(train_arguments(cache, tmp_path / "run", "mesh.dp_shard=2", "train.steps=100000"), tmp_path)
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
    top = diagnose(open_run(str(tmp_path / "run")))[0]
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())
    assert "the launcher of this job" in top.headline


def _is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.dist
def test_a_killed_rank_is_named_and_not_the_one_that_noticed(tmp_path: Path, cache: str) -> None:
    job = _start(train_arguments(cache, tmp_path / "run", "mesh.dp_shard=2", "train.steps=100000"), tmp_path)
    _wait_for(_has_step(tmp_path / "run", 2), job)
    sidecar = next((tmp_path / "run" / "debug").glob("*/rank_00001.sidecar.json"))
    os.kill(json.loads(sidecar.read_text())["pid"], signal.SIGKILL)
    assert job.wait(LIMIT_S) == 3
    error = (tmp_path / "stderr").read_text()
    assert "rank 1 was killed by SIGKILL" in error
    assert "Traceback" not in error


@pytest.mark.dist
def test_restarted_ranks_find_each_other_and_go_on(tmp_path: Path, cache: str) -> None:
    """Both ranks are lost once; the errors of these attempts are not those of the last one, which is stopped."""
    run, sets = tmp_path / "run", ("mesh.dp_shard=2", "train.steps=100000", "save.every=2")
    job = _start([*train_arguments(cache, run, *sets), "--restarts", "2"], tmp_path)
    for attempt, lost in enumerate((1, 0)):
        _wait_for(_is_in_attempt(run, attempt), job)
        sidecar = max((run / "debug").glob(f"*/rank_{lost:05d}.sidecar.json"))
        os.kill(json.loads(sidecar.read_text())["pid"], signal.SIGKILL)
    _wait_for(_is_in_attempt(run, 2), job)
    job.terminate()
    assert job.wait(LIMIT_S) == 130, (tmp_path / "stderr").read_text()
    steps = [record["step"] for record in read_events(run, "step")]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))
    assert len(steps) - len(set(steps)) <= 2 * 2  # repeated: at most what was not yet saved, twice


def test_attempts_of_one_node_do_not_share_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "0", "WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    stores = []
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        store = attempt_store(timedelta(seconds=20))
        assert store is not None
        stores.append(store)
    stores[0].set("address", "old")
    assert not stores[1].check(["address"])
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert attempt_store(timedelta(seconds=20)) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert attempt_store(timedelta(seconds=20)) is None


def _is_in_attempt(run: Path, attempt: int) -> Callable[[], bool]:
    """Whether so many attempts came before this one, and it has saved a step of its own."""

    def condition() -> bool:
        if not (run / "logs" / "metrics.jsonl").exists():
            return False
        starts, steps = read_events(run, "start"), read_events(run, "step")
        own = [record["step"] for record in steps if record["time_s"] > starts[-1]["time_s"]] if starts else []
        return len(starts) == attempt + 1 and len(own) > 4

    return condition


@pytest.mark.dist
def test_torchrun_shows_a_ranks_error_in_its_summary(tmp_path: Path) -> None:
    """Each rank says one line and exits with its own code; torchrun has its own code, 1, and a traceback of its own."""
    job = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "-m",
        "titan_ckpt",
    ]
    command = [*job, "train", DEBUG_CONFIG, "--set", "train.stepz=3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    text = "unknown key train.stepz; did you mean 'train.steps'?"
    root_cause = done.stderr.partition("Root Cause")[2]
    assert re.search(r"exitcode\s*: 2 ", root_cause)
    assert text in root_cause
    said = [line for line in done.stderr.splitlines() if line.startswith("titan-ckpt: ")]
    assert said
    assert set(said) == {f"titan-ckpt: error: --set train.stepz: {text}"}
    assert done.stderr.count("Traceback") == 1


@pytest.mark.dist
def test_launch_leaves_its_callers_environment_as_it_was(tmp_path: Path) -> None:
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    environment, level = dict(os.environ), logger.level
    config = resolve(TrainConfig, DEBUG_CONFIG, []).config
    with pytest.raises(RanksFailedError):
        launch([DEBUG_CONFIG, "--set", "train.stepz=3"], config, run_folder(str(tmp_path), ""), nproc=2)
    assert dict(os.environ) == environment
    assert logger.level == level


def test_a_signal_within_a_timer_of_torch_is_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's `prof` fails in its `finally` where the signal comes before its first line."""

    def interrupted(*_: object) -> None:
        try:
            raise SignalException("got signal: 15", sigval=signal.SIGTERM)
        finally:
            raise UnboundLocalError("cannot access local variable 'start'")

    monkeypatch.setattr(launching, "elastic_launch", lambda *_: interrupted)
    config = resolve(TrainConfig, DEBUG_CONFIG, []).config
    assert launch([DEBUG_CONFIG], config, run_folder(str(tmp_path), ""), nproc=2) == 130
