"""Stacks by gdb 13 of a job of torch 2.13 on CPython 3.11 (recorded, then shortened): `thread apply all bt` with the symbols of
the interpreter, `py-bt` of CPython's extension, both, and either of the main thread alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import Run, Verdict, diagnose, open_run
from titan_ckpt.debug.report.facts import commands

HEAD = """\
[New LWP 1{pid}]
[Thread debugging using libthread_db enabled]
Using host libthread_db library "/lib/x86_64-linux-gnu/libthread_db.so.1".
__futex_abstimed_wait_common64 (private=0, cancel=true, abstime=0x0, op=393, futex_word=0x1) at ./nptl/futex-internal.c:57
"""
OTHER = """
Thread 2 (Thread 0x7fadea5126c0 (LWP 1{pid}) "pt_gloo_runloop"):
#0  __futex_abstimed_wait_common64 (private=0, cancel=true, futex_word=0x56487a5bf380) at ./nptl/futex-internal.c:57
#4  ___pthread_cond_wait (cond=0x56487a5bf358, mutex=0x56487a5bf330) at ./nptl/pthread_cond_wait.c:618
#5  0x00007fadf32a741d in std::condition_variable::wait(std::unique_lock<std::mutex>&) () from /lib/libstdc++.so.6
#6  0x00007fadf9d12501 in c10d::ProcessGroupGloo::runLoop(int) () from /opt/venv/torch/lib/libtorch_cpu.so
#8  0x00007fae0a4a71f5 in start_thread (arg=<optimized out>) at ./nptl/pthread_create.c:442
"""
MAIN = '\nThread 1 (Thread 0x7fae0ac94b80 (LWP {pid}) "python"):\n'
OTHER_PYTHON = '\nThread 2 (Thread 0x7fadea5126c0 (LWP 1{pid}) "pt_gloo_runloop"):\nUnable to locate python frame\n'
SLEEP = """\
#0  __futex_abstimed_wait_common64 (private=0, cancel=true, futex_word=0x56487ccdb250) at ./nptl/futex-internal.c:57
#2  0x00007fae0a4a3f7b in __GI___futex_abstimed_wait_cancelable64 (futex_word=0x5648) at ./nptl/futex-internal.c:139
#4  ___pthread_cond_wait (cond=0x56487ccdb228, mutex=0x56487ccdb200) at ./nptl/pthread_cond_wait.c:618
#5  0x00007fadf32a741d in std::condition_variable::wait(std::unique_lock<std::mutex>&) () from /lib/libstdc++.so.6
"""
PYBIND = """\
#7  0x00007fae085d2825 in pybind11::cpp_function::dispatcher(_object*, _object*) () from /opt/torch/lib/libtorch_python.so
#8  0x00007fae0a7a7332 in cfunction_vectorcall_FASTCALL_KEYWORDS (func=0x7f, args=0x7f) at Objects/methodobject.c:443
"""
INTERPRETER = """\
#12 0x00007fae0a6fd9c3 in _PyEval_EvalFrameDefault (tstate=<optimized out>, frame=<optimized out>) at Python/ceval.c:4769
#28 Py_RunMain () at Modules/main.c:680
#33 0x0000564868cd7081 in _start ()
"""
WORK = (
    SLEEP
    + "#6  0x7f in c10d::Work::wait(std::chrono::duration<long>) () from /opt/torch/lib/libtorch_cpu.so\n"
    + PYBIND
)
NCCL = "#0  0x7f in ncclGroupEnd () from /opt/nvidia/nccl/lib/libnccl.so.2\n" + PYBIND
CUDA = """\
#0  0x00007ffd1 in ?? ()
#1  0x00007ffd2 in clock_gettime () from /lib/libc.so.6
#2  0x00007f3a1 in ?? () from /lib/x86_64-linux-gnu/libcuda.so.1
#4  0x00007f3a4 in cuStreamSynchronize () from /lib/x86_64-linux-gnu/libcuda.so.1
#5  0x00007f3a5 in cudaStreamSynchronize () from /opt/nvidia/libcudart.so.12
#6  0x7f in at::native::_local_scalar_dense_cuda(at::Tensor const&) () from /opt/torch/lib/libtorch_cuda.so
"""
NAP = """\
#0  0x00007ff941ced545 in __GI___clock_nanosleep (clock_id=1, flags=1) at ../sysdeps/unix/sysv/linux/clock_nanosleep.c:48
#1  0x00007ff942115ada in pysleep (timeout=<optimized out>) at ./Modules/timemodule.c:2159
#2  time_sleep (self=<optimized out>, timeout_obj=<optimized out>) at ./Modules/timemodule.c:383
"""
REDUCE = """\
Traceback (most recent call first):
  <built-in method wait of pybind11_builtins.pybind11_detail_function_record_v1 object at remote 0x7f8b58b8da90>
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
    work.wait()
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
    return func(*args, **kwargs)
  File "/job/train.py", line 10, in sync
    dist.all_reduce(t)
