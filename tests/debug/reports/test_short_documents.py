"""What a scheduler's document says without the list or the head around it, and a JSON log of one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run

BATCH = (
    '{"jobName":"ft-7","status":"FAILED","statusReason":"Essential container in task exited",'
    '"attempts":[{"container":{"exitCode":139}}]}'
)
STATUS = (
    "  - type: Failed\n    reason: PyTorchJobFailed\n    message: PyTorchJob bert is failed because 1 Worker replica(s) failed.\n"
    "  replicaStatuses:\n    Worker:\n      failed: 1\n"
)
LINE = '{"level":"ERROR","asctime":"2026-05-12 10:00:00,000","message":"task failed: pod f1-worker-0 OOMKilled"}'


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.json", BATCH, "Essential container in task exited"),
        ("job.yaml", STATUS, "1 Worker replica(s) failed"),
        ("one.json", LINE, "f1-worker-0 OOMKilled"),
    ],
)
def test_it_is_read_and_told_and_accuses_nobody(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    top = diagnose(open_run(str(tmp_path)))[0]
    assert top.verdict == "INSUFFICIENT_DATA"
    assert said in top.headline
    assert not top.culprits


def test_settings_in_json_or_yaml_are_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"hidden_size": 64, "message": 3}')
    (tmp_path / "a.yaml").write_text("kind: ConfigMap\nlevel: 3\n")
    (tmp_path / "job.log").write_text("[rank0]: step 1\n[rank1]: step 1\n")
    assert {log.source for record in open_run(str(tmp_path)).ranks.values() if (log := record.log)} == {"job.log"}
