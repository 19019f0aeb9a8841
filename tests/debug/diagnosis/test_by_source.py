"""Logs alone: peers and groups that the source lines in tracebacks name, and ranks that count their steps otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run
from titan_ckpt.debug.diagnosis.from_logs.by_source import Half, half_of, names_group

C10D = "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
ERROR = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 45000ms for {} operation to complete"
ABORTED = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 388 vs 4. Received data size "
    "doesn't match expected size.\n"
)


@pytest.mark.parametrize(
    ("text", "half"),
    [
        ("dist.recv(x, rank - 1)  # from the stage before", Half(is_send=False, peer=1)),
        ("dist.send(tensor=x, dst=(rank + 1) % world_size)", Half(is_send=True, peer=3)),
        ("work = dist.isend(x, rank ^ 1)", Half(is_send=True, peer=3)),
        ("torch.distributed.irecv(x, src=dist.get_rank() // 2)", Half(is_send=False, peer=1)),
        ("recv_object_list(found, src=rank + 1)", Half(is_send=False, peer=3)),
        ("dist.recv(x, self.rank + 1)", Half(is_send=False, peer=None)),  # of which group is it the rank?
        ("dist.recv(x, rank - 1, pipeline)", Half(is_send=False, peer=None)),
        ("dist.recv(x, src=rank - 1, group=pipeline)", Half(is_send=False, peer=None)),
        ("self.comm.recv(x, rank - 1)", None),
        ("if rank > 0: dist.recv(x, dist.get_world_size() - 4)", Half(is_send=False, peer=0)),
        ("dist.recv(x, other)", Half(is_send=False, peer=None)),
        ("dist.recv(x)", Half(is_send=False, peer=None)),
        ("dist.recv(x, rank)", Half(is_send=False, peer=None)),
        ("dist.recv(x, 7)", Half(is_send=False, peer=None)),
        ("dist.recv(x, rank // 0)", Half(is_send=False, peer=None)),
        ("dist.recv(x, rank % 0)", Half(is_send=False, peer=None)),
        ("dist.recv(x, True)", Half(is_send=False, peer=None)),
        ("dist.recv(x, -1)", Half(is_send=False, peer=None)),
        ("dist.recv(x, 9 ** 9 ** 9)", Half(is_send=False, peer=None)),
        ("dist.send(x, 0), dist.recv(y, 1)", None),
        ("dist.recv(", None),
        ("dist.all_reduce(x)", None),
        ("(" * 5000, None),
    ],
)
def test_peer_in_a_source_line(text: str, half: Half | None) -> None:
    assert half_of(text, 2, 4) == half


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("dist.all_reduce(x)", ("all_reduce", False)),
        ("dist.all_reduce(x, dist.ReduceOp.MAX)", ("all_reduce", False)),
        ("dist.all_reduce(x, dist.ReduceOp.MAX, pair)", ("all_reduce", True)),
        ("dist.all_reduce(x, group=None)", ("all_reduce", False)),
        ("torch.distributed.barrier(self.group)", ("barrier", True)),
        ("dist.broadcast(x, 0)", ("broadcast", False)),
        ("dist.broadcast(x, src=0, group=g)", ("broadcast", True)),
        ("dist.all_reduce(x, **options)", None),
        ("dist.all_reduce(*args)", None),
        ("reduce_gradients(x)", None),
        ("self.comm.all_reduce(x)", None),
    ],
)
def test_group_in_a_source_line(text: str, found: tuple[str, bool] | None) -> None:
    assert names_group(text) == found


def steps(first: int, last: int, began: int = 0) -> str:
    """Steps of one second each; the one numbered `began` is the first of the job."""
    return "".join(
        f"2026-11-22 10:17:{30 + step - began},320 INFO train: step {step} loss 1.0\n"
        for step in range(first, last + 1)
    )


def waited(line: int, source: str, call: str, last: int = 2) -> str:
    """The log of a rank that gave up in `call`, which the program's `source` at `line` made."""
    error = ERROR.format("send" if "send" in call else "recv")
    return steps(0, last) + (
        f'Traceback (most recent call last):\n  File "/job/train.py", line {line}, in step\n    {source}\n'
        f'  File "{C10D}", line 99, in {call}\n    work.wait()\n    ^^^^^^^^^^^\nRuntimeError: {error}\n'
    )


def judged(folder: Path, *texts: str) -> Verdict:
    for rank, text in enumerate(texts):
        (folder / f"rank_{rank}.log").write_text(text)
    return diagnose(open_run(str(folder)))[0]


FROM_BEFORE, TO_TARGET = waited(20, "dist.recv(x, rank - 1)", "recv"), waited(30, "dist.send(x, target)", "send")


