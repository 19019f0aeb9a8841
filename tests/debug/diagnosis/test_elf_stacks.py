"""Stacks by eu-stack 0.188 and pystack 1.4 of a job of torch 2.13 on CPython 3.11 (recorded, then shortened)."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.records import Verdict

WAIT = """PID {pid} - process
TID {pid}:
#0  0x00007fa5092a3f16 __futex_abstimed_wait_common{libc}
#1  0x00007fa5092a65d8 pthread_cond_wait@@GLIBC_2.3.2{libc}
#2  0x00007fa4f20a741d std::condition_variable::wait(std::unique_lock<std::mutex>&){stdcpp}
#3  0x00007fa4f8b6984b c10d::Work::wait(std::chrono::duration<long, std::ratio<1l, 1000l> >){torch}
#4  0x00007fa5094fd9c3 _PyEval_EvalFrameDefault{python}
#5  0x0000557ca6b3f081 _start{python}
TID 27137:
#0  0x00007fa509326f36 epoll_wait{libc}
#1  0x00007fa4faf7d62d gloo::transport::tcp::Loop::run(){torch}
#2  0x00007fa4f20d44a3
"""
LOCK = """PID {pid} - process
TID {pid}:
#0  0x00007fb8c72a3f16 __futex_abstimed_wait_common{libc}
#1  0x00007fb8c72aed90 __new_sem_wait_slow64.constprop.0{libc}
#2  0x00007fb8c76a9370 PyThread_acquire_lock_timed{python}
#3  0x00007fb8c75035f2 _PyEval_EvalFrameDefault{python}
TID 21306:
#0  0x00007fb8c7326f36 epoll_wait{libc}
#1  0x00007fb8b8f7d62d gloo::transport::tcp::Loop::run(){torch}
"""
NO_LIBRARIES = dict.fromkeys(("libc", "stdcpp", "torch", "python"), "")
LIBRARIES = {
    "libc": " - /usr/lib/libc.so.6\n    ./nptl/futex-internal.c:57:12", "stdcpp": " - /usr/lib/libstdc++.so.6.0.30",
    "torch": " - /venv/torch/lib/libtorch_cpu.so", "python": " - /usr/lib/libpython3.11.so.1.0\n    Python/ceval.c:4769:23",
}  # fmt: skip
SOURCE_LINES = dict.fromkeys(("libc", "python"), "\n    ./nptl/futex-internal.c:57:12") | {"stdcpp": "", "torch": ""}
FORMS = [NO_LIBRARIES, LIBRARIES, SOURCE_LINES]

PYSTACK = """Traceback for thread 27138 (python) [] (most recent call last):
    (C) File "../sysdeps/unix/sysv/linux/x86_64/clone3.S", line 81, in __clone3 (/usr/lib/libc.so.6)
    (C) File "???", line 0, in gloo::transport::tcp::Loop::run() (/venv/torch/lib/libtorch_cpu.so)

Traceback for thread {pid} (python) [Has the GIL] (most recent call last):
    (Python) File "/job/train.py", line {line}, in <module>
        {text}
{inner}"""
IN_REDUCE = """    (Python) File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
        work.wait()
"""
IN_REDUCE_OF_C = (
    IN_REDUCE
    + """    (C) File "???", line 0, in c10d::Work::wait(std::chrono::duration<long>) (/venv/torch/lib/libtorch_cpu.so)
    (C) File "./nptl/futex-internal.c", line 57, in __futex_abstimed_wait_common64 (inlined) (/usr/lib/libc.so.6)
"""
)


def judged(folder: Path, *texts: str) -> Verdict:
    for rank, text in enumerate(texts):
        (folder / f"stack_rank_{rank}.txt").write_text(text)
    return diagnose(open_run(str(folder)))[0]


@pytest.mark.parametrize("form", FORMS)
def test_eu_stack_shows_the_one_that_does_not_wait(form: dict[str, str], tmp_path: Path) -> None:
    top = judged(tmp_path, *(text.format(pid=900, **form) for text in (WAIT, WAIT, LOCK, WAIT)))
    assert (top.verdict, top.subtype, top.culprits, top.victims) == ("STUCK_ON_CPU", "python_lock", (2,), (0, 1, 3))


@pytest.mark.parametrize("form", FORMS)
def test_eu_stacks_of_all_in_one_wait_accuse_nobody(form: dict[str, str], tmp_path: Path) -> None:
    top = judged(tmp_path, *[WAIT.format(pid=900, **form)] * 4)
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())


def test_eu_stacks_of_a_host_belong_to_their_processes(tmp_path: Path) -> None:
    warning = "eu-stack: dwfl_thread_getframes tid 27137 at 0x7f in libc.so.6: No DWARF information found\n"
    host = "".join(text.format(pid=pid, **NO_LIBRARIES) for pid, text in ((71, WAIT), (72, LOCK), (73, WAIT)))
    (tmp_path / "node1.txt").write_text(warning + host)
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(
            f"node1:{71 + rank}:{81 + rank} [{rank}] NCCL INFO Bootstrap: Using eth0\n"
        )
    run = open_run(str(tmp_path))
    assert [[s.reason for s in run.ranks[rank].stacks] for rank in range(3)] == [["eu-stack"]] * 3


@pytest.mark.parametrize("inner", [IN_REDUCE, IN_REDUCE_OF_C])
def test_pystack_gives_the_line_of_the_odd_one(inner: str, tmp_path: Path) -> None:
    waits = PYSTACK.format(pid=900, line=14, text="dist.all_reduce(x)", inner=inner)
    stuck = PYSTACK.format(pid=900, line=31, text="p.wait()", inner="")
    core = "Using executable found in the core file: python\n\nCore file information:\npid: 900\n\n"
    top = judged(tmp_path, waits, core + stuck, waits)
    assert (top.verdict, top.culprits, top.victims) == ("STUCK_ON_CPU", (1,), (0, 2))
    assert any((e.file, e.line) == ("/job/train.py", 31) for e in top.evidence)


def test_pystack_of_all_in_one_collective_accuses_nobody(tmp_path: Path) -> None:
    top = judged(tmp_path, *[PYSTACK.format(pid=900, line=14, text="dist.all_reduce(x)", inner=IN_REDUCE_OF_C)] * 3)
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())
