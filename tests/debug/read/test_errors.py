"""Errors that a rank raises: the program's own, its GPU's, or the symptom of a peer's trouble. The words are those of CUDA's
cudaGetErrorString, NCCL's src/init.cc and src/debug.cc, torch's NCCLUtils.hpp, TCPStore and ProcessGroupGloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run
from titan_ckpt.debug.report.action import ActionKind, action_for

STEPS = "".join(f"[rank{rank}]: step {step} loss 2.1\n" for step in range(3) for rank in range(4))
CUDA = "torch.AcceleratorError: CUDA error: "
NCCL = "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:93, {} (run with NCCL_DEBUG=INFO for details)"
CALL = NCCL.format("unhandled cuda error") + "\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"
)
DEVICE = [
    CUDA + "uncorrectable ECC error encountered",
    CUDA + "uncorrectable NVLink error detected during the execution",
    "RuntimeError: CUDA error: GPU is lost",
    "RuntimeError: Unable to determine the device handle for GPU0000:9B:00.0: Unknown Error",
    CUDA + "unspecified launch failure",
    "RuntimeError: CUDA error: 719",
    "RuntimeError: CUDA error: unknown error",
    "RuntimeError: HIP error: unspecified launch failure",
    "RuntimeError: CUDA driver error: CUDA_ERROR_ECC_UNCORRECTABLE",
    "RuntimeError: GPU 3 (0000:9b:00.0) is no longer reachable",
    "RuntimeError: CUDA error: system not yet initialized",
    NCCL.format("unhandled cuda error"),
    CALL + "Cuda failure 719 'unspecified launch failure'",
    CALL + "Cuda failure 'uncorrectable ECC error encountered'",
]
PROGRAM = [
    "RuntimeError: DataLoader timed out after 120 seconds",
    "subprocess.TimeoutExpired: Command '['aws', 's3', 'cp']' timed out after 300 seconds",
    CUDA + "device-side assert triggered",
    CUDA + "an illegal memory access was encountered",
    CALL + "Cuda failure 700 'an illegal memory access was encountered'",
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, "
    "useIpv6: true, code: -98, name: EADDRINUSE, message: address already in use",
    NCCL.format("invalid usage")
    + "\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a000",
    "RuntimeError: ProcessGroupGloo::scatter: Incorrect input list size 2. Input list size should be 3.",
]
MEMORY = [
    CALL + "Cuda failure 2 'out of memory'",
    NCCL.format("unhandled system error") + "\nncclSystemError: System call failed.\nLast error:\n"
    "Error while creating shared memory segment /dev/shm/nccl-1nBRcE (size 9637888)",
]  # fmt: skip
PEERS = [
    NCCL.format("remote process exited or there was a network error") + "\nncclRemoteError: A call failed.\nLast error:\n"
    "socketProgress: Connection closed by remote peer node2<41870>",
    NCCL.format("unhandled system error") + "\nncclSystemError: System call failed.\nLast error:\n"
    "socketStartConnect: Connect to 10.0.0.7<51111> failed : Connection refused",
]  # fmt: skip


def raised(error: str, rank: int) -> str:
    lines = [
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 88, in step',
        "    loss()",
        *error.split("\n"),
    ]
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


def judged(folder: Path, text: str) -> tuple[Verdict, ActionKind]:
    (folder / "console.log").write_text(text)
    run = open_run(str(folder))
    top = diagnose(run)[0]
    return top, action_for(run, top).action


@pytest.mark.parametrize("error", DEVICE)
def test_gpu_that_fails_is_no_error_of_the_program(error: str, tmp_path: Path) -> None:
    top, action = judged(tmp_path, STEPS + raised(error, 2) + raised(TIMED_OUT, 1))
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "device", (2,))
    assert action == ActionKind.RESTART


@pytest.mark.parametrize("error", PROGRAM + MEMORY)
def test_own_error_is_no_wait_for_peers(error: str, tmp_path: Path) -> None:
    top, action = judged(tmp_path, STEPS + raised(error, 2) + raised(TIMED_OUT, 1))
    is_port = "EADDRINUSE" in error  # its other holder may go away
    subtype = "oom" if error in MEMORY else "" if is_port else "python_exception"
    expected = ActionKind.RESTART if is_port else ActionKind.STOP
    assert (top.verdict, top.subtype, top.culprits, action) == ("RANK_DIED", subtype, (2,), expected)


@pytest.mark.parametrize("error", PEERS)
def test_last_line_of_nccl_names_a_peer(error: str, tmp_path: Path) -> None:
    top, _ = judged(tmp_path, STEPS + "".join(raised(error, rank) for rank in (0, 1, 3)))
    assert set(top.culprits) <= {2}


def test_gpu_errors_of_several_ranks_are_one_verdict(tmp_path: Path) -> None:
    top, _ = judged(tmp_path, STEPS + raised(DEVICE[1], 2) + raised(DEVICE[1], 3))
    assert (top.subtype, top.culprits) == ("device", (2, 3))


# ------------------------------------------------------------------------------------- errors without a traceback

AGENT = (
    "E1124 03:00:01.100000 4000 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: {code}) "
    "local_rank: {rank} (pid: 90{rank}) of binary: /opt/venv/bin/python\n"
)
TOLD = "".join(
    "W1124 03:00:00.900000 4000 torch/distributed/elastic/multiprocessing/api.py:908] "
    f"Sending process 90{rank} closing signal SIGTERM\n"
    for rank in range(3)
)
ALONE = [
    "ValueError: bad shape (3, 4)",
    "AssertionError",
    "mypkg.errors.DataCorruption: shard 7",
    "huggingface_hub.utils._errors.HfHubHTTPError: 503",
]
LONG = [
    'RuntimeError: Error(s) in loading state_dict for Net:\n[rank3]: \tMissing key(s) in state_dict: "a.b".',
    "RuntimeError: CUDA error: an illegal memory access was encountered\n[rank3]: CUDA kernel errors might be asynchronously "
    "reported at some other API call, so the stacktrace below might be incorrect.\n[rank3]: Compile with `TORCH_USE_CUDA_DSA`.",
]
SYSTEM = "RuntimeError: NCCL error: unhandled system error, NCCL version 2.14.3"
CLOSED = NCCL.format("remote process exited or there was a network error")


def alone(rank: int, error: str) -> str:
    return f"[rank{rank}]: {error}\n"


@pytest.mark.parametrize("error", [*ALONE, *LONG, "2026-11-24 03:00:00,123 - train - ERROR - ValueError: bad"])
def test_error_without_traceback_and_exit_code_is_a_death(error: str, tmp_path: Path) -> None:
    top, _ = judged(tmp_path, STEPS + alone(3, error) + TOLD + AGENT.format(code=1, rank=3))
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "python_exception", (3,))


LOGGED = "2026-11-24 03:00:00,123 - train - ERROR - ValueError: bad"


@pytest.mark.parametrize("error", [*ALONE, LOGGED])
def test_last_error_without_exit_code_is_a_suspicion(error: str, tmp_path: Path) -> None:
    top, _ = judged(tmp_path, STEPS + alone(3, error))
    assert (top.verdict, top.culprits, top.suspects) == ("INSUFFICIENT_DATA", (), (3,))
    assert error.rpartition(" - ")[2] in " ".join(item.text for item in top.evidence)


@pytest.mark.parametrize("error", [*ALONE, SYSTEM])
def test_error_after_which_the_rank_trains_is_no_death(error: str, tmp_path: Path) -> None:
    top, _ = judged(tmp_path, STEPS + alone(3, error) + STEPS.replace("step ", "step 1"))
    assert (top.verdict, top.culprits, top.suspects) == ("RUNNING", (), ())


def test_error_that_was_outlived_before_is_a_habit(tmp_path: Path) -> None:
    retry = alone(3, "OSError: read timed out, retrying")
    top, _ = judged(tmp_path, STEPS + retry + STEPS.replace("step ", "step 1") + retry)
    assert (top.verdict, top.suspects) == ("RUNNING", ())


def test_error_caught_without_steps_accuses_no_victim(tmp_path: Path) -> None:
    steps = STEPS.replace("step", "batch")
    victims = "".join(alone(rank, CLOSED) + AGENT.format(code=1, rank=rank) for rank in (0, 1, 3))
    top, _ = judged(tmp_path, steps + alone(3, "OSError: read failed, using the cache") + victims)
    assert set(top.culprits) <= {2}


def test_peers_closed_connections_are_no_cause_of_an_error(tmp_path: Path) -> None:
    victims = "".join(alone(rank, CLOSED) for rank in (0, 1))
    top, _ = judged(tmp_path, STEPS + alone(3, ALONE[0]) + victims + TOLD + AGENT.format(code=1, rank=3))
    assert (top.verdict, top.culprits) == ("RANK_DIED", (3,))


def test_nccl_error_that_says_nothing_accuses_nobody(tmp_path: Path) -> None:
    top, _ = judged(tmp_path, STEPS + "".join(alone(rank, SYSTEM) for rank in (0, 1, 3)))
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())
    assert SYSTEM in " ".join(item.text for item in top.evidence)


def test_equal_errors_of_all_ranks_are_one_verdict(tmp_path: Path) -> None:
    errors = "".join(alone(rank, ALONE[0]) + AGENT.format(code=1, rank=rank) for rank in range(4))
    top, _ = judged(tmp_path, STEPS + errors)
    assert (top.verdict, top.culprits, top.victims) == ("RANK_DIED", (), (0, 1, 2, 3))
    assert top.headline.startswith("all 4 ranks died, none of them alone at fault: they raised an exception")


def test_nobodys_error_is_of_the_one_rank_that_raised(tmp_path: Path) -> None:
    top, _ = judged(tmp_path, "step 1\nstep 2\n" + ALONE[0] + "\n" + TOLD + AGENT.format(code=1, rank=3))
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "python_exception", (3,))
