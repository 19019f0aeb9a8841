"""Logs of Vertex AI: its worker pools, whose first one is a single primary replica, and its workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run


def entry(task: str, message: str, second: int) -> str:
    """A line as `gcloud logging read --format=json` prints an entry of a custom job."""
    labels = {"labels": {"task_name": task}, "type": "ml_job"}
    at = f"2026-11-28T08:00:{second:02d}Z"
    return json.dumps({"jsonPayload": {"message": f"{message}\n"}, "resource": labels, "timestamp": at})


@pytest.mark.parametrize(("replica", "rank"), [("workerpool0-0", 0), ("workerpool1-0", 1), ("workerpool1-2", 3)])
def test_workers_count_after_the_primary_replica(replica: str, rank: int, tmp_path: Path) -> None:
    others = [name for name in ("workerpool0-0", "workerpool1-0", "workerpool1-2") if name != replica]
    killed = f"The replica {replica} ran out-of-memory and exited with a non-zero status of 137(SIGKILL)."
    lines = [entry(replica, "step 5", 1), *(entry(name, "step 5", 1) for name in others), entry("service", killed, 9)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert diagnose(open_run(str(tmp_path)))[0].culprits == (rank,)


def test_a_third_pool_is_of_no_known_rank(tmp_path: Path) -> None:
    killed = "The replica workerpool2-0 ran out-of-memory and exited with a non-zero status of 137(SIGKILL)."
    lines = [entry("workerpool0-0", "step 5", 1), entry("workerpool1-0", "step 5", 1), entry("service", killed, 9)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert diagnose(open_run(str(tmp_path)))[0].culprits == ()
