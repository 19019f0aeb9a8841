"""Who waits for whom in sends and receives, by source lines, by a ring that lost its beginning, and at the start of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.diagnosis.waiting.rhythm import left_order
from titan_ckpt.debug.incident.records import COMPLETED, NO_OPERATIONS, RECV, SEND, Verdict

WAITED = (
    '[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File "/job/pipe.py", line {1}, in worker\n[rank{0}]:     {2}\n'
    '[rank{0}]:   File "/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2480, in recv\n'
    "[rank{0}]:     work.wait()\n"
    "[rank{0}]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms "
    "for recv operation to complete\n"
)


def of_lines(lines: Sequence[str], folder: Path) -> Verdict:
    steps = "".join(f"[rank{rank}]: step {step}\n" for step in range(3) for rank in range(len(lines)))
    text = "".join(WAITED.format(rank, 20, line) for rank, line in enumerate(lines))
    (folder / "log.txt").write_text(steps + text)
    return diagnose(open_run(str(folder)))[0]


@pytest.mark.parametrize(
    ("lines", "culprits", "suspects"),
    [
        (["dist.recv(x, src=(rank + 1) % 4)"] * 4, (0, 1, 2, 3), ()),
        (["dist.recv(x, src=rank ^ 1)"] * 2, (0, 1), ()),
        (["dist.recv(x, src=1)", "dist.recv(x, src=2)", "dist.recv(x, src=1)", "dist.recv(x, src=2)"], (), (1, 2)),
        (["dist.recv(x, src=peer)"] * 4, (), (0, 1, 2, 3)),
        (["dist.recv(x, src=peer)"] * 2, (0, 1), ()),
    ],
)
def test_only_a_whole_circle_is_accused(
    lines: list[str], culprits: tuple[int, ...], suspects: tuple[int, ...], tmp_path: Path
) -> None:
    top = of_lines(lines, tmp_path)
    assert (top.verdict, top.culprits, top.suspects) == ("P2P_CYCLE", culprits, suspects)


def test_all_that_receive_from_an_unknown_rank_are_innocent(tmp_path: Path) -> None:
    assert not of_lines(["dist.recv(x, src=4)"] * 4, tmp_path).culprits


def ring(first_seq: int) -> np.ndarray:
    """Stage 2 of a pipeline: it drains, fills and runs, and then drains again, with a recv that does not follow in the run."""
    drains, fills, runs = [(SEND, 0), (RECV, 4)], [(RECV, 0), (SEND, 4)], [(RECV, 4), (SEND, 0), (RECV, 0), (SEND, 4)]
    pairs = [*drains, (SEND, 0), *fills * 3, *runs * 2, (RECV, 4), *drains]
    table = np.zeros(len(pairs) + 1, NO_OPERATIONS.dtype)
    table["state"], table["seq"] = COMPLETED, -1
    table["seq"][0] = first_seq
    table["p2p"][1:], table["peer"][1:] = [kind for kind, _ in pairs], [peer for _, peer in pairs]
    return table


def test_a_ring_that_lost_its_beginning_shows_no_new_order() -> None:
    last = len(ring(1)) - 1
    assert left_order(ring(1), last)
    assert not left_order(ring(54), last)


SPY = 'Process {pid}: python -u /job/train.py\nPython v3.11.7 (/opt/venv/bin/python3.11)\n\nThread {pid} (idle): "MainThread"\n'
IMPORTS = "    get_code (<frozen importlib._bootstrap_external>:1074)\n    _load_unlocked (<frozen importlib._bootstrap>:690)\n"
INIT = "    init_process_group (torch/distributed/distributed_c10d.py:1899)\n    <module> (train.py:5)\n"
RECEIVES = "    recv (torch/distributed/distributed_c10d.py:2799)\n    fwd (train.py:22)\n    <module> (train.py:44)\n"
LATER = "    step (train.py:30)\n    <module> (train.py:44)\n"
EARLIER = "    download (train.py:90)\n    <module> (train.py:3)\n"


def spied(frames: Sequence[str], folder: Path) -> Verdict:
    for rank, text in enumerate(frames):
        (folder / f"rank_{rank}.txt").write_text(SPY.format(pid=900 + rank) + text)
    return diagnose(open_run(str(folder)))[0]


def test_stacks_of_a_start_taken_rank_after_rank_accuse_nobody(tmp_path: Path) -> None:
    assert not spied([IMPORTS + "    <module> (train.py:2)\n", INIT, LATER, RECEIVES], tmp_path).culprits


def test_ranks_beyond_the_call_have_come_to_it(tmp_path: Path) -> None:
    assert not spied([LATER, LATER, INIT, LATER], tmp_path).culprits


def test_a_rank_before_the_call_has_not(tmp_path: Path) -> None:
    top = spied([EARLIER, INIT, INIT, INIT], tmp_path)
    assert (top.verdict, top.culprits) == ("PG_INIT_HANG", (0,))
