"""Stacks with frames of C and C++ (`py-spy dump --native`: its src/dump.rs prints a library or a source file without a line or
with one; gdb's `bt`): these say no more than the frames of Python below which they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run

REDUCE = (
    "all_reduce (torch/distributed/distributed_c10d.py:2221)\n    wrapper (torch/distributed/c10d_logger.py:75)\n"
    "    log_metrics (/w/train.py:140)"
)
BACKWARD = (
    "_engine_run_backward (torch/autograd/graph.py:769)\n    backward (torch/_tensor.py:521)\n"
    "    train_step (/w/train.py:120)"
)
READ = "read_shard (/w/data.py:61)"
DUMP = """\
Process {pid}: python -u train.py
Python v3.10.14 (/opt/conda/bin/python3.10)

Thread {pid} (active): "MainThread"
    {frames}
    main (/w/train.py:201)
    <module> (/w/train.py:230)
"""
SLEEPS = (
    "pthread_cond_wait (libc.so.6)\n    torch::autograd::Engine::execute (libtorch_cpu.so)",
    "0x7f3a1b2c (libc.so.6)",
    "__futex_abstimed_wait_common64 (futex-internal.c:57)\n    _PyEval_EvalFrameDefault (python3.10)",
    "c10d::ProcessGroupNCCL::WorkNCCL::synchronize (ProcessGroupNCCL.cpp:702)",
)


def judged(folder: Path, *frames: str) -> tuple[int, ...]:
    for rank, inner in enumerate(frames):
        (folder / f"rank_{rank}.stacks.txt").write_text(DUMP.format(pid=900 + rank, frames=inner))
    return diagnose(open_run(str(folder)))[0].culprits


@pytest.mark.parametrize("native", SLEEPS)
def test_who_is_in_backward_may_wait_below_any_frame_of_c(native: str, tmp_path: Path) -> None:
    reads = f"read (libc.so.6)\n    {READ}"
    assert judged(
        tmp_path, REDUCE, f"{native}\n    {BACKWARD}", reads, f"ncclAllReduce (libnccl.so.2)\n    {REDUCE}"
    ) == (2,)


@pytest.mark.parametrize("native", SLEEPS)
def test_alone_in_backward_is_no_fault(native: str, tmp_path: Path) -> None:
    assert judged(tmp_path, REDUCE, f"{native}\n    {BACKWARD}", REDUCE, REDUCE) == ()


@pytest.mark.parametrize(
    "native", ["cuStreamSynchronize (libcuda.so.1)", "at::native::_local_scalar_dense_cuda (libtorch_cuda.so)"]
)
def test_a_wait_for_the_gpu_below_the_program_is_a_wait(native: str, tmp_path: Path) -> None:
    assert judged(tmp_path, REDUCE, f"{native}\n    train_step (/w/train.py:120)", REDUCE, REDUCE) == ()


def test_json_has_library_paths_and_line_zero(tmp_path: Path) -> None:
    for rank, inner in enumerate(([], [("pthread_cond_wait", "/lib/x86_64-linux-gnu/libc.so.6", 0)], [], [])):
        lines = REDUCE if rank != 1 else BACKWARD
        python = [line.strip().removesuffix(")").split(" (") for line in lines.split("\n")]
        frames = [(name, *place.rsplit(":", 1)) for name, place in python]
        document = [
            {
                "pid": 900 + rank, "thread_id": 1, "thread_name": "MainThread",
                "frames": [{"name": n, "filename": f, "line": int(number)} for n, f, number in (*inner, *frames)],
            }
        ]  # fmt: skip
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(document))
    assert diagnose(open_run(str(tmp_path)))[0].culprits == ()
