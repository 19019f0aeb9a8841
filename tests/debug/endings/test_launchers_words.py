"""What launchers and job services say at the end: Hydra's clean-up, composer's crashed rank, AWS Batch, Kubeflow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import STEPS, first_verdict

BLOCK = (
    "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK {} PID 549{} RUNNING AT gn59\n"
    "=   KILLED BY SIGNAL: {}\n{}\n"
)
RULE = "=" * 83


def hydra(*signals: str) -> str:
    return "".join(BLOCK.format(rank, rank, signal, RULE) for rank, signal in enumerate(signals))


@pytest.mark.parametrize(
    ("signals", "culprits"),
    [
        (("9 (Killed)", "9 (Killed)", "11 (Segmentation fault)", "9 (Killed)"), (2,)),
        (("9 (Killed)", "9 (Killed)"), ()),
        (("9 (Killed)",), (0,)),
    ],
)
def test_hydra_kills_those_that_are_left(signals: tuple[str, ...], culprits: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "console.txt").write_text(STEPS + hydra(*signals))
    top = first_verdict(tmp_path)
    assert top.culprits == culprits
    assert top.verdict not in ("HEALTHY", "RUNNING")


def test_hydra_without_a_rank_is_no_running_job(tmp_path: Path) -> None:
    text = f"{STEPS}=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 28488 RUNNING AT cn4\n=   EXIT CODE: 9\n"
    (tmp_path / "console.txt").write_text(f"{text}Please see the FAQ page for debugging suggestions\n")
    assert first_verdict(tmp_path).verdict == "INSUFFICIENT_DATA"


def test_composer_names_the_rank_that_crashed(tmp_path: Path) -> None:
    ends = "".join(f"Global rank {rank} (PID 4021{rank}) exited with code -15\n" for rank in (0, 1, 3))
    (tmp_path / "console.txt").write_text(
        f"{STEPS}ERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.\n{ends}"
    )
    top = first_verdict(tmp_path)
    assert (top.verdict, top.culprits, top.signal) == ("RANK_DIED", (2,), "SIGBUS")


def test_azure_says_that_the_job_failed(tmp_path: Path) -> None:
    said = "AzureMLCompute job failed\nJobContainerTerminated: \n\terror_code: JobOutOfMemory\n\texit_codes: 137\n"
    (tmp_path / "console.txt").write_text(STEPS + said)
    top = first_verdict(tmp_path)
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())
    assert "AzureMLCompute job failed" in top.headline


JOB = {"jobName": "pretrain", "status": "FAILED", "statusReason": "Host EC2 (instance i-0a8) terminated."}
WELL = {"jobName": "pretrain", "status": "SUCCEEDED", "attempts": [{"container": {"exitCode": 0}}]}
KUBEFLOW = {
    "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob",
    "status": {"conditions": [{"message": "PyTorchJob llm is failed because 1 Worker replica(s) failed."}]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("document", "verdict", "fact"),
    [
        ({"jobs": [JOB]}, "INSUFFICIENT_DATA", "pretrain is FAILED: Host EC2"), ({"jobs": [WELL]}, "HEALTHY", ""),
        (KUBEFLOW, "INSUFFICIENT_DATA", "is failed because 1 Worker"),
    ],
)  # fmt: skip
def test_a_job_services_document_is_read(document: object, verdict: str, fact: str, tmp_path: Path) -> None:
    (tmp_path / "describe.json").write_text(json.dumps(document, indent=2))
    top = first_verdict(tmp_path)
    assert (top.verdict, top.culprits) == (verdict, ())
    assert fact in top.headline


def test_a_kubeflow_job_in_yaml_is_read(tmp_path: Path) -> None:
    lines = (
        "apiVersion: kubeflow.org/v1", "kind: PyTorchJob", "status:", "  conditions:",
        "  - message: PyTorchJob llm is failed because 1 Worker replica(s) failed.",
    )  # fmt: skip
    (tmp_path / "job.yaml").write_text("\n".join(lines) + "\n")
    assert "is failed because" in first_verdict(tmp_path).headline


def test_a_traceback_in_a_warning_is_no_death(tmp_path: Path) -> None:
    skipped = (
        "Traceback (most recent call last):", '  File "/w/train.py", line 88, in step', "    loss = step(batch)",
        "PIL.UnidentifiedImageError: cannot identify image file",
    )  # fmt: skip
    steps = "".join(f"[rank0] iter {n}: loss 2.7\n" for n in range(9))
    (tmp_path / "log.txt").write_text(
        steps + "".join(f"[rank3] WARNING skipped sample 8812: {line}\n" for line in skipped) + steps
    )
    assert first_verdict(tmp_path).culprits == ()


def test_a_watchdogs_line_that_is_cut_off_is_no_running_job(tmp_path: Path) -> None:
    cut = (
        "[rank0]:[E1008 03:12:44.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=512, NumelOut=512, Timeout(ms"
    )
    (tmp_path / "log.txt").write_text(STEPS + cut)
    top = first_verdict(tmp_path)
    assert (top.verdict, top.culprits) == ("INSUFFICIENT_DATA", ())


def test_a_store_that_most_ranks_lost_is_no_running_job(tmp_path: Path) -> None:
    lost = (
        "[W701 22:10:04.1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=91): failed to recv, got 0 bytes"
    )
    text = "".join(f"[rank{rank}] rank {rank}/4\n" for rank in range(4))
    (tmp_path / "log.txt").write_text(text + "".join(f"[rank{rank}]:{lost}\n" for rank in (1, 2, 3)))
    assert first_verdict(tmp_path).verdict == "INSUFFICIENT_DATA"
