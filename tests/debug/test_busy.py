"""What the analyzer reports for a rank that is busy outside collectives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.busy_with import busy_with
from titan_ckpt.debug.incident.records import Frame, RankRecord, StackSnapshot, Thread

PYTHON = "/usr/lib/python3.11"
WAIT = (f"{PYTHON}/threading.py", "wait", "waiter.acquire()")
GET = (f"{PYTHON}/queue.py", "get", "self.not_empty.wait()")
RESULT = (f"{PYTHON}/concurrent/futures/_base.py", "result", "self._condition.wait(timeout)")
LOADER = (f"{PYTHON}/site-packages/torch/utils/data/dataloader.py", "_try_get_data", "data = self._data_queue.get()")


@pytest.mark.parametrize(
    ("frames", "subtype"),
    [
        ([("/srv/train.py", "log_row", "fcntl.flock(file, fcntl.LOCK_EX)")], "user_code"),
        ([("/srv/train.py", "log_row", "with self._lock:")], "python_lock"),
        ([WAIT, ("/srv/train.py", "step", "self.ready.wait()")], "python_lock"),
        ([WAIT, GET, ("/srv/train.py", "next_batch", "return q.get()")], "dataloader"),
        ([WAIT, GET, LOADER, ("/srv/train.py", "main", "for x in loader:")], "dataloader"),
        ([WAIT, GET, ("/srv/train.py", "publish", "return q.get()")], "python_lock"),
        ([WAIT, RESULT, ("/srv/train.py", "save_checkpoint", "upload.result()")], "checkpoint_io"),
        ([("/srv/train.py", "main", "subprocess.run(command)")], "user_code"),
        (
            [("libc.so.6", "clock_nanosleep", ""), ("libpython3.11.so.1.0", "time_sleep", ""), ("w.py", "work", "")],
            "user_code",
        ),
    ],
)
def test_stack_shows_what_a_rank_is_busy_with(frames: list[tuple[str, str, str]], subtype: str) -> None:
    stack = tuple(Frame(file=file, line=7, function=function, text=text) for file, function, text in frames)
    main = Thread(name="MainThread", frames=stack, is_main=True)
    record = RankRecord(rank=0)
    assert busy_with(record, StackSnapshot(source="x", reason="stall", threads=(main,)))[0] == subtype


THREAD = """\
2026-11-21 11:37:34,886 INFO step 2 done
Exception in thread loader:
Traceback (most recent call last):
  File "/srv/train.py", line 52, in load
    raise RuntimeError("shard 7: checksum mismatch")
RuntimeError: shard 7: checksum mismatch
"""
TIMEOUT = """\
Traceback (most recent call last):
  File "/srv/train.py", line 9, in <module>
    dist.all_reduce(tensor)
RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv operation to complete
"""
STACKS = """\
Thread 0x1 [MainThread] (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/srv/train.py", line 57 in next_batch
"""


@pytest.mark.parametrize("has_lived", [True, False])
def test_exception_of_a_thread_does_not_kill_a_waiting_rank(has_lived: bool, tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text(TIMEOUT)
    (tmp_path / "rank_1.log").write_text(THREAD)
    if has_lived:
        (tmp_path / "rank_1.stall.stacks").write_text(STACKS)
    else:
        (tmp_path / "exits.json").write_text(json.dumps({"titan_ckpt": "exits", "exits": [{"rank": 1, "code": 1}]}))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert top.culprits == (1,)
    assert (top.verdict, top.subtype) == (
        ("STUCK_ON_CPU", "dataloader") if has_lived else ("RANK_DIED", "python_exception")
    )
    assert any("shard 7: checksum mismatch" in item.text for item in top.evidence)
