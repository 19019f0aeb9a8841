"""Logs of jobs in which gloo aborted a rank that received too much, or in which ranks waited in different calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run

TORCH = "/lib/python3.11/site-packages/torch"
ABORTED = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 388 vs 4. Received data size "
    "doesn't match expected size.\n"
)
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1697"
TIMED_OUT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 45000ms for recv operation to complete"
FATAL = """\
Fatal Python error: Aborted

Thread 0x00007f105b7cdb80 (most recent call first):
  File "{torch}/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/job/train.py", line {line} in step
  File "/job/train.py", line 90 in <module>
"""


def judged(folder: Path, *texts: str) -> Verdict:
    for rank, text in enumerate(texts):
        (folder / f"rank_{rank}.log").write_text(text)
    return diagnose(open_run(str(folder)))[0]


def steps(first: int, last: int) -> str:
    return "".join(
        f"2026-11-22 10:17:{step:02d},320 INFO train: step {step} loss 1.0\n" for step in range(first, last + 1)
    )


def raised(line: int, *inside: tuple[str, str], error: str = CLOSED) -> str:
    """An uncaught error: the program's line, and the functions of torch (file, name) below it."""
    frames = "".join(f'  File "{TORCH}/{file}", line 9, in {name}\n    call()\n' for file, name in inside)
    own = f'  File "/job/train.py", line {line}, in step\n    x()\n'
    return f"Traceback (most recent call last):\n{own}{frames}RuntimeError: {error}\n"


REDUCE, BARRIER, RECV, SEND = (
    ("distributed/distributed_c10d.py", name) for name in ("all_reduce", "barrier", "recv", "send")
)
BACKWARD = (("_tensor.py", "backward"), ("autograd/graph.py", "_engine_run_backward"))


@pytest.mark.parametrize(
    ("firsts", "lasts", "suspects"),
    [((0, 0, 0), (2, 3, 2), (1,)), ((0, 1, 0), (2, 3, 2), ()), ((0, 0, 0), (2, 3, 3), ()), ((0, 0, 0), (2, 4, 3), ())],
)
def test_the_one_that_logged_a_further_step_is_a_suspect(
    firsts: tuple[int, ...], lasts: tuple[int, ...], suspects: tuple[int, ...], tmp_path: Path
) -> None:
    """It may count steps of its own, as an evaluator does. Not one whose count began elsewhere, nor one of several."""
    ends = (ABORTED, raised(30, REDUCE), raised(41, REDUCE))
    texts = [steps(first, last) + end for first, last, end in zip(firsts, lasts, ends, strict=True)]
    top = judged(tmp_path, *texts)
    assert (top.culprits, top.suspects) == ((), suspects)
    assert top.verdict == ("SKIPPED_COLLECTIVE" if suspects else "SIZE_MISMATCH")


def test_of_two_ranks_nobody_is_ahead(tmp_path: Path) -> None:
    assert judged(tmp_path, steps(0, 2) + ABORTED, steps(0, 3) + raised(30, REDUCE)).culprits == ()


@pytest.mark.parametrize(("other", "culprits"), [(raised(27, *BACKWARD), (1,)), (raised(27, *BACKWARD, REDUCE), ())])
def test_who_is_not_in_the_backward_pass_of_all_others(other: str, culprits: tuple[int, ...], tmp_path: Path) -> None:
    top = judged(tmp_path, raised(27, *BACKWARD), ABORTED, other)
    assert top.culprits == culprits


@pytest.mark.parametrize(("line", "culprits"), [(53, ()), (60, (1,))])
def test_the_stack_of_the_aborted_rank_shows_where_it_was(line: int, culprits: tuple[int, ...], tmp_path: Path) -> None:
    """The fault handler wrote it below gloo's message; at the same line as the others it only noticed."""
    own = ABORTED + FATAL.format(torch=TORCH, line=line).replace(
        "all_reduce", "all_reduce" if line == 53 else "all_gather"
    )
    top = judged(tmp_path, raised(53, REDUCE), own, raised(53, REDUCE))
    assert top.culprits == culprits


@pytest.mark.parametrize(("last", "verdict"), [(RECV, "P2P_CYCLE"), (SEND, "INSUFFICIENT_DATA")])
def test_where_all_receive_nobody_sends(last: tuple[str, str], verdict: str, tmp_path: Path) -> None:
    texts = [raised(20, call, error=TIMED_OUT) for call in (RECV, RECV, last)]
    assert judged(tmp_path, *texts).verdict == verdict


def test_own_wait_for_a_key_of_the_store(tmp_path: Path) -> None:
    lost = "torch.distributed.DistStoreError: wait timeout after 45000ms, keys: /default_pg/0//model-ready"
    own = (
        steps(0, 2)
        + f'Traceback (most recent call last):\n  File "/job/train.py", line 41, in load\n    store.wait([key])\n{lost}\n'
    )
    others = [steps(0, 2) + raised(50, BARRIER, error=TIMED_OUT)] * 2
    top = judged(tmp_path, *others, own)
    assert (top.verdict, top.culprits) == ("STUCK_ON_CPU", (2,))
    assert "model-ready" in top.headline
    assert "train.py:41" in top.headline
