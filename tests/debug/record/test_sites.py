"""The line that an operation is recorded with is the program's, however many layers of torch and of frameworks are in between."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.debug.test_ring import KINDS
from titan_ckpt.debug.read.reader import open_run
from titan_ckpt.debug.record.environment import environment

FRAMEWORK = """
    def layer(depth, call, value):
        return layer(depth - 1, call, value) if depth else call(value)
"""
PROGRAM = """
    import sys
    import torch, torch.distributed as dist
    from titan_ckpt.debug.record import ring
    if sys.argv[2] == "Python":
        ring.compiled = None
    from titan_ckpt.debug.record.recorder import Recorder
    sys.path.append(sys.argv[1] + "/site-packages")
    import framework
    recorder = Recorder.start(sys.argv[1] + "/box", rank=0, world_size=1, stall_s=0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    reduce = torch.no_grad()(dist.all_reduce)  # a frame of torch around it, as FSDP's hooks have
    reduce(torch.ones(3))
    framework.layer(9, reduce, torch.ones(3))
    dist.broadcast(torch.ones(3), src=0)
    dist.gather(torch.ones(3), [torch.ones(3)], dst=0)
    dist.all_gather([torch.ones(3)], torch.ones(3))
    dist.monitored_barrier()
    dist.group.WORLD.broadcast(torch.ones(3), root=0).wait()
    recorder.stop()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_line_of_the_program_below_torch_and_a_framework(kind: str, tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "framework.py").write_text(textwrap.dedent(FRAMEWORK))
    source = tmp_path / "train.py"
    source.write_text(textwrap.dedent(PROGRAM))
    subprocess.run([sys.executable, "-W", "ignore", str(source), str(tmp_path), kind], check=True, capture_output=True)
    run = open_run(str(tmp_path / "box"))
    plain, layered = ([(frame.function, frame.line) for frame in run.operation(0, row).frames] for row in range(2))
    line = source.read_text().splitlines().index("reduce(torch.ones(3))") + 1
    assert plain == [("<module>", line)]
    assert layered == [("layer", 3)] * 3 + [("<module>", line + 1)]
    found = [run.operation(0, row) for row in range(7)]
    assert [(one.op, one.peer, one.sizes, one.frames[0].line - line, one.retired) for one in found[2:]] == [
        ("broadcast", 0, "3", 2, True), ("gather", 0, "3", 3, True), ("all_gather", -1, "3", 4, True),
        ("monitored_barrier", -1, "", 5, True), ("broadcast", 0, "3", 6, True),
    ]  # fmt: skip
    assert [(str(one.group), one.seq) for one in found[4:]] == [("default_pg", 5), ("default_pg", 1), ("default_pg", 6)]
    assert found[5].group != found[6].group  # torch's counter leaves out a monitored barrier


KILLED_LATER = """
    import sys
    import torch, torch.distributed as dist
    from titan_ckpt.debug.record.recorder import Recorder
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for rank in range(2):
        recorder = Recorder.start(sys.argv[1], rank=rank, world_size=2, stall_s=0)
        for occasion in ("demand", "sigterm"):
            dist.all_gather_into_tensor(torch.empty(4), torch.ones(4))
            if (rank, occasion) != (1, "sigterm"):
                recorder.dump(occasion)
        recorder.stop()
"""


def test_names_agree_where_a_rank_was_killed_after_its_dump(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(KILLED_LATER), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment()})
    run = open_run(str(tmp_path))
    assert [record.has_flight_recorder for record in run.ranks.values()] == [
        True,
        False,
    ]  # rank 1 went on after its only dump
    assert {run.operation(rank, -1).op for rank in run.ranks} == {"all_gather_into_tensor"}
