"""The examples, run as their first lines show: on real ranks, killed midway and restarted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.demo.processes import process_tree, send_signal
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Shard
from tools.paths import EXAMPLES

FSDP2 = EXAMPLES / "fsdp2.py"
LINE = re.compile(r"step (\d+) loss (\S+) committed (\S+)\n")

pytestmark = [pytest.mark.dist, pytest.mark.e2e]


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """The losses a job printed, by step, and the committed step from its last line."""

    losses: dict[int, str]
    committed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A killed job and the job that resumed it."""

    url: str
    killed: Printed
    resumed: Printed


def _start(url: str, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(FSDP2), url, "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _lines(process: subprocess.Popen[str]) -> Iterator[tuple[int, str, str]]:
    assert process.stdout is not None
    for line in process.stdout:
        match = LINE.fullmatch(line)
        assert match is not None, line
        yield int(match[1]), match[2], match[3]


def _train(url: str, steps: int, *, kill_after_commits: int | None = None) -> Printed:
    """Run to the end, or SIGKILL every process once the job has printed that many steps after the first commit."""
    losses: dict[int, str] = {}
    committed = after = 0
    with _start(url, steps) as process:
        for step, loss, newest in _lines(process):
            losses[step] = loss
            committed = int(newest) if newest != "None" else 0
            after += committed > 0
            if kill_after_commits is not None and after >= kill_after_commits:
                send_signal(process_tree(process))
                break
    assert (process.returncode == 0) == (kill_after_commits is None)
    return Printed(losses=losses, committed=committed)


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The example, killed after its first commits, then run to the end."""
    url = str(tmp_path_factory.mktemp("fsdp2") / "run")
    killed = _train(url, 1_000_000, kill_after_commits=12)
    return Story(url=url, killed=killed, resumed=_train(url, max(killed.losses) + 3))


def test_the_fsdp2_example_goes_on_behind_its_newest_commit(fsdp2: Story) -> None:
    first = min(fsdp2.resumed.losses)
    assert fsdp2.killed.committed < first <= max(fsdp2.killed.losses) + 1
    assert first % 5 == 1


def test_the_fsdp2_example_repeats_the_killed_job_bit_for_bit(fsdp2: Story) -> None:
    both = fsdp2.killed.losses.keys() & fsdp2.resumed.losses.keys()
    assert both
    assert {step: fsdp2.resumed.losses[step] for step in both} == {step: fsdp2.killed.losses[step] for step in both}


def test_the_fsdp2_checkpoint_is_whole_and_records_its_mesh(fsdp2: Story) -> None:
    checkpoint = open_checkpoint(fsdp2.url)
    assert verify(checkpoint, read_data=True) == []
    assert checkpoint.manifest.mesh == MeshSpec.parse("dp_shard=2")
    assert checkpoint.manifest.by_fqn["model.0.weight"].placements == {"dp_shard": Shard(0)}


def test_plain_dcp_load_reads_what_the_fsdp2_example_saved(fsdp2: Story) -> None:
    checkpoint = open_checkpoint(fsdp2.url)
    state = {"model": {"2.weight": torch.zeros(64, 256)}, "optimizer": {"state.2.weight.step": torch.zeros(())}}
    dcp.load(state, storage_reader=FileSystemReader(f"{fsdp2.url}/{checkpoint.folder}"))
    assert torch.equal(state["model"]["2.weight"], checkpoint.read("model.2.weight"))
    assert state["optimizer"]["state.2.weight.step"].item() == checkpoint.step


def test_what_the_fsdp2_example_saved_reshards_without_its_code(fsdp2: Story, tmp_path: Path) -> None:
    source = open_checkpoint(fsdp2.url)
    report = run_plan(plan_reshard(source, MeshSpec.parse("dp_shard=3")), str(tmp_path / "run"))
    assert report.checkpoint is not None
    name = "optimizer.state.0.weight.exp_avg"
    assert torch.equal(report.checkpoint.read(name), source.read(name))
