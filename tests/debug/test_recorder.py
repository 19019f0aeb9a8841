"""The recorder in a real process: black box, heartbeat, dumps, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.debug.test_ring import KINDS
from titan_ckpt.cli.main import main
from titan_ckpt.debug import diagnose
from titan_ckpt.debug.incident.black_box import HEADER_BYTES, RECORD, pack_members, unpack_members
from titan_ckpt.debug.incident.records import Heartbeat
from titan_ckpt.debug.live.collect import collect
from titan_ckpt.debug.live.watch import alarms
from titan_ckpt.debug.read.black_boxes import BoxReader
from titan_ckpt.debug.read.name_tables import Interner
from titan_ckpt.debug.read.reader import open_run
from titan_ckpt.debug.record import worker_endpoint
from titan_ckpt.debug.record.hooks import BoxWriter
from titan_ckpt.debug.record.recorder import Recorder, environment
from titan_ckpt.errors import UsageError
from titan_ckpt.store.open import open_store


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """A one-rank process group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder.start(tmp_path / "box", rank=0, world_size=1, coordinates={"tp": 0}, stall_s=0)
    yield recorder
    recorder.stop()


@pytest.mark.usefixtures("world")
def test_black_box_holds_operations_with_their_call_sites(recorder: Recorder) -> None:
    dist.all_reduce(torch.ones(3, 5))
    dist.broadcast(torch.ones(7, dtype=torch.int64), 0, async_op=True)
    recorder.stop()
    run = open_run(str(recorder.folder))
    first, second = (run.operation(0, row) for row in range(2))
    assert (first.op, first.seq, first.sizes, first.dtypes, first.retired) == ("all_reduce", 1, "15", "Float", True)
    assert first.frames[0].file == __file__
    assert first.group.members == (0,)
    assert (second.op, second.dtypes, second.retired) == ("broadcast", "Long", False)


@pytest.mark.usefixtures("world")
def test_methods_of_torch_are_restored_by_stop(tmp_path: Path) -> None:
    before = dist.ProcessGroup.allreduce, dist.Work.wait
    Recorder.start(tmp_path, rank=0, world_size=1).stop()
    assert (dist.ProcessGroup.allreduce, dist.Work.wait) == before
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1.0, 1.0]


def test_heartbeat_records_step_and_phase(recorder: Recorder) -> None:
    with recorder.phase("ckpt_upload", step=12):
        beat = open_run(str(recorder.folder)).ranks[0].heartbeat
    assert beat is not None
    assert (beat.step, beat.phase, beat.is_stopped) == (12, "ckpt_upload", False)


def test_orderly_end_is_marked_and_leaves_no_empty_files(recorder: Recorder) -> None:
    recorder.stop()
    record = open_run(str(recorder.folder)).ranks[0]
    assert record.heartbeat is not None
    assert record.heartbeat.is_stopped
    assert [path.name for path in recorder.folder.iterdir() if path.stat().st_size == 0] == []


def test_dump_from_another_thread_shows_where_the_main_thread_is(recorder: Recorder) -> None:
    thread = threading.Thread(target=recorder.dump, args=("demand",))
    thread.start()
    thread.join()
    record = open_run(str(recorder.folder)).ranks[0]
    main_thread = record.stacks[0].main
    assert main_thread is not None
    assert any(frame.file == __file__ and "thread." in frame.text for frame in main_thread.frames)
    assert record.coordinates == {"tp": 0}


def test_exception_is_kept_with_its_line(recorder: Recorder) -> None:
    try:
        raise ValueError("bad shard")
    except ValueError as error:
        recorder.exception(error)
    log = open_run(str(recorder.folder)).ranks[0].log
    assert log is not None
    assert log.events[0].kind == "exception"
    assert log.events[0].frame is not None
    assert log.events[0].frame.file == __file__


def test_full_ring_keeps_the_newest_operations(tmp_path: Path) -> None:
    box = BoxWriter(tmp_path / "rank_00000.box", rank=0, world_size=1, capacity=4)
    for number in range(1, 11):
        slot = HEADER_BYTES + ((number - 1) % 4) * RECORD.size
        RECORD.pack_into(box.map, slot, number, 0, 1, number, 0, -1, 0, 0, 0, 0, 0, number)
    parsed = BoxReader(Interner()).parse(bytes(box.map), "box")
    assert parsed.operations["seq"].tolist() == [7, 8, 9, 10]
    assert parsed.count == 10
    assert [flag.flag for flag in open_run(str(tmp_path)).flags] == ["RING_TRUNCATED"]


