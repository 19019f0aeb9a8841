"""The traceback of a rank in the text of an exception that other ranks raise of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import STEPS, first_verdict

RAISED = """Traceback (most recent call last):
  File "/w/train.py", line 61, in main
    dcp.save(state, checkpoint_id=path)
torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([{rank}])
Traceback (most recent call last): (RANK {rank})
  File "/w/fs.py", line 411, in write
    f.write(b)
{error}
"""
OWN = "OSError: [Errno 5] Input/output error"


def culprits(folder: Path, texts: dict[str, str]) -> tuple[int, ...]:
    for name, text in texts.items():
        (folder / name).write_text(STEPS + text)
    return first_verdict(folder).culprits


def test_traceback_of_the_failed_rank_is_its_own(tmp_path: Path) -> None:
    assert culprits(tmp_path, {"rank_0.log": RAISED.format(rank=5, error=OWN)}) == (5,)


def test_all_ranks_may_tell_of_the_same_failure(tmp_path: Path) -> None:
    assert culprits(tmp_path, {f"rank_{rank}.log": RAISED.format(rank=2, error=OWN) for rank in range(4)}) == (2,)


def test_labels_of_the_teller_do_not_hide_it(tmp_path: Path) -> None:
    lines = RAISED.format(rank=3, error=OWN).splitlines()
    text = "".join(f"[rank{rank}]: {line}\n" for rank in (0, 1) for line in lines)
    assert culprits(tmp_path, {"console.log": text}) == (3,)


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [pair.cc:547] Connection closed by peer [10.1.2.3]:40012",
        "TimeoutError: NCCL wait timeout after 1000ms",
    ],
)
def test_failed_rank_that_lost_a_peer_is_no_culprit(tmp_path: Path, error: str) -> None:
    assert culprits(tmp_path, {"rank_0.log": RAISED.format(rank=5, error=error)}) == ()


def test_failed_save_that_the_job_outlived_accuses_nobody(tmp_path: Path) -> None:
    later = "".join(f"step {step} loss 2.5\n" for step in range(4, 8))
    raised = RAISED.format(rank=5, error=OWN)
    assert culprits(tmp_path, {"rank_0.log": raised + later}) == ()
    assert culprits(tmp_path, {"rank_0.log": raised, "rank_5.log": raised + later}) == ()
