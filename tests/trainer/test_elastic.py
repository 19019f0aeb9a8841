"""A job on two elastic agents over loopback: it survives the loss of one agent and readmits it on return."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import held_hooks
from titan_ckpt.cli.main import main
from tools.paths import DEBUG_CONFIG

LIMIT_S = 240.0
EVERY, STEPS = 5, 24
SETS = (
    f"train.steps={STEPS}", "train.global_batch_size=6", "data.seq_len=256", f"save.every={EVERY}", "save.keep_last=4",
    "train.device=cpu", "log.tensorboard=false", "debug.recorder=false",
)  # fmt: skip
# An agent silent for 3 s counts as lost; a round waits at most 1 s for a second node.
# Without this variable, torch 2.13's first node does not send the store's address to a node that joins later.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
RENDEZVOUS = "is_host=false,join_timeout=60,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


class Agents:
    """Starts and stops the agents of one job; this process hosts the rendezvous."""

    def __init__(self, folder: Path, *sets: str) -> None:
        self.folder = folder
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._sets = [part for text in sets for part in ("--set", text)]
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *, hold: str = "") -> subprocess.Popen[bytes]:
        """Start one more agent with one rank in its own session; `hold` as in tests/support/held_hooks.py."""
        rendezvous = [
            f"--rdzv-endpoint=127.0.0.1:{self._store.port}",
            "--rdzv-backend=c10d",
            f"--rdzv-conf={RENDEZVOUS}",
        ]
        options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=job", "--local-addr=127.0.0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "--monitor-interval=0.1", *rendezvous]
        with open(self.folder / f"agent-{len(self._started)}", "wb") as output:
            agent = subprocess.Popen(
                [*command, "-m", "titan_ckpt", "train", DEBUG_CONFIG, "--module", held_hooks.__file__, *self._sets],
                stdout=output, stderr=output, env=os.environ | ENVIRONMENT | {held_hooks.HOLD: hold}, start_new_session=True,
            )  # fmt: skip
        self._started.append(agent)
        return agent

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds; fails after LIMIT_S seconds."""
        give_up_at = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < give_up_at, f"{what} did not happen\n{self.output()}"
            time.sleep(0.02)

    def output(self) -> str:
        """The end of each agent's output."""
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("agent-*")))

    def close(self) -> None:
        """Kill the remaining agents and their ranks."""
        for agent in self._started:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