def test_a_send_past_the_rank_that_waits_for_it(tmp_path: Path) -> None:
    top = judged(tmp_path, TO_TARGET, TO_TARGET, FROM_BEFORE, FROM_BEFORE)
    assert (top.verdict, top.culprits, top.line) == ("P2P_MISSING_PEER", (1,), 30)


@pytest.mark.parametrize(
    "logs",
    [
        (
            TO_TARGET,
            TO_TARGET,
            waited(20, "dist.recv(x, before)", "recv"),
            FROM_BEFORE,
        ),  # who waits for whom is not known
        (TO_TARGET, waited(30, "dist.send(x, rank + 1)", "send"), FROM_BEFORE, FROM_BEFORE),  # they would have met
        (
            TO_TARGET,
            waited(30, "dist.send(x, target)", "send", last=1),
            FROM_BEFORE,
            FROM_BEFORE,
        ),  # slow, and on its way
        (TO_TARGET, FROM_BEFORE, TO_TARGET, FROM_BEFORE),  # two such pairs: nothing tells which one began
        (
            TO_TARGET,
            waited(40, "dist.all_reduce(x)", "all_reduce"),
            FROM_BEFORE,
            FROM_BEFORE,
        ),  # an extra recv, or a missing send
        (FROM_BEFORE, FROM_BEFORE, TO_TARGET, "step 2\n"),  # of one rank it is not known where it is
    ],
)
def test_source_lines_that_do_not_show_who_is_wrong(logs: tuple[str, ...], tmp_path: Path) -> None:
    top = judged(tmp_path, *logs)
    assert not top.culprits or not top.verdict.startswith("P2P")


def test_two_that_receive_from_each_other(tmp_path: Path) -> None:
    other = waited(20, "dist.recv(x, rank ^ 1)", "recv")
    barrier = waited(50, "dist.barrier()", "barrier")
    top = judged(tmp_path, other, other, barrier, barrier)
    assert (top.verdict, top.culprits) == ("P2P_CYCLE", (0, 1))


@pytest.mark.parametrize(("lines", "culprits"), [((20, 20, 20), (0, 1, 2)), ((20, 25, 20), ())])
def test_a_circle_of_three(lines: tuple[int, ...], culprits: tuple[int, ...], tmp_path: Path) -> None:
    """At different lines one of them may have left the order of the others."""
    ring = (waited(line, "dist.send(x, (rank + 1) % 3)", "send") for line in lines)
    barrier = waited(50, "dist.barrier()", "barrier")
    assert judged(tmp_path, *ring, barrier).culprits == culprits


BARE, OF_PAIR = "dist.all_reduce(x)", "dist.all_reduce(x, group=pair)"
BARRIER = waited(60, "dist.barrier()", "barrier", last=3)


@pytest.mark.parametrize(
    ("first", "second", "later", "culprits"),
    [
        ((40, OF_PAIR), (50, BARE), BARRIER, (1,)),
        ((40, BARE), (50, OF_PAIR), BARRIER, (0,)),
        ((40, OF_PAIR), (50, BARE), waited(60, "dist.barrier()", "barrier"), ()),  # nobody has passed that step
        ((40, BARE), (50, BARE), BARRIER, ()),
        ((40, OF_PAIR), (50, OF_PAIR), BARRIER, ()),
    ],
)
def test_who_names_no_group_where_another_names_one(
    first: tuple[int, str], second: tuple[int, str], later: str, culprits: tuple[int, ...], tmp_path: Path
) -> None:
    behind = [waited(line, source, source.partition("(")[0].removeprefix("dist.")) for line, source in (first, second)]
    top = judged(tmp_path, *behind, later, later)
    assert top.culprits == culprits
    assert (top.verdict == "WRONG_GROUP") == bool(culprits)


@pytest.mark.parametrize(
    ("counted", "at", "culprits"),
    [
        ((-1, 2, -1), 30, (2,)),
        ((100, 103, 100), 30, (2,)),
        ((-1, 2, -1), 20, ()),  # where another one is, too
        ((-1, 2, 0), 30, ()),  # a step behind, and the begin of its log is cut off
        ((0, 3, 0), 30, ()),
        ((0, 2, 0), 30, ()),
        ((-1, 3, -1), 30, ()),
    ],
)
def test_a_rank_that_counts_its_steps_otherwise(
    counted: tuple[int, int, int], at: int, culprits: tuple[int, ...], tmp_path: Path
) -> None:
    """From another first step on, as after another checkpoint: it did not come to the save of step 3."""
    closed = waited(20, "dist.gather(x)", "gather", last=-1).replace(
        "Timed out", "Connection closed by peer. Timed out"
    )
    aborted, usual = steps(0, 3) + ABORTED, steps(0, 3) + closed
    assert (
        judged(tmp_path, aborted, usual, steps(*counted) + closed.replace("line 20", f"line {at}")).culprits == culprits
    )
