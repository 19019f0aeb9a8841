"""Stacks that a timer of `faulthandler` wrote into a log: history once the rank, or the job, came to more steps or to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run

HEAD = "(most recent call first):\n"
DUMP = (
    "{0}Timeout (0:00:30)!\n{0}Thread 0x00007f31aa7fe640 "
    + HEAD
    + '{0}  File "/usr/lib/threading.py", line 320 in wait\n'
    "{0}Thread 0x00007f32bb5c174{2} " + HEAD + '{0}  File "{1}\n{0}  File "/app/train.py", line 150 in <module>\n'
)
WHERE = ('/app/eval.py", line 31 in evaluate', '/opt/torch/distributed/distributed_c10d.py", line 4811 in barrier')


def steps(first: int, last: int, form: str = "[rank{}] step {}\n") -> str:
    return "".join(form.format(rank, step) for step in range(first, last) for rank in range(2))


def dumps(label: str = "[rank{}]: ") -> str:
    return "".join(DUMP.format(label.format(rank), where, rank) for rank, where in enumerate(WHERE))


def top(folder: Path, **logs: str) -> tuple[str, tuple[int, ...]]:
    for name, text in logs.items():
        (folder / f"{name}.log").write_text(text)
    found = diagnose(open_run(str(folder)))[0]
    return found.verdict, found.culprits


def test_the_stack_of_a_rank_that_holds_up_the_others_accuses_it(tmp_path: Path) -> None:
    assert top(tmp_path, job=steps(0, 5) + dumps()) == ("STUCK_ON_CPU", (0,))


@pytest.mark.parametrize("form", ["[rank{}] step {}\n", "[rank{}] iter {}: loss 4.2\n"])
def test_steps_after_the_stacks_make_them_history(form: str, tmp_path: Path) -> None:
    assert top(tmp_path, job=steps(0, 5, form) + dumps() + steps(5, 7, form)) == ("RUNNING", ())


def test_a_later_stack_is_none(tmp_path: Path) -> None:
    assert top(tmp_path, job=steps(0, 5) + dumps() + steps(5, 9) + dumps()) == ("STUCK_ON_CPU", (0,))


def test_steps_that_were_held_back_are_none_after_the_stacks(tmp_path: Path) -> None:
    """Python's standard output into a pipe has a buffer: all steps may come at the end."""
    assert top(tmp_path, job=dumps() + steps(0, 5)) == ("STUCK_ON_CPU", (0,))


def test_the_end_of_training_after_the_stacks_makes_them_history(tmp_path: Path) -> None:
    done = "[rank0] training finished\n[rank1] training finished\n"
    assert top(tmp_path, job=steps(0, 5) + dumps() + done) == ("RUNNING", ())


def test_steps_of_one_rank_tell_for_all(tmp_path: Path) -> None:
    of_one = "".join(f"[rank0] step {step}\n" for step in range(5))
    later = "".join(f"[rank0] step {step}\n" for step in range(5, 9))
    assert top(tmp_path, job=of_one + dumps() + later) == ("RUNNING", ())


def test_the_same_stacks_in_another_log_are_history_too(tmp_path: Path) -> None:
    """torchrun's --tee writes each line to the console and to the file of its rank, where standard error has no steps."""
    console = "".join(
        f"[default{line[5]}]:{line.partition(': ')[2] or line[7:]}\n"
        for line in (steps(0, 5) + dumps() + steps(5, 8)).splitlines()
    )
    folder = tmp_path / "logs/none_a1b2/attempt_0"
    for rank in range(2):
        (folder / str(rank)).mkdir(parents=True)
        (folder / str(rank) / "stderr.log").write_text(DUMP.format("", WHERE[rank], rank))
        (folder / str(rank) / "stdout.log").write_text("".join(f"step {step}\n" for step in range(8)))
    assert top(tmp_path, console=console) == ("RUNNING", ())


@pytest.mark.parametrize(("last", "culprits"), [("finished training", ()), ("epoch 2 it 8", (0,))])
def test_a_tool_may_have_looked_before_the_last_words_of_all(
    last: str, culprits: tuple[int, ...], tmp_path: Path
) -> None:
    for rank, where in enumerate(("<module> (eval.py:9)", "barrier (torch/distributed/distributed_c10d.py:5356)")):
        pid = 31167 + rank
        stack = (
            f'Process {pid}: python eval.py\nPython v3.11.7 (/usr/bin/python3)\n\nThread {pid} (idle): "MainThread"\n'
        )
        caller = "" if rank == 0 else "    <module> (eval.py:10)\n"
        (tmp_path / f"stack_rank_{rank}.txt").write_text(f"{stack}    {where}\n{caller}")
    words = "".join(f"[default{rank}]:rank {rank} {text}\n" for text in ("epoch 2 it 7", last) for rank in range(2))
    verdict, found = top(tmp_path, console=words)
    assert (verdict, found) == ("STUCK_ON_CPU", culprits)


def test_a_progress_bar_that_goes_on_makes_them_history(tmp_path: Path) -> None:
    bar = "Epoch 2:   8%|8         | {}/90 [00:07<01:40,  1.1s/it]\n"
    before, after = bar.format(7), bar.format(9)
    assert top(tmp_path, job=steps(0, 5) + before + dumps()) == ("STUCK_ON_CPU", (0,))
    assert top(tmp_path, job=steps(0, 5) + before + dumps() + before) == ("STUCK_ON_CPU", (0,))
    assert top(tmp_path, job=steps(0, 5) + before + dumps() + after) == ("RUNNING", ())


SPY = 'Process 90{0}: python train.py\nPython v3.11.7 (/opt/venv/bin/python3.11)\n\nThread 90{0} (idle): "MainThread"\n'
AT = (
    "    exec_module (<frozen importlib._bootstrap_external>:936)\n    <module> (train.py:2)\n",
    "    init_process_group (torch/distributed/distributed_c10d.py:1899)\n    <module> (train.py:5)\n",
)


def test_a_look_at_the_start_is_older_than_the_end(tmp_path: Path) -> None:
    """A tool saw ranks in `init_process_group` whose logs have steps."""
    (tmp_path / "look").mkdir()
    for rank, frames in enumerate((AT[0], *AT[1:] * 3)):
        (tmp_path / "look" / f"rank_{rank}.txt").write_text(SPY.format(rank) + frames)
    done = "[rank0] Training completed\n"
    assert top(tmp_path, train=done) == ("PG_INIT_HANG", (0,))
    assert top(tmp_path, train=steps(0, 5) + done)[1] == ()
