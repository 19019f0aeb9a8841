"""Errors on the GPU that NCCL alone reports: they are of the rank that has one of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run

RAISED = (
    '[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File "/job/train.py", line 31, in sync\n'
    "[rank{0}]:     dist.all_reduce(g)\n[rank{0}]: {1}\n"
)
FELT = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.26.2"
OWN = (
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB.",
    "ValueError: NaN in batch",
)


def culprits(errors: dict[int, str], folder: Path) -> tuple[int, ...]:
    steps = "".join(f"[rank{rank}]: step {step}\n" for step in range(3) for rank in range(4))
    (folder / "log.txt").write_text(steps + "".join(RAISED.format(rank, text) for rank, text in errors.items()))
    return diagnose(open_run(str(folder)))[0].culprits


@pytest.mark.parametrize("own", OWN)
def test_the_rank_with_an_error_of_its_own_is_the_cause(own: str, tmp_path: Path) -> None:
    assert culprits({0: FELT, 1: FELT, 3: FELT, 2: own}, tmp_path) == (2,)


def test_an_error_that_most_ranks_feel_accuses_nobody(tmp_path: Path) -> None:
    assert culprits(dict.fromkeys(range(4), FELT), tmp_path) == ()


def test_one_rank_that_alone_has_it_is_the_cause(tmp_path: Path) -> None:
    assert culprits({2: FELT}, tmp_path) == (2,)


def verdict(lines: list[str], folder: Path) -> tuple[str, tuple[int, ...]]:
    steps = "".join(f"[rank{rank}]: step {step}\n" for step in range(3) for rank in range(4))
    (folder / "log.txt").write_text(steps + "".join(f"{line}\n" for line in lines))
    top = diagnose(open_run(str(folder)))[0]
    return top.verdict, top.culprits


@pytest.mark.parametrize("hint", ["", " (run with NCCL_DEBUG=INFO for details)"])
def test_errors_without_tracebacks_that_all_feel(hint: str, tmp_path: Path) -> None:
    """They accuse nobody, and a job that all of them ended of is none that runs."""
    felt = FELT.replace("unhandled cuda error", f"unhandled cuda error{hint}")
    assert verdict([f"[rank{rank}]: {felt}" for rank in range(4)], tmp_path) == ("INSUFFICIENT_DATA", ())


@pytest.mark.parametrize("own", ["torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
                                 "NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus."])  # fmt: skip
def test_the_rank_with_a_fault_of_its_gpu_is_the_cause(own: str, tmp_path: Path) -> None:
    lines = [f"[rank0]: {FELT}", f"[rank2]: {own}", f"[rank2]: {FELT}", f"[rank1]: {FELT}", f"[rank3]: {FELT}"]
    assert verdict(lines, tmp_path) == ("RANK_DIED", (2,))


def test_wrong_usage_of_nccl_is_no_sign_of_a_running_job(tmp_path: Path) -> None:
    usage = (
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        "Last error:",
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
    )
    assert verdict([f"[rank{rank}]: {line}" for rank in range(4) for line in usage], tmp_path) == (
        "INSUFFICIENT_DATA",
        (),
    )
    assert verdict([f"[rank1]: {line}" for line in usage], tmp_path)[1] == ()
    assert verdict([], tmp_path)[0] == "RUNNING"
