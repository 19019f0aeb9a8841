"""`make peer-tests` on a file of our own: PyTorch's tests themselves are not kept in the project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.peer_tests import __main__ as peer_tests
from tools.peer_tests.accepted import ACCEPTED
from tools.peer_tests.running import Outcome

TESTS = """
import os
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.common_distributed import requires_nccl, skip_if_lt_x_gpu
from torch.testing._internal.distributed._shard.sharded_tensor import ShardedTensorTestBase, with_comms
from torch.testing._internal.distributed.checkpoint_utils import with_temp_dir


class TestRanks(ShardedTensorTestBase):
    @property
    def world_size(self):
        return min(2, torch.cuda.device_count())

    @with_comms(init_rpc=False)
    @skip_if_lt_x_gpu(2)
    @requires_nccl()
    @with_temp_dir
    def test_halves_come_back(self):
        mesh = init_device_mesh("cuda", (2,))
        state = {"w": distribute_tensor(torch.arange(8.0, device=f"cuda:{dist.get_rank()}").cuda(), mesh, [Shard(0)])}
        dcp.save(state, checkpoint_id=self.temp_dir)
        found = {"w": distribute_tensor(torch.zeros(8, device="cuda"), mesh, [Shard(0)])}
        dcp.load(found, storage_reader=dcp.FileSystemReader(self.temp_dir))
        self.assertTrue(torch.equal(found["w"].full_tensor(), torch.arange(8.0)))


class TestAlone(unittest.TestCase):
    @with_temp_dir
    def test_the_index_is_at_the_top(self):
        dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(self.temp_dir))
        self.assertIn(".metadata", os.listdir(self.temp_dir))

    def test_that_fails_with_any_storage(self):
        self.fail("on purpose")
"""


@pytest.mark.dist
def test_differences_from_torchs_storage_are_reported(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(TESTS)
    command = [sys.executable, "-m", "tools.peer_tests", "--tests", str(tmp_path), "--json", str(tmp_path / "found")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    found = json.loads((tmp_path / "found").read_text())
    results = {name: {each["test"]: (each["result"], each["uses"]) for each in found[name]} for name in found}
    halves, index, fails = (
        "test_small.TestRanks.test_halves_come_back", "test_small.TestAlone.test_the_index_is_at_the_top",
        "test_small.TestAlone.test_that_fails_with_any_storage",
    )  # fmt: skip
    assert results["torch"] == {halves: ("passed", 0), index: ("passed", 0), fails: ("FAILED", 0)}
    assert results["ours"] == {halves: ("passed", 3), index: ("FAILED", 1), fails: ("FAILED", 0)}
    assert results["mixed"][halves] == ("passed", 1)
    assert f"DIFFERS ours {index}: FAILED: AssertionError: '.metadata' not found" in done.stdout
    assert f"not run: {fails}: FAILED: AssertionError: on purpose" in done.stdout


def test_a_difference_needs_a_written_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    passed, failed = Outcome(test="a.b", result="passed"), Outcome(test="a.b", result="FAILED", detail="why")
    outcomes = {"torch": [passed], "ours": [failed]}
    assert peer_tests.unexplained(outcomes) == {("ours", "a.b"): "FAILED: why"}
    monkeypatch.setattr(peer_tests, "ACCEPTED", {("ours", "a.b"): "a reason"})
    assert peer_tests.unexplained(outcomes) == {}
    assert "ours a.b: accepted: a reason" in peer_tests.report(outcomes)
    assert all(len(reason) > 20 for reason in ACCEPTED.values())
