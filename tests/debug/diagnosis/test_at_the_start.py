"""Errors of all ranks before the first step: whoever ended of it first, it is no one rank's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Verdict
from titan_ckpt.debug.report.action import ActionKind, action_for

ARGPARSE = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --lrr\n"
REFUSALS = {
    "argparse": ARGPARSE,
    "click": "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option: --lrr\n",
    "typer": "Usage: train.py [OPTIONS]\n╭─ Error ─╮\n│ No such option: --lrr │\n╰─╯\n",
    "tyro": "╭─ Unrecognized options ─╮\n│ Unrecognized options: --lrr │\n╰─╯\n",
    "absl": "FATAL Flags parsing error:\n  Unknown command line flag 'lrr'. Did you mean: lr ?\nPass --helpfull\n",
    "hydra": "Could not override 'optim.lrr'.\nKey 'lrr' is not in struct\n    full_key: optim.lrr\n",
    "fire": "ERROR: Could not consume arg: --lrr\nUsage: train.py <command>\n",
    "python": "/opt/python: can't open file '/srv/lrr.py': [Errno 2] No such file or directory\n",
}
MISSING = (
    'Traceback (most recent call last):\n  File "/srv/train.py", line 4, in <module>\n    import flash\n'
    "ModuleNotFoundError: No module named 'flash'\n"
)


def table(codes: Mapping[int, int], first: int) -> str:
    """torchrun's table of the ranks that ended with these codes."""
    rows = "".join(
        f"[{n}]:\n  time      : 2026-11-25_10:00:00\n  host      : gpu01\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {500 + rank})\n  error_file: <N/A>\n"
        for n, (rank, code) in enumerate(sorted(codes.items(), key=lambda item: item[0] != first))
    )
    return f"{'=' * 60}\ntrain.py FAILED\n{'-' * 60}\nRoot Cause (first observed failure):\n{rows}{'=' * 60}\n"


def judged(folder: Path, files: Mapping[str, str]) -> tuple[Verdict, ActionKind]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    run = open_run(folder)
    top = diagnose(run)[0]
    return top, action_for(run, top).action


@pytest.mark.parametrize("form", REFUSALS)
def test_a_refused_command_line_is_of_all_ranks(tmp_path: Path, form: str) -> None:
    text = REFUSALS[form] * 4 + table(dict.fromkeys(range(4), 2), 1)
    top, action = judged(tmp_path, {"console.log": text})
    assert (top.verdict, top.culprits, top.victims, action) == (
        VerdictKind.RANK_DIED,
        (),
        (0, 1, 2, 3),
        ActionKind.STOP,
    )
    assert "lrr" in top.headline


def test_whoever_ended_first_of_it_is_not_accused_alone(tmp_path: Path) -> None:
    logs = {f"attempt_0/{rank}/stderr.log": ARGPARSE if rank == 1 else "" for rank in range(4)}
    top, action = judged(tmp_path, {**logs, "console.log": table({1: 2}, 1)})
    assert (top.culprits, top.victims, action) == ((), (0, 1, 2, 3), ActionKind.STOP)


def test_a_rank_that_refuses_while_others_train_is_named(tmp_path: Path) -> None:
    logs = {
        f"attempt_0/{rank}/stderr.log": ARGPARSE if rank == 2 else "step 1 loss 3\nstep 2 loss 2\n" for rank in range(4)
    }
    assert judged(tmp_path, {**logs, "console.log": table({2: 2}, 2)})[0].culprits == (2,)


def test_a_rank_that_refuses_while_others_wrote_is_named(tmp_path: Path) -> None:
    logs = {f"attempt_0/{rank}/stderr.log": ARGPARSE if rank == 2 else "loading shards\n" for rank in range(4)}
    assert judged(tmp_path, {**logs, "console.log": table({2: 2}, 2)})[0].culprits == (2,)


def test_a_tool_that_refuses_its_arguments_ends_no_rank(tmp_path: Path) -> None:
    lines = [f"[rank{rank}]: loaded shard {n}\n" for n in range(3) for rank in range(4)]
    tool = "[rank1]: usage: aws s3 cp\n[rank1]: aws: error: unrecognized arguments: --y\n"
    top, _ = judged(tmp_path, {"console.log": "".join([*lines, tool, *lines])})
    assert not top.culprits


def test_equal_tracebacks_of_all_that_failed_are_of_all(tmp_path: Path) -> None:
    top, action = judged(tmp_path, {"console.log": MISSING * 4 + table(dict.fromkeys(range(4), 1), 2)})
    assert (top.culprits, top.victims, action) == ((), (0, 1, 2, 3), ActionKind.STOP)
    assert "/srv/train.py:4" in top.headline


def test_fewer_tracebacks_than_failed_ranks_accuse_nobody(tmp_path: Path) -> None:
    top, _ = judged(tmp_path, {"console.log": MISSING * 2 + table(dict.fromkeys(range(4), 1), 2)})
    assert not top.culprits


def test_a_launcher_that_refuses_its_own_line_is_told(tmp_path: Path) -> None:
    text = "usage: torchrun [-h] [--nnodes NNODES]\ntorchrun: error: unrecognized arguments: --nproc 4\n"
    top, _ = judged(tmp_path, {"console.log": text})
    assert "no rank was started" in top.headline
    assert "--nproc" in top.headline
