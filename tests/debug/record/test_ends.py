"""The recorder leaves a program alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.record.earlier import set_aside
from titan_ckpt.debug.record.environment import environment

DUMPS = """
    import sys, time
    import torch, torch.distributed as dist
    from titan_ckpt.debug.record.recorder import Recorder
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    recorder = Recorder.start(sys.argv[1], rank=0, world_size=1, stall_s=0.5)
    dist.all_reduce(torch.ones(3))
    before = {name for name in sys.modules if name.startswith("torch")}
    recorder.dump("demand")
    while not (recorder.folder / "rank_00000.stall.pickle").exists():
        time.sleep(0.05)
    print({name for name in sys.modules if name.startswith("torch")} - before)
"""


def test_no_dump_imports_beside_the_program(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(DUMPS), str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **environment()}, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    operation = open_run(str(tmp_path)).operation(0, -1)
    assert (operation.op, operation.frames[0].line) == ("all_reduce", 7)  # the line is the black box's


# Of each process: the folder that it records into, its rank, of how many, its master port, how it ends.
ENDINGS = """
    import os, sys, time
    import torch
    from titan_ckpt.debug.record.recorder import Recorder
    def forked(folder, rank, ranks, port, end):
        child = os.fork()
        if child == 0:
            os.environ["MASTER_PORT"] = port
            recorder = Recorder.start(folder, rank=rank, world_size=ranks, stall_s=0)
            if end == "fork":
                forked_child = os.fork()
                if forked_child == 0:
                    sys.exit(9)
                os.waitpid(forked_child, 0)
            exec(end if end != "fork" else "sys.exit(2)")
            sys.exit(0)
        os.waitpid(child, 0)
    for folder, rank, ranks, port, end in map(eval, sys.argv[1:]):
        forked(folder, rank, ranks, port, end)
"""


def run_endings(*processes: tuple[Path, int, int, str, str]) -> None:
    words = [repr((str(folder), *rest)) for folder, *rest in processes]
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(ENDINGS), *words]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def test_exit_status_is_in_the_black_box(tmp_path: Path) -> None:
    ends = {
        "orderly": ("pass", 0, True), "exit": ("sys.exit(3)", 3, True), "text": ("sys.exit('no data')", 1, True),
        "stopped": ("recorder.stop(); raise SystemExit(5)", 5, True), "raised": ("{}['labels']", 1, False),
        "left": ("os._exit(3)", None, False), "fork": ("fork", 2, True),
        "again": (f"recorder.stop(); Recorder.start({str(tmp_path / 'again')!r}, rank=0, world_size=1); sys.exit(4)", 4, True),
    }  # fmt: skip
    run_endings(*((tmp_path / name, 0, 1, "1", end) for name, (end, _, _) in ends.items()))
    beats = {name: open_run(str(tmp_path / name)).ranks[0].heartbeat for name in ends}
    found = {name: (beat.status, beat.is_stopped) for name, beat in beats.items() if beat is not None}
    assert found == {name: (status, is_stopped) for name, (_, status, is_stopped) in ends.items()}


def test_attempts_in_one_folder_are_apart(tmp_path: Path) -> None:
    """Attempt 1: rank 1 of three raises. Attempt 2, of two ranks: rank 0 has begun, then rank 1 too, and both end in order."""
    half, folder = tmp_path / "half", tmp_path / "rec"
    ends = [
        (0, 3, "1", "pass"),
        (1, 3, "1", "{}['labels']"),
        (2, 3, "1", "pass"),
        (0, 2, "2", "pass"),
        (1, 2, "2", "pass"),
    ]
    run_endings(*((half, *end) for end in ends[:4]), *((folder, *end) for end in ends))
    run = open_run(str(half))
    assert (run.world_size, run.ranks[1].events, run.ranks[1].has_recorder) == (2, (), False)
    assert [flag.ranks for flag in run.flags if flag.flag == "EARLIER_ATTEMPT"] == [(1,)]
    assert diagnose(run)[0].culprits == ()
    run = open_run(str(folder))
    assert (run.incidents, run.incident, diagnose(run)[0].verdict) == (("earlier/0001", ""), "", "HEALTHY")
    before = diagnose(open_run(str(folder), incident="earlier/0001"))[0]
    assert (before.verdict, before.culprits) == ("RANK_DIED", (1,))
    assert sorted(path.name for path in (folder / "earlier" / "0001").glob("*.box")) == [
        "rank_00000.box",
        "rank_00001.box",
    ]


def test_a_programs_own_log_stays_where_it_is(tmp_path: Path) -> None:
    written = {"box", "sidecar.json", "error.json", "sock", "ask", "stall.pickle", "gil.stacks", "on_demand-2.stacks"}
    of_program = {"log", "jsonl", "stacks", "box.bak", "profile.json"}
    for name in written | of_program:
        (tmp_path / f"rank_00000.{name}").write_text("")
    set_aside(tmp_path, "rank_00000")
    moved = {path.name.removeprefix("rank_00000.") for path in (tmp_path / "earlier" / "0001").iterdir()}
    assert moved == written
    assert {path.name for path in tmp_path.iterdir()} == {"earlier", *(f"rank_00000.{name}" for name in of_program)}


def test_files_of_others_are_not_moved_aside(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "rec", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "earlier").symlink_to(elsewhere)
    for name in ("rank_00000.box", "rank_000001.box", "notes.txt"):
        (folder / name).write_text("mine")
    set_aside(folder, "rank_00000")
    assert sorted(path.name for path in folder.iterdir()) == [
        "earlier",
        "notes.txt",
        "rank_00000.box",
        "rank_000001.box",
    ]
    (folder / "earlier").unlink()
    (folder / "rank_00000.stall.stacks").symlink_to(elsewhere)
    set_aside(folder, "rank_00000")
    assert sorted(path.name for path in folder.rglob("*")) == [
        "0001", "earlier", "notes.txt", "rank_00000.box", "rank_00000.stall.stacks", "rank_000001.box",
    ]  # fmt: skip
    assert list(elsewhere.iterdir()) == []
