"""Texts of jobs that are over: what was handled before they ended well is history, what ended them is not. Lines in the form of
Lightning's Trainer, Transformers' Trainer, Megatron-LM, vLLM, NCCL and CPython; none is copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.report.action import ActionKind, action_for

STEPS = "".join(f"[rank{rank}]: step {step} loss 2.1\n" for step in range(3) for rank in range(4))
RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 30, in find\n    loss = model(batch)\n{}\n'
OOM = RAISED.format("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.")
IGNORED = "Exception ignored in: <function _ConnectionBase.__del__ at 0x7f>\n" + RAISED.format(
    "AssertionError: no child"
)
XID = "[Wed Oct 23 01:34:20 2025] NVRM: Xid (PCI:0000:9b:00): 13, pid=999, name=other, Graphics SM Warp Exception\n"
QUOTED = (
    "[rank0]: before: RuntimeError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.\n"
)  # fmt: skip
DONE = "Training completed successfully.\n"
WELL = {
    "a destructor that fails": STEPS + IGNORED + DONE,
    "a destructor that fails while it trains": STEPS + IGNORED,
    "a quoted error": QUOTED + STEPS,
    "a quoted error, two ranks": QUOTED + STEPS.replace("[rank2]", "[rank0]").replace("[rank3]", "[rank1]") + DONE,
    "another job's error": STEPS + XID + DONE,
    "a batch size that was too large": "Trying 64\n" + OOM + "`Trainer.fit` stopped: `max_epochs=1` reached.\n",
    "Megatron": " iteration      100/     150 | lm loss: 2.1E+00 |\n [exiting program at iteration 150] datetime: 2025-10-23 \n",
    "Megatron, while it trains": " iteration      100/     150 | lm loss: 2.1E+00 | number of nan iterations:   1 |\n",
    "Trainer": "{'loss': 2.0, 'epoch': 0.02}\n",
    "Trainer, done": "{'loss': 2.0, 'epoch': 0.02}\n{'train_runtime': 1234.5, 'train_loss': 2.0, 'epoch': 1.0}\n",
}  # fmt: skip
PROXY = "n1:672{0}:717{0} [{0}] NCCL WARN [Proxy Service {0}] Failed to execute operation Connect from rank {0}, retcode 3\n"
ILL = {
    "vLLM": "(VllmWorker rank=0 pid=41) INFO 10-23 02:40:11 weights\nERROR 10-23 02:44:30 [multiproc_executor.py:140] Worker "
    "proc VllmWorker-3 died unexpectedly, shutting down executor.\n",
    "NCCL's proxy": STEPS + "".join(PROXY.format(rank) for rank in (0, 1, 3)),
    "an error after the end": DONE + OOM,
    "a spot instance": STEPS + "EC2 Spot Instance Interruption Notice received, action=terminate\n",
    "a launcher that was told to end": STEPS + "W1023 02:46:12.1 4 torch/distributed/elastic/agent/server/api.py:704] Received "
    "Signals.SIGTERM death signal, shutting down workers\n",
    "another job's error, no end": STEPS + XID,
}  # fmt: skip


def judged(folder: Path, text: str) -> tuple[Verdict, ActionKind]:
    (folder / "console.log").write_text(text)
    run = open_run(str(folder))
    top = diagnose(run)[0]
    return top, action_for(run, top).action


@pytest.mark.parametrize("name", WELL)
def test_what_a_job_outlived_is_no_fault(name: str, tmp_path: Path) -> None:
    top, action = judged(tmp_path, WELL[name])
    assert (top.verdict, action) == (VerdictKind.RUNNING, ActionKind.NONE)


@pytest.mark.parametrize("name", ILL)
def test_text_that_ends_in_an_error_does_not_run(name: str, tmp_path: Path) -> None:
    top, _ = judged(tmp_path, ILL[name])
    assert top.verdict not in (VerdictKind.RUNNING, VerdictKind.HEALTHY)
    assert not any("while the job still hangs" in step for step in top.next_steps)


def test_mismatch_of_unknown_ranks_is_no_reason_to_restart(tmp_path: Path) -> None:
    sizes = "RuntimeError: [enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"
    text = STEPS + "".join(f"[rank1]: {line}\n" for line in RAISED.format(sizes).splitlines())
    top, action = judged(tmp_path, text)
    assert (top.verdict, top.culprits, action) == (VerdictKind.SIZE_MISMATCH, (), ActionKind.NONE)


def test_scheduler_that_ends_a_job_is_no_fault(tmp_path: Path) -> None:
    limit = "slurmstepd: error: *** JOB 113 ON n1 CANCELLED AT 2025-10-23T02:44:30 DUE TO TIME LIMIT ***\n"
    top, action = judged(tmp_path, STEPS + limit)
    assert "no fault of a rank" in top.headline
    assert (top.verdict, action) == (VerdictKind.INSUFFICIENT_DATA, ActionKind.NONE)


@pytest.mark.parametrize("first", ['{"loss": 2.0, "step": 1}', "{'loss': 2.0, 'epoch': 0.02}", "{"])
def test_log_that_begins_like_json_is_a_log(first: str, tmp_path: Path) -> None:
    raised = "".join(f"[rank1]: {line}\n" for line in RAISED.format("KeyError: 'x'").splitlines())
    assert judged(tmp_path, first + "\n" + STEPS + raised)[0].culprits == (1,)


CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:56982. Check the logs."


def of_rank(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def test_rank_that_says_it_is_done_finished_early(tmp_path: Path) -> None:
    waits = "".join(of_rank(rank, RAISED.format(CLOSED)) for rank in (0, 2, 3))
    top, action = judged(tmp_path, STEPS + "[rank1]: training done\n" + waits)
    assert (top.verdict, top.subtype, top.culprits) == ("SKIPPED_COLLECTIVE", "finished_early", (1,))
    assert (action, top.confidence >= 0.6) == (ActionKind.STOP, True)


def test_line_of_the_program_in_a_traceback_that_is_cut_off(tmp_path: Path) -> None:
    library = (
        RAISED.format("").replace("/job/train.py", "/env/lib/python3.11/site-packages/torch/serialization.py").rstrip()
        + "\n"
    )
    text = (
        library + "RuntimeError: basic_ios::clear: iostream error\n\nDuring handling of the above exception, another exception "
        'occurred:\n\nTraceback (most recent call last):\n  File "/job/train.py", line 30, in <module>\n'
        '  File "/job/io.py", line 7, in s'
    )  # fmt: skip
    top, _ = judged(tmp_path, STEPS + of_rank(0, text))
    assert (top.culprits, top.file, top.line) == ((0,), "/job/io.py", 7)


def test_size_that_nobody_owns_up_to_names_the_facts(tmp_path: Path) -> None:
    sizes = "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 388 vs 4. Received data"
    text = STEPS + f"[rank1]: {sizes}\n" + "".join(of_rank(rank, RAISED.format(CLOSED)) for rank in (0, 2, 3))
    top, _ = judged(tmp_path, text)
    assert (top.verdict, top.culprits) == (VerdictKind.SIZE_MISMATCH, ())
    assert "388 bytes, more than the 4" in top.headline
    assert any(item.text == "ranks 0, 2, 3: in a call at /job/train.py:30" for item in top.evidence)


AGENT = "1122 15:3{0}:20.525000 24734 torch/distributed/elastic/multiprocessing/api.py:1028] "
SENDING = "W" + AGENT + "Sending process {1} closing signal SIGTERM\n"
FAILED = "E" + AGENT + "failed (exitcode: 1) local_rank: {1} (pid: {2}) of binary: python\n"
LISTED = "  time      : 2026-11-22_15:35:04\n  rank      : {0} (local_rank: {0})\n  exitcode  : {1} (pid: 2670{0})\n"


def test_restart_that_torchrun_does_not_log_makes_no_more_ranks(tmp_path: Path) -> None:
    (tmp_path / "console.log").write_text(
        SENDING.format(3, 24859) + SENDING.format(3, 24861) + FAILED.format(3, 1, 24860) + SENDING.format(5, 26701)
        + SENDING.format(5, 26702) + FAILED.format(5, 0, 26700) + "ChildFailedError:\n" + LISTED.format(1, 143)
        + LISTED.format(2, 143) + "Root Cause (first observed failure):\n" + LISTED.format(0, 1)
    )  # fmt: skip
    assert open_run(str(tmp_path)).world_size == 3


API = "I0302 10:02:00.1 991 torch/distributed/elastic/agent/server/api.py:{}\n"
FINISHED = API.format(
    "933] [default] worker group successfully finished. Waiting 300 seconds for other agents to finish."
)
MET = API.format("1000] Done waiting for other agents. Elapsed: 0.01 seconds")
WORKER = (
    "E0302 10:00:02.9 991 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {}) local_rank: 1 "
    "(pid: 41) of binary: python\n"
)
RESTARTED = API.format("942] [default] Worker group FAILED. 2/3 attempts left; will restart worker group")


@pytest.mark.parametrize(
    ("console", "verdict"),
    [
        (FINISHED + MET, VerdictKind.HEALTHY),
        (WORKER.format(-9) + RESTARTED + STEPS + FINISHED + MET, VerdictKind.HEALTHY),
        (FINISHED, VerdictKind.RUNNING),
        (FINISHED + MET + WORKER.format(3), VerdictKind.RANK_DIED),
    ],
)
def test_an_agent_that_met_the_others_ends_the_job_well(console: str, verdict: VerdictKind, tmp_path: Path) -> None:
    """torch/distributed/elastic/agent/server/api.py: an agent comes to the exit barrier only if its workers gave 0."""
    (tmp_path / "console.log").write_text(STEPS + console)
    assert diagnose(open_run(str(tmp_path)))[0].verdict == verdict


def test_training_done_says_nothing_of_the_processes(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(STEPS + "".join(f"[rank{rank}]: Training completed\n" for rank in range(4)))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, "launcher's exit code" in top.next_steps[0]) == (VerdictKind.RUNNING, True)
