"""Which stacks are waits, in the forms that recorders write, and real jobs that hang below torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.frames import main_thread_state
from titan_ckpt.debug.read.stacks import parse_stacks
from titan_ckpt.debug.record.environment import environment
from titan_ckpt.debug.record.progress import torch_progress

SITE = "/opt/venv/lib/python3.12/site-packages"
SELECT = '  File "/usr/lib/python3.12/selectors.py", line 415 in select'
IMPORT = '  File "<frozen importlib._bootstrap>", line 241 in _call'
USER = '  File "/job/train.py", line 7 in main'


def frame(place: str, function: str) -> str:
    file, _, line = place.rpartition(":")
    return f'  File "{SITE}/{file}", line {line} in {function}'


def state_of(*lines: str) -> tuple[str, str]:
    text = "\n".join(["Thread 0x1 [MainThread] (most recent call first):", *lines])
    main = parse_stacks(text, "stacks", "").main
    assert main is not None
    kind, call = main_thread_state(main)
    return kind.value, call


BACKWARD = (
    frame("torch/autograd/graph.py:979", "_engine_run_backward"),
    frame("torch/autograd/__init__.py:395", "backward"),
    frame("torch/_tensor.py:623", "backward"),
)


@pytest.mark.parametrize(
    ("lines", "call"),
    [
        (BACKWARD, "backward"),
        ((frame("torch/nn/utils/clip_grad.py:100", "_get_total_norm"),), "_get_total_norm"),
        ((frame("torch/cuda/__init__.py:1000", "synchronize"),), "synchronize"),
        ((frame("torch/optim/adamw.py:300", "_multi_tensor_adamw"), frame("torch/optim/adamw.py:90", "step")), "step"),
        ((*BACKWARD, frame("accelerate/accelerator.py:2861", "backward")), "backward"),
        ((frame("torch/nn/parallel/distributed.py:1775", "_pre_forward"), frame("torch/nn/modules/module.py:1", "forward")),
         "forward"),
    ],
)  # fmt: skip
def test_calls_into_torch_may_wait(lines: tuple[str, ...], call: str) -> None:
    assert state_of(*lines, USER) == ("in_torch", call)


@pytest.mark.parametrize("text", ["log(loss.item())", "torch.cuda.synchronize()", "norms.cpu()", "x = y.tolist()"])
def test_calls_without_a_frame_may_wait(text: str) -> None:
    assert state_of(f"{USER}  | {text}")[0] == "in_torch"


@pytest.mark.parametrize(
    "lines",
    [
        (SELECT, frame("torch/utils/data/dataloader.py:1131", "_try_get_data")),
        (frame("torch/utils/data/dataloader.py:701", "__next__"),),
        (frame("torch/_inductor/codecache.py:50", "load"),),
        (frame("torch/serialization.py:900", "save"),),
        (IMPORT, frame("torch/distributed/_symmetric_memory/__init__.py:1", "<module>")),
        (),
    ],
)  # fmt: skip
def test_python_code_and_files_are_no_wait(lines: tuple[str, ...]) -> None:
    assert state_of(*lines, f"{USER}  | batch = next(loader)") == ("on_cpu", "")


def test_pyspy_stack_below_torch_may_wait() -> None:
    inner = f"    _engine_run_backward ({SITE}/torch/autograd/graph.py:979)"
    main = parse_stacks(f'Thread 1 (active): "MainThread"\n{inner}\n    main (/job/train.py:7)\n', "pyspy", "").main
    assert main is not None
    assert main_thread_state(main)[0] == "in_torch"


PROGRAM = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from titan_ckpt.debug import Recorder
folder, rank = sys.argv[1], int(sys.argv[2])
Recorder.start(folder, rank=rank, world_size=2, stall_s=2)
dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=rank, world_size=2)
layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
{wrap}
def spin(step):
    if step == 3:
        open(f"{{folder}}.{{rank}}.hung", "x").close()
    while rank == 1 and step == 3:
        pass  # the culprit
for step in range(6):
    spin(step)
    model(torch.ones(2, 8)).sum().backward()
"""
WRAPS = {
    "ddp": "model = nn.parallel.DistributedDataParallel(layers)",
    "fsdp2": "from torch.distributed.fsdp import fully_shard\nmodel = fully_shard(layers)",
}


def test_operations_issued_from_cpp_are_progress(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(4, 1))
        before = torch_progress()
        assert torch_progress() == before
        model(torch.ones(2, 4)).sum().backward()
        assert torch_progress() != before
    finally:
        dist.destroy_process_group()


@pytest.mark.dist
@pytest.mark.parametrize("kind", WRAPS)
def test_hang_below_backward_names_the_busy_rank(kind: str, tmp_path: Path) -> None:
    code = textwrap.dedent(PROGRAM).format(wrap=WRAPS[kind])
    variables = {**os.environ, **environment(200), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(rank)], env=variables, stderr=subprocess.DEVNULL
        )
        for rank in range(2)
    ]
    try:
        give_up = time.monotonic() + 240
        stalls = [tmp_path / f"rank_{rank:05d}.stall.pickle" for rank in range(2)]
        hung = [
            Path(f"{tmp_path}.{rank}.hung") for rank in range(2)
        ]  # on a busy machine an earlier step may stall for a while
        found: tuple[str, tuple[int, ...]] = "", ()
        while time.monotonic() < give_up and found != ("STUCK_ON_CPU", (1,)):
            time.sleep(0.5)
            found = diagnose_folder(tmp_path, stalls) if all(path.exists() for path in hung) else found
        assert found == ("STUCK_ON_CPU", (1,))
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def diagnose_folder(folder: Path, stalls: list[Path]) -> tuple[str, tuple[int, ...]]:
    """The first verdict, once both ranks have dumped a stall."""
    if not all(path.exists() for path in stalls):
        return "", ()
    top = diagnose(open_run(str(folder)))[0]
    return str(top.verdict), top.culprits