@pytest.fixture
def agents(tmp_path: Path, cache: str) -> Iterator[Agents]:
    """The agents of a job that saves to tmp_path/run."""
    started = Agents(tmp_path, *SETS, f"data.cache={cache}", f"save.url={tmp_path}/run")
    yield started
    started.close()


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tokenised standard library, shared by all tests of this process."""
    return str(tmp_path_factory.getbasetemp() / "tokens")


def _records(run: Path) -> list[dict[str, Any]]:
    path = run / "logs" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def _attempts(run: Path) -> list[tuple[int, list[int]]]:
    """(ranks, steps done) for each attempt of the job."""
    attempts: list[tuple[int, list[int]]] = []
    for record in _records(run):
        if record["event"] == "start":
            attempts.append((record["world_size"], []))
        elif record["event"] == "step":
            attempts[-1][1].append(record["step"])
    return attempts


def _has_come_to(run: Path, step: int, *, attempt: int) -> Callable[[], bool]:
    def condition() -> bool:
        attempts = _attempts(run)
        return len(attempts) > attempt and max(attempts[attempt][1], default=0) >= step

    return condition


def _losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in _records(run) if record["event"] == "step"}


@pytest.mark.dist
def test_job_survives_an_agents_loss_and_return_in_sample_order(tmp_path: Path, cache: str, agents: Agents) -> None:
    run, alone = tmp_path / "run", ("--set", f"save.url={tmp_path}/alone", "--set", "save.every=0")
    common = [part for text in (*SETS, f"data.cache={cache}") for part in ("--set", text)]
    assert main(["train", DEBUG_CONFIG, *common, *alone]) == 0

    lost_at = 3 * EVERY - 1
    staying, leaving = agents.start(hold="1:3"), agents.start(hold=f"2:{lost_at}")
    agents.wait_for(_has_come_to(run, lost_at, attempt=0), "training on two agents")
    os.killpg(leaving.pid, signal.SIGKILL)
    agents.wait_for(_has_come_to(run, 1, attempt=1), "going on alone")
    returning = agents.start()
    assert (staying.wait(LIMIT_S), returning.wait(LIMIT_S)) == (0, 0), agents.output()

    attempts = _attempts(run)
    assert [ranks for ranks, _ in attempts] == [2, 1, 2]
    for (_, before), (_, after) in itertools.pairwise(attempts):
        assert before[-1] - EVERY <= after[0] - 1 <= before[-1]  # at most one save interval is repeated
    assert attempts[0][1][-1] == lost_at
    assert sorted(_losses(run)) == list(range(1, STEPS + 1))
    assert _losses(run) == pytest.approx(_losses(tmp_path / "alone"), rel=1e-3)
    samples = {record["step"]: record["tokens_seen"] for record in _records(run) if record["event"] == "step"}
    assert all(tokens == step * 6 * 256 for step, tokens in samples.items())


@pytest.mark.dist
def test_stopped_node_commits_and_the_others_continue(tmp_path: Path, agents: Agents) -> None:
    run, stopped_at = tmp_path / "run", EVERY + 2
    staying, leaving = agents.start(), agents.start(hold=f"2:{stopped_at}")
    agents.wait_for(_has_come_to(run, stopped_at, attempt=0), "training on two agents")
    leaving.terminate()
    assert staying.wait(LIMIT_S) == 0, agents.output()
    assert leaving.wait(LIMIT_S) != 0

    (before_ranks, before), (after_ranks, after) = _attempts(run)
    assert (before_ranks, after_ranks) == (2, 1)
    assert before + after == list(range(1, STEPS + 1))  # no step is repeated: the job saved before it stopped


def _train(*sets: str, nproc: int) -> None:
    arguments = [part for text in sets for part in ("--set", text)]
    job = subprocess.run(
        [sys.executable, "-m", "titan_ckpt", "train", DEBUG_CONFIG, *arguments, "--nproc", str(nproc)],
        env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr[-3000:]


@pytest.mark.dist
def test_mixture_run_on_4_2_3_ranks_has_the_losses_of_one(tmp_path: Path, cache: str) -> None:
    for name, words in (("a", 3000), ("b", 1200)):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"{name}{number * number}" for number in range(words)))
    mixture = [{"url": f"{tmp_path}/a.txt", "weight": 3.0}, {"url": f"{tmp_path}/b.txt", "weight": 1.0}]
    items = ", ".join(f'{{url = "{source["url"]}", weight = {source["weight"]}}}' for source in mixture)
    sets = (
        f"data.mixture=[{items}]", 'data.source=""', f"data.cache={cache}", "train.global_batch_size=13",
        "optimizer.schedule=constant", "train.device=cpu", "log.tensorboard=false", "debug.recorder=false",
    )  # fmt: skip
    alone = [part for text in (*sets, f"save.url={tmp_path}/alone", "train.steps=7") for part in ("--set", text)]
    assert main(["train", DEBUG_CONFIG, *alone]) == 0
    for nproc, steps in ((4, 3), (2, 5), (3, 7)):
        _train(*sets, f"save.url={tmp_path}/run", f"train.steps={steps}", nproc=nproc)
    assert [(ranks, len(steps)) for ranks, steps in _attempts(tmp_path / "run")] == [(4, 3), (2, 2), (3, 2)]
    assert _losses(tmp_path / "run") == pytest.approx(_losses(tmp_path / "alone"), rel=2e-5)
