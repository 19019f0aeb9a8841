"""The parts of a soak test: a proxy that breaks requests in every way, and a ledger that detects losses."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from titan_ckpt.demo.s3_server import Server
from titan_ckpt.errors import TransientStoreError
from titan_ckpt.format.names import step_folder
from titan_ckpt.saving.saver import save
from titan_ckpt.store.base import RetryPolicy, Store
from titan_ckpt.store.open import open_store
from tools.faults.proxy import FaultyProxy, HttpRequest, RequestFault, RequestFaultKind
from tools.processes import marked_processes
from tools.soak.jobs import Kill, Victim, read_training_log, run_job
from tools.soak.ledger import Ledger
from tools.soak.weather import CALM, FREQUENCIES, STORM, Climate, draw_weather

DATA = bytes(range(256)) * 4096
QUICK = RetryPolicy(tries=3, first_wait_s=0.01, longest_wait_s=0.05, deadline_s=20)


def through(proxy: FaultyProxy, url: str) -> Store:
    return open_store(url, retry_policy=QUICK, endpoint_url=proxy.endpoint, read_timeout_s=2.0)


def break_once(proxy: FaultyProxy, method: str, fault: RequestFault) -> None:
    """Break the next request of `method`; the others pass."""
    left = [fault]
    proxy.rule = lambda request: left.pop() if left and request.method == method else None


@pytest.mark.s3
@pytest.mark.parametrize("kind", FREQUENCIES)
def test_reads_and_writes_survive_every_kind_of_fault(s3_server: Server, s3_url: str, kind: RequestFaultKind) -> None:
    host, _, port = s3_server.endpoint.removeprefix("http://").partition(":")
    fault = RequestFault(kind=kind, after_bytes=5000, seconds=5.0 if kind == RequestFaultKind.HANG else 0.1)
    with FaultyProxy(host, int(port)) as proxy:
        store = through(proxy, s3_url)
        break_once(proxy, "PUT", fault)
        store.write("a", [DATA])
        break_once(proxy, "GET", fault)
        assert store.read("a") == DATA
        assert proxy.faults == {kind: 2}


@pytest.mark.s3
def test_endless_faults_raise_after_the_last_retry(s3_server: Server, s3_url: str) -> None:
    host, _, port = s3_server.endpoint.removeprefix("http://").partition(":")
    with FaultyProxy(host, int(port)) as proxy:
        proxy.rule = lambda _: RequestFault(kind=RequestFaultKind.BUSY)
        with pytest.raises(TransientStoreError, match=r"given up after 3 tries.*SlowDown"):
            through(proxy, s3_url).write("a", [DATA])


def test_weather_is_the_same_for_the_same_seed() -> None:
    request = HttpRequest(method="PUT", path="/a", body_bytes=100, client="127.0.0.1")
    first, second = Climate(7), Climate(7)
    for climate in (first, second):
        climate.set(STORM)
    faults = [first(request) for _ in range(500)]
    assert faults == [second(request) for _ in range(500)]
    assert {fault.kind for fault in faults if fault is not None} == set(FREQUENCIES)
    first.set(CALM)
    assert not any(first(request) for _ in range(100))
    assert [draw_weather(random.Random(1)).name for _ in range(2)] == [draw_weather(random.Random(1)).name] * 2


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def ledger(tmp_path: Path, complaints: list[str]) -> Ledger:
    """The ledger of a run with steps 1 to 3."""
    books = Ledger(open_direct=open_store, complain=complaints.append)
    for step in (1, 2, 3):
        save(str(tmp_path), {"w": torch.full((1000,), float(step))}, step=step)
    assert books.look(str(tmp_path)) == {1, 2, 3}
    return books


def test_what_may_go_is_no_loss_and_what_must_stay_is(tmp_path: Path, ledger: Ledger, complaints: list[str]) -> None:
    for step in (1, 2):
        (tmp_path / step_folder(step) / "COMMIT.json").unlink()
    ledger.look(str(tmp_path), kept=lambda steps: set(sorted(steps)[-2:]))
    assert ledger.counts.lost == 1
    assert complaints
    assert complaints[0].startswith(f"{tmp_path}@2 is lost")


def test_a_step_reported_as_committed_is_missed(tmp_path: Path, ledger: Ledger) -> None:
    ledger.look(str(tmp_path), promised=[4])
    assert ledger.counts.lost == 1


def test_a_step_rewritten_with_other_values_is_noticed(tmp_path: Path, ledger: Ledger) -> None:
    save(str(tmp_path), {"w": torch.zeros(1000)}, step=2)
    ledger.look(str(tmp_path))
    assert (ledger.counts.lost, ledger.counts.wrong) == (0, 1)


def test_a_flipped_bit_is_noticed(tmp_path: Path, ledger: Ledger, complaints: list[str]) -> None:
    (path,) = (tmp_path / step_folder(3)).glob("*/__0_0.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    ledger.look(str(tmp_path))
    assert ledger.counts.wrong == 1
    assert "cannot be read" in complaints[0]


def test_losses_are_compared_with_reference_and_earlier_runs(tmp_path: Path, ledger: Ledger) -> None:
    url = str(tmp_path)
    ledger.references[0] = [4.0, 3.0, 2.0, 1.0]
    ledger.check_losses(0, "tp=2", url, 0, "the beginning", {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0})
    ledger.check_losses(0, "tp=2", url, 3, ledger.values(url, 3), {4: 1.0})
    assert (ledger.counts.wrong, ledger.counts.losses_bit_equal) == (0, 1)
    ledger.check_losses(0, "tp=2", url, 3, ledger.values(url, 3), {4: 1.0 + 1e-6})  # close, but not bit-identical
    assert ledger.counts.wrong == 1
    ledger.check_losses(0, "1", url, 3, ledger.values(url, 3), {4: 1.1})  # another mesh, but too far off
    assert ledger.counts.wrong == 2


def test_a_job_is_killed_with_all_its_processes(tmp_path: Path) -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'import signal; signal.pause()'!r}])"
    moment = tmp_path / "began"
    code = f"open({str(moment)!r}, 'w').close(); {child}"
    kill = Kill(victim=Victim.ALL, number=signal.SIGKILL, moment=moment.exists)
    ended = run_job([sys.executable, "-c", code], {}, tmp_path / "out", random.Random(0), kill=kill)
    assert (ended.was_killed, ended.outlived, ended.problem) == (True, 0, "")


def test_a_process_without_environment_belongs_to_its_session() -> None:
    with subprocess.Popen(
        ["env", "-i", "sleep", "60"], start_new_session=True
    ) as process:  # as in the middle of an exec
        try:
            while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
                time.sleep(0.01)
            assert marked_processes("JOB=no job has this token", process.pid) == {process.pid: False}
            assert marked_processes("JOB=no job has this token", 1 << 30) == {}
        finally:
            process.kill()


def test_an_error_that_is_not_ours_is_a_problem(tmp_path: Path) -> None:
    ended = run_job([sys.executable, "-c", "1 / 0"], {}, tmp_path / "out", random.Random(0))
    assert ended.problem == "exit code 1"


def test_a_truncated_metrics_line_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    lines = (
        '{"event": "start", "step": 3, "time_s": 5.0}\n{"event": "step", "step": 4, "loss": 1.5, "time_s": 6.0, "commi'
    )
    (tmp_path / "logs" / "metrics.jsonl").write_text(lines)
    seen = read_training_log(tmp_path)
    assert (seen.start, seen.losses, seen.committed) == (3, {}, None)
    assert read_training_log(tmp_path, since_s=5.5).start is None
