"""One look of a tool at a rank that the others wait for: its last lines may show that it is at work, and not stuck."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.read.test_dumps import write
from titan_ckpt.debug import diagnose, open_run

LOOK = (
    'Process 90{0}: python train.py\nPython v3.11.7 (/opt/venv/bin/python3.11)\n\nThread 90{0} (idle): "MainThread"\n{1}'
    "    <module> (train.py:9)\n"
)
WAITS = "    all_reduce (torch/distributed/distributed_c10d.py:3252)\n    main (train.py:41)\n"


@pytest.mark.parametrize(
    ("lines", "accused"),
    [
        (("eval batch 0/18", "eval batch 4/18", "eval batch 8/18"), ()),
        (("wrote shard 00003-of-00024", "wrote shard 00004-of-00024", "wrote shard 00005-of-00024"), ()),
        (("eval batch 9/18", "eval batch 14/18", "eval batch 18/18"), (2,)),  # it is past that
        (("eval batch 4/18", "eval batch 8/18", "waiting for the dataset"), (2,)),
        (("try 1/3", "try 1/3", "try 1/3"), (2,)),
        (("eval begins",), (2,)),
    ],
)
def test_a_rank_whose_lines_count_up_is_a_suspect(
    lines: tuple[str, ...], accused: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write(tmp_path / "d", "2.10", as_json=False)
    for rank in range(3):
        frames = WAITS if rank < 2 else "    evaluate (train.py:7)\n"
        (folder / f"rank{rank}.txt").write_text(LOOK.format(rank, frames))
    (folder / "job.log").write_text("".join(f"[rank2]: {line}\n" for line in ("step 2", *lines)))
    top = diagnose(open_run(str(folder)))[0]
    assert top.culprits == accused
    assert accused or top.suspects == (2,)