@pytest.mark.parametrize("ticks_after", [3, 1500])
def test_newest_operations_are_read_without_the_rest_of_the_box(ticks_after: int, tmp_path: Path) -> None:
    box = BoxWriter(tmp_path / "rank_00000.box", rank=0, world_size=1)
    for number in range(1, 6000):
        slot = HEADER_BYTES + ((number - 1) % box.capacity) * RECORD.size
        RECORD.pack_into(box.map, slot, number, 0, 1, number, 0, -1, 0, 0, 0, 0, 0, number)
        box.count = number
        if number == 6000 - ticks_after:
            box.beat()
    reader = BoxReader(Interner())
    (parsed,) = reader.finish([reader.read_tail(open_store(str(tmp_path)), "rank_00000.box", 100)], 100)
    assert parsed.operations["seq"].tolist() == list(range(5900, 6000))
    assert parsed.count == 5999


def test_thousands_of_boxes_are_read_by_their_ends(tmp_path: Path) -> None:
    for rank in range(300):
        box = BoxWriter(tmp_path / f"rank_{rank:05d}.box", rank=rank, world_size=300)
        box.add_text("op", 0, "all_reduce")
        box.add_text("group", 0, ["0", "default_pg", pack_members(range(300))])
        for number in range(1, 4 - (rank == 7)):
            slot = HEADER_BYTES + (number - 1) * RECORD.size
            RECORD.pack_into(box.map, slot, number, 0, 8, number, 0, -1, 0, 0, 0, 0, int(number < 3), number)
        box.count = 3
        box.stop() if rank == 8 else box.beat()
        box.map.close()
    run = open_run(str(tmp_path))
    assert [len(run.ranks[rank].operations) for rank in (6, 7, 299)] == [3, 2, 3]
    assert run.operation(299, -1).group.members == tuple(range(300))
    assert diagnose(run)[0].culprits == (7,)


@pytest.mark.parametrize("members", [(), (3,), (0, 1, 2), (1, 3, 5, 7), (0, 4, 5), (3, 2, 1)])
def test_members_of_a_group_are_packed_and_unpacked(members: tuple[int, ...]) -> None:
    assert unpack_members(pack_members(members)) == members


def test_box_of_a_killed_process_survives(tmp_path: Path) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from titan_ckpt.debug.record.hooks import BoxWriter
        box = BoxWriter(Path({str(tmp_path)!r}) / "rank_00000.box", rank=0, world_size=1)
        box.set_phase(41, 2)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == -9
    beat = open_run(str(tmp_path)).ranks[0].heartbeat
    assert beat is not None
    assert (beat.step, beat.phase) == (41, "data")


HUNG = """
    import sys, threading
    from titan_ckpt.debug.record.recorder import Recorder
    def tell(number):
        print("told", number, flush=True)
        if {answers}:
            import os
            threading.Timer(0.5, os._exit, (7,)).start()
    recorder = Recorder.start({folder!r}, rank=0, world_size=1, on_signal=tell if {answers} else None)
    print("ready", flush=True)
    lock = threading.Lock(); lock.acquire(); lock.acquire()
"""


@pytest.mark.parametrize(("answers", "code"), [(True, 7), (False, 143)])
def test_sigterm_reaches_a_hung_main_thread(answers: bool, code: int, tmp_path: Path) -> None:
    source = textwrap.dedent(HUNG.format(answers=answers, folder=str(tmp_path)))
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if answers:
        states = collect(tmp_path, wait_s=20)
        assert states[0].pid == process.pid
        assert (tmp_path / "rank_00000.demand.stacks").exists()
    process.terminate()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code
    assert ("told 15" in output) == answers
    stacks = (tmp_path / "rank_00000.sigterm.stacks").read_text()
    assert "[MainThread]" in stacks


CRASH = """
    import ctypes, threading, time
    from titan_ckpt.debug.record.recorder import Recorder
    recorder = Recorder.start({folder!r}, rank=0, world_size=1, stall_s=0)
    {crash}
    time.sleep(30)
"""
NOWHERE = "ctypes.c_void_p(1)"


