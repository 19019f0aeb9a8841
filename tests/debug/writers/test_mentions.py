"""Sentences about a log: comments and code in a text name ranks, and are no rank's lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run

STEPS = "".join(f"[rank{rank}]: step {step}\n" for step in range(5) for rank in range(4))


@pytest.mark.parametrize(
    "mention",
    [
        "If the log shows `[rank3]: torch.OutOfMemoryError: CUDA out of memory.` lower the batch size.\n",
        "[rank0]: # known issue: rank 1: Segmentation fault (core dumped) with driver 535, see TICKET-12\n",
        "# rank 1 died here once: RuntimeError: CUDA error: an illegal memory access was encountered\n",
    ],
)
def test_who_is_mentioned_did_not_fail(mention: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(mention + STEPS)
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == ("RUNNING", ())


def test_back_quotes_of_an_error_hide_nothing(tmp_path: Path) -> None:
    raised = (
        '[rank3]: Traceback (most recent call last):\n[rank3]:   File "/job/train.py", line 6, in <module>\n'
        "[rank3]:     check(data)\n[rank3]: ValueError: `data` must not be empty on `rank` 3\n"
    )
    (tmp_path / "log.txt").write_text(STEPS + raised)
    assert diagnose(open_run(str(tmp_path)))[0].culprits == (3,)
