"""What a rank that waits in no collective is said to be busy with."""

from __future__ import annotations

import pytest

from titan_ckpt.debug.busy import busy_with
from titan_ckpt.debug.records import Frame, RankRecord, StackSnapshot, Thread

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
    ],
)
def test_stack_tells_what_a_rank_is_busy_with(frames: list[tuple[str, str, str]], subtype: str) -> None:
    stack = tuple(Frame(file=file, line=7, function=function, text=text) for file, function, text in frames)
    main = Thread(name="MainThread", frames=stack, is_main=True)
    record = RankRecord(rank=0)
    assert busy_with(record, StackSnapshot(source="x", reason="stall", threads=(main,)))[0] == subtype