@pytest.mark.parametrize(
    ("crash", "expected"),
    [
        (f"ctypes.CDLL(None).pthread_create(ctypes.byref(ctypes.c_ulong()), None, {NOWHERE}, None)", "runs no Python"),
        ("threading.Thread(target=ctypes.string_at, args=(0,), name='reader').start()", "it crashed in the thread"),
        ("ctypes.string_at(0)", ""),
    ],
    ids=["a library's thread", "a thread of Python's", "the main thread"],
)
def test_crash_evidence_names_the_thread(crash: str, expected: str, tmp_path: Path) -> None:
    source = tmp_path / "job.py"
    source.write_text(textwrap.dedent(CRASH.format(folder=str(tmp_path), crash=crash)))
    done = subprocess.run([sys.executable, str(source)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    (found,) = diagnose(open_run(str(tmp_path)))
    assert (found.verdict, found.culprits) == ("RANK_DIED", (0,))
    threads = [item.text for item in found.evidence if "thread" in item.text]
    assert len(threads) == bool(expected)
    assert all(expected in text for text in threads)


GIL_HELD = """
    import ctypes
    import sys
    import torch
    import torch.distributed as dist
    from titan_ckpt.debug.record.recorder import Recorder
    from titan_ckpt.debug.record.worker_endpoint import is_answering
    recorder = Recorder.start({folder!r}, rank=0, world_size=1, stall_s=0)
    dist.init_process_group("gloo", init_method="file://" + {folder!r} + "/store", rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    while not is_answering(recorder._server.endpoint):
        pass
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    sys.setswitchinterval(1000.0)  # no other thread gets the lock between "ready" and the mutex
    library.pthread_mutex_lock(mutex)
    library.write(1, b"ready\\n", 6)
    library.pthread_mutex_lock(mutex)
"""


def test_rank_that_holds_the_gil_still_gives_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_endpoint, "TIMEOUT_S", 120.0)  # a crowded machine is slow to answer
    source = textwrap.dedent(GIL_HELD.format(folder=str(tmp_path)))
    variables = {**os.environ, **environment()}
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=variables)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        collect(tmp_path, wait_s=0.2)
    finally:
        process.kill()
        process.communicate()
    assert not (tmp_path / "rank_00000.demand.pickle").exists()
    (tmp_path / "rank_00000.box").unlink()
    assert open_run(str(tmp_path)).operation(0, -1).op == "all_reduce"


def test_stopped_recorder_leaves_no_socket(recorder: Recorder) -> None:
    assert (recorder.folder / "rank_00000.sock").is_socket()
    recorder.stop()
    assert not (recorder.folder / "rank_00000.sock").exists()


def test_impossible_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rank 3 of 2"):
        Recorder.start(tmp_path, rank=3, world_size=2)


def test_environment_switches_the_flight_recorder_on() -> None:
    assert int(environment()["TORCH_FR_BUFFER_SIZE"]) > 0


# ------------------------------------------------------------------------------------------------------------ watch


def bare(*, moved_s: float | None) -> Heartbeat:
    """The heartbeat, at time 1000 s, of a job that knows of no phases: it began at 0, and came further `moved_s` ago."""
    moves, moved_ns = (0, 0) if moved_s is None else (7, int((1000 - moved_s) * 1e9))
    return Heartbeat(step=-1, phase="", phase_ns=1, alive_ns=1000 * 10**9, source="", moves=moves, moved_ns=moved_ns)


