"""The recorder leaves a program alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from titan_ckpt.debug import open_run
from titan_ckpt.debug.record.environment import environment

DUMPS = """
    import sys, time
    import torch, torch.distributed as dist
    from titan_ckpt.debug.record.recorder import Recorder
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    recorder = Recorder.start(sys.argv[1], rank=0, world_size=1, stall_s=0.5)
    dist.all_reduce(torch.ones(3))
    before = {name for name in sys.modules if name.startswith("torch")}
    recorder.dump("demand")
    while not (recorder.folder / "rank_00000.stall.pickle").exists():
        time.sleep(0.05)
    print({name for name in sys.modules if name.startswith("torch")} - before)
"""


def test_no_dump_imports_beside_the_program(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(DUMPS), str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **environment()}, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    operation = open_run(str(tmp_path)).operation(0, -1)
    assert (operation.op, operation.frames[0].line) == ("all_reduce", 7)  # the line is the black box's
