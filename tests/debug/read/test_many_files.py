"""Logs of many hosts: several processes give what one gives, and remote files are fetched several at a time."""

from __future__ import annotations

import json
import multiprocessing
import threading
from pathlib import Path

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.debug import cli, open_run
from titan_ckpt.debug.incident.records import Run
from titan_ckpt.debug.read import many_files
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store

WATCHDOG = (
    "[E1122 02:17:08.4 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, "
    "OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600060 milliseconds before timing out."
)
STACK = 'Process {pid}: python train.py\nPython v3.11 (/python3)\n\nThread {pid} (idle): "MainThread"\n    f (/job/a.py:3)\n'
HOSTS, LOCAL = 12, 4


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """Log folders of hosts, with stacks, a damaged file and a dump that is named like a text."""
    for rank in range(HOSTS * LOCAL):
        folder = tmp_path / f"node{rank // LOCAL:03}" / "none_ab" / "attempt_0" / str(rank % LOCAL)
        folder.mkdir(parents=True)
        text = f"[rank{rank}]: 2026-11-22 02:00:01,123 step 1\n"
        (folder / "stderr.log").write_text(text + (WATCHDOG.format(rank=rank) + "\n") * (rank != 5))
        (folder / "stdout.log").write_text("")
    (tmp_path / "py-spy-4711.txt").write_text(STACK.format(pid=4711))
    (tmp_path / "broken.log.gz").write_bytes(b"\x1f\x8b\x08\x00" + bytes(6) + b"\xff" * 50)
    entry = {"record_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "profiling_name": "nccl:all_reduce",
             "state": "scheduled", "input_sizes": [[4]], "time_created_ns": 1}  # fmt: skip
    (tmp_path / "nccl_trace_rank_5.txt").write_text(json.dumps({"version": "2.10", "entries": [entry]}))
    return tmp_path


def shown(run: Run) -> tuple[str, ...]:
    flags = sorted(f"{flag.flag} {flag.source} {flag.ranks}" for flag in run.flags)
    return *(repr(record) for record in run.ranks.values()), repr(run.job_log), *flags


@pytest.mark.parametrize("processes", [1, 3])
def test_the_share_that_is_read_grows_to_the_whole(
    processes: int, hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_files, "_num_processes", lambda _evidence, _files: processes)
    (hosts / "long.log").write_bytes((b"." * 199 + b"\n") * 25_000)  # read in chunks
    told: list[tuple[int, int]] = []
    open_run(str(hosts), on_read=lambda read, total: told.append((read, total)))
    read, totals = zip(*told, strict=True)
    assert list(read) == sorted(read)
    assert len(read) > 4
    damaged = (hosts / "broken.log.gz").stat().st_size
    assert set(totals) == {sum(file.stat().st_size for file in hosts.rglob("*") if file.is_file())}
    assert totals[0] - damaged <= read[-1] <= totals[0]


def test_a_command_tells_the_share_of_a_long_reading(
    hosts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "LONG_BYTES", 0)
    main(["--progress=json", "debug", str(hosts)])
    events = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert [event["what"] for event in events if event["event"] == "progress"][-1] == "reading"
    assert events[-1]["is_finished"]
    assert events[-1]["done"] > 0


def test_several_processes_give_what_one_gives(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_files, "_num_processes", lambda _evidence, _files: 1)
    alone = open_run(str(hosts))
    monkeypatch.setattr(many_files, "_num_processes", lambda _evidence, _files: 3)
    together = open_run(str(hosts))
    assert shown(together) == shown(alone)
    assert len(together.ranks[5].operations) == 1
    assert {"DUMP_CORRUPT", "RANK_UNKNOWN"} <= {flag.flag for flag in together.flags}


def test_small_folder_is_read_by_one_process(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", lambda _name: pytest.fail("started processes"))
    open_run(str(hosts))


def test_program_with_threads_is_not_forked(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_files, "LEAST_FILES", 1)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _name: pytest.fail("forked"))
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert open_run(str(hosts)).world_size == HOSTS * LOCAL
    finally:
        done.set()
        other.join()


def test_files_of_a_remote_store_are_fetched_together(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(hosts))
    alone = shown(open_run(str(hosts)))
    together = threading.Barrier(4)
    begun: list[str] = []
    plain = type(store).read

    def read(self: Store, path: str, start: int = 0, length: int | None = None) -> bytes:
        begun.append(path)
        if len(begun) <= 4:
            together.wait(240)  # fails where files are read one after the other
        return plain(self, path, start, length)

    monkeypatch.setattr(many_files, "is_local", lambda _store: False)
    monkeypatch.setattr("titan_ckpt.debug.read.reader.is_local", lambda _store: False)
    monkeypatch.setattr(type(store), "read", read)
    assert shown(open_run(str(hosts), store=store)) == alone
