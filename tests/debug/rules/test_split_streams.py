"""torchrun's log folders: a traceback in a rank's stderr.log, its steps in stdout.log, and what shows that it ended nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import Verdict, diagnose, open_run

RANKS, STEPS = range(3), "".join(f"step {step} loss 2.5\n" for step in range(9))
RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 12, in <module>\n    x = read(i)\nOSError: refused\n'
NO_MODULE = RAISED.replace("OSError: refused", "ModuleNotFoundError: No module named 'apex'")
CLOSED = RAISED.replace("OSError: refused", "RuntimeError: [pair.cc:553] Connection closed by peer [10.1.2.3]:40012")
CHILD = "Process ForkProcess-1:\n" + RAISED
AGENT = "I1128 20:23:30.100000 4711 torch/distributed/elastic/agent/server/api.py:{}\n"
FINISHED = AGENT.format(
    "860] [default] Local worker group finished (SUCCEEDED). Waiting 300 seconds for other agents"
) + AGENT.format("894] Done waiting for other agents. Elapsed: 0.0005 seconds")
OMP = "W1128 20:23:19.100000 4711 torch/distributed/run.py:852] Setting OMP_NUM_THREADS environment variable for each process\n"
TABLE = (
    "E1128 20:23:30.155000 4711 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1 "
    "(pid: 42) of binary: /opt/venv/bin/python\n"
)


def judged(folder: Path, error: str, *, out: str = STEPS, console: str = "", peers: str = "") -> Verdict:
    """The verdict on ranks whose stdout is `out`; rank 1 wrote `error` to its stderr, the others `peers`."""
    for rank in RANKS:
        place = folder / "logs" / "none_q" / "attempt_0" / str(rank)
        place.mkdir(parents=True)
        (place / "stdout.log").write_text(out)
        (place / "stderr.log").write_text(error if rank == 1 else peers)
    if console:
        (folder / "console.log").write_text(console)
    return diagnose(open_run(str(folder)))[0]


def test_a_traceback_that_begins_within_the_program_was_printed(tmp_path: Path) -> None:
    """`traceback.print_exc` shows the calls below the handler alone; one that nobody caught begins where Python entered."""
    top = judged(tmp_path, RAISED.replace("<module>", "read"))
    assert (top.culprits, top.suspects) == ((), (1,))


def test_an_error_of_which_nothing_more_is_known_is_a_death(tmp_path: Path) -> None:
    assert judged(tmp_path, RAISED).culprits == (1,)


@pytest.mark.parametrize(
    ("error", "out", "console"),
    [
        (RAISED, STEPS, OMP),
        (RAISED, STEPS + "Training completed\n", ""),
        (RAISED + "GradScaler: overflow, skipping\n", STEPS, ""),
        (RAISED * 2, STEPS, ""),
        (NO_MODULE, STEPS, ""),
        (CHILD, STEPS, ""),
    ],
    ids=["torchrun reports none", "it says done", "it wrote on", "it came before", "at the start", "of a child"],
)
def test_an_error_that_may_have_been_caught(error: str, out: str, console: str, tmp_path: Path) -> None:
    assert judged(tmp_path, error, out=out, console=console).culprits == ()


@pytest.mark.parametrize(("console", "peers"), [(OMP + TABLE, ""), (OMP, CLOSED)])
@pytest.mark.parametrize("error", [RAISED, RAISED * 2])
def test_an_error_that_a_launcher_or_peers_noticed(error: str, console: str, peers: str, tmp_path: Path) -> None:
    top = judged(tmp_path, error, console=console, peers=peers)
    assert (top.verdict, top.culprits) == ("RANK_DIED", (1,))


def test_workers_that_all_ended_with_0_had_caught_their_errors(tmp_path: Path) -> None:
    assert judged(tmp_path, RAISED, console=FINISHED).verdict == "HEALTHY"


FATAL = 'Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File "/job/dec.py", line 4 in decode\n'


@pytest.mark.parametrize(("before", "after", "accused"), [(4, 5, ()), (4, 1, (1,)), (0, 5, (1,))])
def test_a_crash_of_a_child_is_outlived_by_its_rank(
    before: int, after: int, accused: tuple[int, ...], tmp_path: Path
) -> None:
    """A process that crashes loses what it holds back, so that its own further steps show another's crash."""

    def steps(first: int, number: int) -> str:
        return "".join(
            f"[rank{rank}]: step {step} loss 2.5\n" for step in range(first, first + number) for rank in RANKS
        )

    crash = "".join(f"[rank1]: {line}\n" for line in FATAL.splitlines())
    (tmp_path / "console.log").write_text(steps(0, before) + crash + steps(before, after))
    assert diagnose(open_run(str(tmp_path)))[0].culprits == accused
