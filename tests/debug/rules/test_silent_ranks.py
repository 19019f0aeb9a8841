"""Ranks that wrote nothing while their peers' connections closed: a launcher ends those that are left when one has died."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run

STEPS = "".join(f"step {step} loss 2.5\n" for step in range(9))
CLOSED = (
    'Traceback (most recent call last):\n  File "/job/train.py", line 12, in <module>\n    dist.all_reduce(x)\n'
    '  File "/venv/lib/torch/distributed/distributed_c10d.py", line 3151, in all_reduce\n    work.wait()\n'
    "RuntimeError: [pair.cc:553] Connection closed by peer [10.1.2.3]:40012\n"
)


@pytest.mark.parametrize(
    ("silent", "culprits", "suspects"),
    [((1,), (1,), ()), ((0, 2), (), (0, 2)), ((4, 5, 6, 7), (4, 5, 6, 7), ()), ((3, 4, 5, 6), (), (3, 4, 5, 6))],
)
def test_one_is_named_or_a_host(
    silent: tuple[int, ...], culprits: tuple[int, ...], suspects: tuple[int, ...], tmp_path: Path
) -> None:
    for rank in range(12):
        place = tmp_path / "logs" / "none_q" / "attempt_0" / str(rank)
        place.mkdir(parents=True)
        (place / "stdout.log").write_text(STEPS)
        (place / "stderr.log").write_text("" if rank in silent else CLOSED)
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits, top.suspects) == ("RANK_DIED", culprits, suspects)