"""
BATCH = """\
Traceback (most recent call first):
  <built-in function sleep>
  File "/job/data.py", line 61, in next_batch
    time.sleep(3)
"""
ENTRY = '  File "/job/train.py", line 56, in <module>\n    main()\n'
END = "[Inferior 1 (process {pid}) detached]\n"


def bt(native: str, python: str) -> str:  # noqa: ARG001 (not shown)
    return HEAD + OTHER + MAIN + native + INTERPRETER + END


def py_bt(native: str, python: str) -> str:  # noqa: ARG001
    return HEAD + OTHER_PYTHON + MAIN + python + ENTRY + END


def bt_then_py_bt(native: str, python: str) -> str:
    return HEAD + OTHER + MAIN + native + INTERPRETER + OTHER_PYTHON + MAIN + python + ENTRY + END


def of_main_thread(native: str, python: str) -> str:
    return HEAD + native + INTERPRETER + python + ENTRY + END


def only_py_bt(native: str, python: str) -> str:  # noqa: ARG001
    return python + ENTRY


FORMS = [bt, py_bt, bt_then_py_bt, of_main_thread, only_py_bt]
WITH_PYTHON = FORMS[1:]


def judged(folder: Path, *texts: str, log: str = "") -> tuple[Run, Verdict]:
    for rank, text in enumerate(texts):
        (folder / f"rank_{rank}.gdb.txt").write_text(text.replace("{pid}", str(900 + rank)))
    if log:
        (folder / "console.log").write_text(log)
    run = open_run(str(folder))
    return run, diagnose(run)[0]


@pytest.mark.parametrize("form", FORMS)
def test_all_in_one_collective_are_undecided(form, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run, top = judged(tmp_path, *[form(WORK, REDUCE)] * 4)
    assert (top.verdict, top.culprits, top.victims) == ("INSUFFICIENT_DATA", (), (0, 1, 2, 3))
    assert commands(run, top)


@pytest.mark.parametrize("form", FORMS)
def test_the_one_elsewhere_is_named_as_by_pyspy(form, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _, top = judged(tmp_path, *[form(WORK, REDUCE)] * 2, form(NAP, BATCH), form(WORK, REDUCE))
    assert (top.verdict, top.culprits, top.victims) == ("STUCK_ON_CPU", (2,), (0, 1, 3))


@pytest.mark.parametrize("form", WITH_PYTHON)
def test_py_bt_gives_the_line(form, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _, top = judged(tmp_path, *[form(WORK, REDUCE)] * 3, form(NAP, BATCH))
    assert ("/job/data.py", 61) in {(item.file, item.line) for item in top.evidence}
    assert top.subtype == "dataloader"


@pytest.mark.parametrize("native", [NCCL, WORK, CUDA])
def test_wait_of_nccl_or_cuda_is_no_running_job(native: str, tmp_path: Path) -> None:
    _, top = judged(tmp_path, *[bt(native, "")] * 4)
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())


def test_waits_for_the_gpu_accuse_nobody_but_show_where(tmp_path: Path) -> None:
    _, top = judged(tmp_path, *[bt(CUDA, "")] * 3, bt(NAP, ""))
    assert (top.verdict, top.culprits, top.suspects) == ("INSUFFICIENT_DATA", (), (3,))
    said = " ".join(item.text for item in top.evidence)
    assert "cuStreamSynchronize" in said
    assert "pysleep" in said


def test_frames_of_torch_without_python_are_no_own_code(tmp_path: Path) -> None:
    engine = "#0  0x7f in torch::autograd::Engine::execute() () from /opt/torch/lib/libtorch_cpu.so\n"
    _, top = judged(tmp_path, *[bt(WORK, "")] * 3, bt(SLEEP + engine, ""))
    assert top.culprits == ()


@pytest.mark.parametrize(
    "frames",
    ["#0  0x00007f1 in ?? ()\n#1  0x00007f2 in ?? ()\n", "#0  0x00007f1 in poll () from /lib/libc.so.6\n", SLEEP],
)
def test_stack_without_symbols_accuses_nobody(frames: str, tmp_path: Path) -> None:
    lost = HEAD + OTHER + MAIN + frames + END
    _, top = judged(tmp_path, *[bt(WORK, "")] * 3, lost)
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())