def beat(step: int, *, moved_s: float, alive_s: float, is_stopped: bool = False) -> Heartbeat:
    """A heartbeat at time 1000 s: the phase changed `moved_s` ago, the recorder last ticked `alive_s` ago."""
    return Heartbeat(
        step=step, phase="forward", phase_ns=int((1000 - moved_s) * 1e9), alive_ns=int((1000 - alive_s) * 1e9), source="",
        is_stopped=is_stopped,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("beats", "kinds"),
    [
        ({0: beat(5, moved_s=1, alive_s=0), 1: beat(5, moved_s=2, alive_s=0)}, []),
        ({0: beat(5, moved_s=99, alive_s=0), 1: beat(5, moved_s=98, alive_s=0)}, ["STALLED"]),
        ({0: beat(5, moved_s=1, alive_s=0), 1: beat(5, moved_s=60, alive_s=60)}, ["SILENT"]),
        ({0: beat(9, moved_s=1, alive_s=0), 1: beat(5, moved_s=60, alive_s=0)}, ["BEHIND"]),
        ({0: beat(9, moved_s=500, alive_s=500, is_stopped=True)}, []),
        ({0: bare(moved_s=1), 1: bare(moved_s=50)}, []),
        ({0: bare(moved_s=60), 1: bare(moved_s=50)}, ["STALLED"]),
        ({0: bare(moved_s=None)}, []),
    ],
)
def test_watch_alarms_only_on_trouble(beats: dict[int, Heartbeat], kinds: list[str]) -> None:
    assert [alarm.kind for alarm in alarms(beats, 1000 * 10**9, after_s=30)] == kinds


def test_watch_command_looks_once(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    with recorder.phase("data", step=3):
        assert main(["debug", "watch", str(recorder.folder), "--once"]) == 0
    assert "rank 0 in step 3 data" in capsys.readouterr().out


def test_watch_without_boxes_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "watch", str(tmp_path), "--once"]) == 3
    assert "no black box" in capsys.readouterr().err


CALLS = """
    import inspect, sys
    import torch, torch.distributed as dist
    from titan_ckpt.debug.record import ring
    if sys.argv[2] == "Python":
        ring.compiled = None
    from titan_ckpt.debug.record.recorder import Recorder, _flight_recorder_dump
    folder = sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    recorder = Recorder.start(f"{folder}/box", rank=0, world_size=1, stall_s=0)
    group, one, lines = dist.group.WORLD, torch.ones(4), []

    def note():
        lines.append(inspect.currentframe().f_back.f_lineno)

    def helper():
        note(); dist.all_reduce(one)

    for _ in range(2):
        note(); dist.all_reduce(one)
        note(); dist.broadcast(one, 0)
        note(); dist.all_gather_into_tensor(torch.empty(4), one)
        note(); dist.reduce_scatter_tensor(torch.empty(4), one)
        note(); dist.all_to_all_single(torch.empty(4), one)
        note(); dist.all_gather([torch.empty(4)], one)
        note(); group.allreduce([one]).wait()
        helper()
        torch.ones(2, requires_grad=True).register_hook(lambda g: helper())  # never called
        leaf = torch.ones(2, requires_grad=True)
        leaf.register_hook(lambda g: helper())
        leaf.sum().backward()
        dist.distributed_c10d.all_reduce(torch.ops._c10d_functional.all_reduce(one, "sum", group.group_name)); note()
        note(); dist.barrier()
        note(); dist.all_gather_object([None], {"a": 1}); note()
    with open(f"{folder}/box/rank_0.pickle", "wb") as file:
        file.write(_flight_recorder_dump())
    recorder.stop()
    print(*lines)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_call_sites_and_numbers_match_the_flight_recorder(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(CALLS))
    variables = {**os.environ, **environment(100)}
    output = subprocess.run(
        [sys.executable, str(script), str(tmp_path), kind], env=variables, capture_output=True, text=True, check=True
    ).stdout
    found = BoxReader(interner := Interner()).parse((tmp_path / "box" / "rank_00000.box").read_bytes(), "box")
    sites = [interner.frames.values[position] for position in found.operations["frames"]]
    assert [stack[0].line for stack in sites] == [int(line) for line in output.split()]
    assert {stack[0].file for stack in sites} == {str(script)}
    (tmp_path / "box" / "rank_00000.box").unlink()
    dump = open_run(str(tmp_path / "box"))
    recorded = {int(entry["seq"]): dump.names.ops[entry["op"]] for entry in dump.ranks[0].operations}
    mine = {int(entry["seq"]): interner.ops.values[entry["op"]] for entry in found.operations}
    assert len(mine) == len(found.operations)
    assert len(recorded) == len(mine) + 2  # the functional collectives, issued from C++
    same = {"reduce_scatter_tensor": "all_reduce", "all_gather_into_tensor": "all_gather"}  # gloo's names
    assert {seq: same.get(op, op) for seq, op in mine.items()} == {seq: recorded[seq] for seq in mine}
