"""NCCL's own log of its calls: who called otherwise or less, and who never came."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.debug.log_names.test_pods import first_verdict
from titan_ckpt.debug.incident.records import Verdict


def call(rank: int, number: int, op: str = "AllReduce", count: int = 512, comm: str = "0x7f33", size: int = 4) -> str:
    return (
        f"n1:{100 + rank}:{100 + rank} [{rank}] NCCL INFO {op}: opCount {number:x} sendbuff 0x7f recvbuff 0x7f "
        f"count {count} datatype 7 op 0 root 0 comm {comm} [nranks={size}] stream 0x9c\n"
    )


def init(rank: int, name: str = "0x9f", comm: str = "0x7f33", end: str = "Init COMPLETE", device: int = 0) -> str:
    return (
        f"n{rank}:{100 + rank}:{200 + rank} [{device}] NCCL INFO ncclCommInitRank comm {comm} rank {rank} nranks 4 "
        f"cudaDev {device} nvmlDev {device} busId {rank}b000 commId {name} - {end}\n"
    )


def judged(folder: Path, lines: Sequence[str]) -> Verdict:
    (folder / "nccl.log").write_text("".join(lines))
    return first_verdict(folder)


def test_the_rank_that_called_another_operation_is_named(tmp_path: Path) -> None:
    lines = [call(rank, n, "AllGather" if (rank, n) == (2, 9) else "AllReduce") for n in range(10) for rank in range(4)]
    top = judged(tmp_path, lines)
    assert (top.verdict, top.culprits) == ("OP_MISMATCH", (2,))


def test_the_rank_that_called_with_another_size_is_named(tmp_path: Path) -> None:
    lines = [call(rank, n, count=640 if (rank, n) == (1, 9) else 512) for n in range(10) for rank in range(4)]
    top = judged(tmp_path, lines)
    assert (top.verdict, top.culprits) == ("SIZE_MISMATCH", (1,))


def test_a_rank_that_called_less_is_suspected(tmp_path: Path) -> None:
    lines = [call(rank, n) for n in range(10) for rank in range(4) if (rank, n) != (3, 9)]
    top = judged(tmp_path, lines)
    assert (top.verdict, top.culprits, top.suspects) == ("INSUFFICIENT_DATA", (), (3,))


def test_ranks_of_several_hosts_are_those_that_nccl_gives(tmp_path: Path) -> None:
    lines = [init(rank) for rank in range(4)]
    lines += [
        call(rank, n, count=640 if (rank, n) == (2, 4) else 512).replace("n1:", f"n{rank}:").replace(f"[{rank}]", "[0]")
        for n in range(5)
        for rank in range(4)
    ]
    assert judged(tmp_path, lines).culprits == (2,)


def test_calls_of_a_group_share_a_number_and_are_not_compared(tmp_path: Path) -> None:
    lines = [call(rank, 7, "Broadcast", count) for rank in range(4) for count in ((53, 60) if rank else (53, 60, 70))]
    assert not judged(tmp_path, lines).culprits


def test_communicators_without_an_id_are_not_mixed_up(tmp_path: Path) -> None:
    first = [call(rank, 3, comm="0x1") for rank in range(4)]
    other = [call(rank, 3, "AllGather", comm="0x2") for rank in range(2)]
    assert not judged(tmp_path, [*first, *other]).culprits


def test_communicators_with_sends_are_not_compared(tmp_path: Path) -> None:
    lines = [call(rank, n, "Send" if rank % 2 else "Recv") for n in range(4) for rank in range(4)]
    assert not judged(tmp_path, [*lines, *(call(rank, 5, count=rank + 1) for rank in range(4))]).culprits


def test_a_rank_that_never_came_to_the_communicator_is_suspected(tmp_path: Path) -> None:
    top = judged(tmp_path, [init(rank, end="Init START") for rank in range(4) if rank != 1])
    assert (top.culprits, top.suspects) == ((), (1,))


def test_a_communicator_that_was_made_lacks_nobody(tmp_path: Path) -> None:
    assert not judged(tmp_path, [init(rank) for rank in range(4) if rank != 1]).suspects
