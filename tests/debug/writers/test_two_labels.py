"""Lines with a launcher's label and the program's own are of one process: what follows an error shows whether that ended it."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run

RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 16, in risky\nValueError: bad record 771\n'
CLOSED = (
    'Traceback (most recent call last):\n  File "/job/train.py", line 30, in run\n    dist.all_reduce(x)\n'
    "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:2483\n"
)
BATCH = "INFO batch"
DIED = 'Traceback (most recent call last):\n  File "/job/train.py", line 22, in run\nKeyError: 4\n'


def labelled(text: str, label: str) -> str:
    return "".join(f"{label}{line}\n" for line in text.splitlines())


def logged(rank: int, *steps: int, name: str = "INFO step", form: str = "2026-11-27 09:33:{:02d},255 ") -> str:
    return "".join(
        f"[default{rank}]:{form.format(step)}{name.split()[0]} [rank{rank}] {name.split()[1]} {step} loss 4.000\n"
        for step in steps
    )


def judged(folder: Path, text: str) -> Verdict:
    (folder / "console.log").write_text(text)
    return diagnose(open_run(folder))[0]


@pytest.mark.parametrize(
    ("before", "after", "culprits"),
    [
        (logged(0, 0, name=BATCH), logged(0, 8, 16, name=BATCH), ()),  # known, and twice more
        ("", logged(0, 1, 2, 3, 4, name=BATCH), ()),  # first seen after it, four times
        ("", logged(0, 1, 2, name=BATCH), (0,)),
        ("", logged(0, 1, 2, 3, 4, name="INFO stopping"), (0,)),  # workers are told to end after an exception
        ("", logged(0, 1, 2, 3, 4, name=BATCH, form=""), (0,)),  # print: it may have been in a buffer
        (logged(0, 0, name=BATCH), logged(1, 8, 16, 24, name=BATCH), (0,)),  # another rank's
    ],
)
def test_lines_after_an_error_show_that_it_was_caught(
    before: str, after: str, culprits: tuple[int, ...], tmp_path: Path
) -> None:
    text = f"{logged(1, 0)}{before}{labelled(RAISED, '[default0]:')}{after}"
    assert judged(tmp_path, text).culprits == culprits


def test_lines_of_nobody_may_be_of_others(tmp_path: Path) -> None:
    batches = "".join(f"2026-11-27 09:33:{step:02d},255 INFO batch {step} loss 4.000\n" for step in (1, 2, 3, 4, 5, 6))
    caught = judged(tmp_path, f"{RAISED}{batches}")
    assert not caught.is_healthy
    assert caught.verdict != "RUNNING"


def test_the_error_that_ended_it_is_the_last(tmp_path: Path) -> None:
    """Rank 0 caught one, went on, and lost its peer, which died."""
    caught = (
        f"{logged(0, 1)}{labelled(RAISED, '[default0]:')}{logged(0, 2, 3)}{labelled(CLOSED, '[default0]:[rank0]: ')}"
    )
    died = f"{logged(2, 1, 2, 3)}{labelled(DIED, '[default2]:[rank2]: ')}"
    assert judged(tmp_path, f"{logged(1, 1, 2, 3)}{died}{caught}").culprits == (2,)


def test_a_label_that_named_two_ranks_is_no_ranks(tmp_path: Path) -> None:
    text = (
        f"[default0]:[rank0] hello\n[default0]:[rank5] slow\n{labelled(RAISED, '[default0]:')}{logged(5, 1, 2, 3, 4)}"
    )
    assert 5 not in judged(tmp_path, text).culprits


def test_after_the_end_of_a_process_its_label_is_anothers(tmp_path: Path) -> None:
    ended = f"{logged(2, 1)}{labelled(DIED, '[default2]:[rank2]: ')}"
    again = "".join(f"[default2]:2026-11-27 09:33:{step:02d},255 INFO waits {step}\n" for step in range(10, 15))
    assert judged(tmp_path, f"{logged(0, 1)}{logged(1, 1)}{ended}{again}").culprits == (2,)
