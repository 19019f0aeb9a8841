"""An upload by a process of its own: the same files, one clear error if it ends, nothing of it left behind."""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import StoreError, TitanError, UsageError
from titan_ckpt.loading.load import load
from titan_ckpt.saving.apart.child import SIGNALS
from titan_ckpt.saving.apart.shared_memory import SharedMemory
from titan_ckpt.saving.apart.task import Failed, Logged
from titan_ckpt.saving.apart.uploader import _answer
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.time_limit import HungStoreError
from tools.rank_pool import RankPool

STATE: dict[str, Any] = {"w": torch.arange(90_000.0), "more": torch.ones(90_000), "name": "x", "none": torch.ones(0, 3)}
SLOW = {"upload_bytes_per_s": 1e-3, "timeout_s": 1e9}  # the second buffer waits until somebody waits for the save


def options(**changes: Any) -> SaveOptions:
    return SaveOptions(upload_process=True, **changes)


def children() -> set[int]:
    """The upload processes of this process."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if len(words) > 5 and b"titan_ckpt.saving.apart.child" in words[3] and words[5] == str(os.getpid()).encode():
            found.add(int(folder.name))
    return found


def has_ended(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    try:
        return bool(select.select([os.pidfd_open(pid)], [], [], 10.0)[0])
    except ProcessLookupError:
        return True


def wait_for_its_first_buffer(saver: Saver) -> None:
    """Until the second save of STATE, which is paced, has sent some of its bytes."""
    size_bytes, give_up_s = open_checkpoint(saver._store.url).manifest.files[0].size_bytes, time.monotonic() + 30
    while saver.metrics().uploaded_bytes == size_bytes:
        assert time.monotonic() < give_up_s, "no buffer was sent"
        time.sleep(0.01)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Saver, int]]:
    """A saver whose second save is under way, and its upload process."""
    with Saver(str(tmp_path), options(**SLOW)) as saver:
        saver.save(STATE, step=1).wait()
        (pid,) = children()
        saver.save(STATE, step=2)
        wait_for_its_first_buffer(saver)
        yield saver, pid


@pytest.mark.parametrize("codec", ["raw", "planes-zstd"])
def test_the_process_writes_what_a_thread_writes(tmp_path: Path, codec: str) -> None:
    files = []
    for is_process in (False, True):
        url = str(tmp_path / str(is_process))
        with Saver(url, SaveOptions(codec=codec, upload_process=is_process)) as saver:
            report = saver.save(STATE, step=1).wait()
            assert saver.metrics().uploaded_bytes == report.written_bytes
        assert verify(url, read_data=True) == []
        files.append([(file.size_bytes, file.digest) for file in open_checkpoint(url).manifest.files])
    assert files[0] == files[1]
    assert not children()


def test_memory_is_used_again_and_grows(tmp_path: Path) -> None:
    grown = {**STATE, "w": torch.arange(3_000_000.0)}
    with Saver(str(tmp_path), options()) as saver:
        for step, state in enumerate((STATE, {**STATE, "w": STATE["w"] + 1}, grown, STATE), start=1):
            saver.save(state, step=step).wait()
            assert torch.equal(open_checkpoint(f"{tmp_path}@{step}").read("w"), state["w"])
        assert len(children()) == 1


def test_an_incremental_save_writes_nothing_again(tmp_path: Path) -> None:
    with Saver(str(tmp_path), options(incremental=True)) as saver:
        saver.save(STATE, step=1).wait()
        assert saver.save({**STATE, "w": STATE["w"] + 1}, step=2).wait().written_bytes < STATE["w"].nbytes + 10_000
    target = {**STATE, "w": torch.zeros(90_000), "more": torch.zeros(90_000)}
    load(str(tmp_path), target)
    assert torch.equal(target["w"], STATE["w"] + 1)


def test_a_process_that_is_killed_fails_one_save(slow: tuple[Saver, int], tmp_path: Path) -> None:
    saver, pid = slow
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SaveError, match=rf"upload process {pid} ended \(SIGKILL\) while it uploaded step 2"):
        saver.wait()
    saver.save(STATE, step=3).wait()
    assert [step for step in (1, 2, 3) if FileStore(str(tmp_path)).exists(f"step-{step:08d}/COMMIT.json")] == [1, 3]


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_to_the_whole_job_do_not_end_it(slow: tuple[Saver, int], number: signal.Signals) -> None:
    saver, pid = slow
    os.kill(pid, number)
    assert saver.wait().step == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "last_act",
    [
        pytest.param("saver.save(STATE, step=2)", id="in the middle of an upload"),
        pytest.param("os.kill(max(children()), signal.SIGSTOP)", id="though it is stopped"),
    ],
)
def test_it_ends_with_its_rank(tmp_path: Path, last_act: str) -> None:
    program = (
        "import sys, time; from tests.saving.test_upload_process import *\n"
        f"saver = Saver(sys.argv[1], options(**SLOW)); saver.save(STATE, step=1).wait(); {last_act}\n"
        "print(*children(), flush=True); time.sleep(600)"  # until it is killed
    )
    rank = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    with rank.stdout:
        pid = int(rank.stdout.readline())
        rank.kill()
        rank.wait()
    assert has_ended(pid)


def test_modules_beside_a_script_do_not_change_it(tmp_path: Path) -> None:
    for name in ("types", "pickle", "signal", "mmap", "xxhash"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the user')")
    (tmp_path / "run.py").write_text(
        "import sys; here = sys.path.pop(0)\n"
        "import os, torch\nfrom titan_ckpt import Saver, SaveOptions\n"
        "sys.path.insert(0, here); os.chdir(here)\n"
        "with Saver('runs/a', SaveOptions(upload_process=True)) as saver:\n"
        "    os.chdir('/')\n"
        "    saver.save({'w': torch.ones(9)}, step=1).wait()\n"
    )
    subprocess.run([sys.executable, str(tmp_path / "run.py")], check=True)
    assert verify(str(tmp_path / "runs" / "a"), read_data=True) == []


def test_an_error_of_the_store_is_what_a_thread_would_raise(tmp_path: Path) -> None:
    said = []
    for is_process in (False, True):
        (tmp_path / str(is_process)).mkdir()
        (tmp_path / str(is_process) / "step-00000001").write_text("not a folder")
        with Saver(str(tmp_path / str(is_process)), SaveOptions(upload_process=is_process)) as saver:
            with pytest.raises(StoreError) as caught:
                saver.save(STATE, step=1).wait()
            saver.save(STATE, step=2).wait()
        said.append((type(caught.value), str(caught.value).partition("/step-")[0].removesuffix(str(is_process))))
    assert said[0] == said[1]


def test_a_process_that_hangs_is_given_up_and_replaced(tmp_path: Path) -> None:
    with Saver(str(tmp_path), options(timeout_s=2.0)) as saver:
        saver.save(STATE, step=1).wait()
        (pid,) = children()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(HungStoreError, match=rf"step 2: given up after .* in: the upload process {pid}, writing"):
            saver.save(STATE, step=2).wait()
        assert has_ended(pid)
        saver.save(STATE, step=3).wait()


def test_a_saver_whose_process_is_not_needed_saves_too(tmp_path: Path) -> None:
    with Saver(str(tmp_path), options()) as saver:
        saver.save_now(STATE, step=1)
    assert verify(str(tmp_path), read_data=True) == []


def test_files_have_the_umask_of_the_moment(tmp_path: Path) -> None:
    with Saver(str(tmp_path), options()) as saver:
        for step, mask in ((1, 0o022), (2, 0o077)):
            before = os.umask(mask)
            saver.save(STATE, step=step).wait()
            os.umask(before)
            modes = {path.stat().st_mode & 0o777 for path in (tmp_path / f"step-{step:08d}").rglob("*.distcp")}
            assert modes == {0o666 & ~mask}


def test_what_it_logs_is_logged_by_the_rank(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = Pipe()
    theirs.send(Logged(name="titan_ckpt.store", level=logging.WARNING, text="try 2 of 6"))
    theirs.send(Failed(error=StoreError("no answer"), text="Traceback"))
    with pytest.raises(StoreError, match="no answer"):
        _answer(ours, lambda _: None)
    assert [record.getMessage() for record in caplog.records] == ["try 2 of 6"]
    ours.close()
    theirs.close()


def test_the_process_does_without_torch(slow: tuple[Saver, int]) -> None:
    assert "libtorch" not in Path(f"/proc/{slow[1]}/maps").read_text()


def test_it_is_no_rank_for_tools_that_look(slow: tuple[Saver, int]) -> None:
    names = {word.partition(b"=")[0] for word in Path(f"/proc/{slow[1]}/environ").read_bytes().split(b"\0")}
    assert not names & {b"RANK", b"LOCAL_RANK", b"WORLD_SIZE"}


@pytest.mark.parametrize("url", ["memory://runs/a", FileStore("/tmp/runs")])
def test_a_store_that_no_other_process_can_open_is_refused(url: Any) -> None:
    with pytest.raises(UsageError, match="upload_process: another process opens the store by its URL"):
        Saver(url, options())


def test_options_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(UsageError, match="storage_options hold what no other process can get"):
        Saver("s3://bucket/run", options(), storage_options={"session": threading.Lock()})


def test_no_memory_for_staging_is_an_error() -> None:
    with pytest.raises(TitanError, match="no memory for staging 1152921504606846976 bytes"):
        SharedMemory(1 << 60)


def _save_and_lose_one(rank: int, url: str) -> list[str]:
    said = []
    state = {f"of rank {rank}": {**STATE, "w": STATE["w"] + rank}}
    with Saver(url, options(timeout_s=60.0, upload_bytes_per_s=1e-3)) as saver:
        for step in (1, 2, 3):
            handle = saver.save(state, step=step)
            if step == 2 and rank == 1:
                wait_for_its_first_buffer(saver)
                os.kill(children().pop(), signal.SIGKILL)
            try:
                handle.wait()
                said.append("saved")
            except SaveError as error:
                said.append("lost" if "upload process" in str(error) else str(error))
    return said


@pytest.mark.dist
def test_all_ranks_learn_of_a_lost_process_and_go_on(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        assert pool.run(_save_and_lose_one, str(tmp_path)) == [["saved", "lost", "saved"]] * 2
    assert verify(str(tmp_path), read_data=True) == []


@pytest.mark.s3
def test_the_process_saves_to_s3(s3_url: str) -> None:
    with Saver(s3_url, options()) as saver:
        for step in (1, 2):
            saver.save(STATE, step=step).wait()
    assert verify(s3_url, read_data=True) == []


def test_paths_of_modules_may_be_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, "/a\0b", *(f"/nowhere/{'x' * 200}/{n}" for n in range(12_000))])
    with Saver(tmp_path / "run", options()) as saver:
        saver.save(STATE, step=1).wait()
    assert open_checkpoint(tmp_path / "run").manifest.step == 1


def test_an_environment_that_is_too_large_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LARGE", "x" * 200_000)
    with pytest.raises(SaveError, match=r"did not start.*Argument list too long.*environment is too large"):
        Saver(tmp_path / "run", options())
    assert children() == set()


def test_memory_below_another_file_system_is_refused() -> None:
    with pytest.raises(UsageError, match="upload_process"):
        Saver("dir::memory://run", options())


def test_a_file_system_of_the_program_alone_is_named(tmp_path: Path) -> None:
    class Own(DirFileSystem):  # type: ignore[misc]
        protocol = "titantest"

        def __init__(self, **more: Any) -> None:
            super().__init__(path=str(tmp_path), fs=LocalFileSystem(auto_mkdir=True), **more)

    fsspec.register_implementation("titantest", Own, clobber=True)
    with Saver("titantest://run", options()) as saver, pytest.raises(TitanError, match="leave upload_process out"):
        saver.save(STATE, step=1).wait()


def _start_where_one_rank_cannot(rank: int, url: str) -> tuple[str, float]:
    started = time.monotonic()
    if rank == 1:
        os.environ["LARGE"] = "x" * 200_000
    try:
        with Saver(url, options(timeout_s=60)):
            said = ""
    except SaveError as error:
        said = str(error)
    finally:
        os.environ.pop("LARGE", None)
    return said, time.monotonic() - started


@pytest.mark.dist
def test_no_rank_waits_for_one_whose_process_did_not_start(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        answers = pool.run(_start_where_one_rank_cannot, str(tmp_path))
    assert all(("did not start" in said and "rank 1" in said) or rank == 1 for rank, (said, _) in enumerate(answers))
    assert all("environment is too large" in said and took_s < 30 for said, took_s in answers)


def test_a_lack_of_descriptors_fails_one_save(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Saver(tmp_path, options()) as saver:
        saver.save(STATE, step=1).wait()
        held = [os.dup(0) for _ in range(3)]
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
        try:
            with pytest.raises(TitanError, match="Too many open files"):
                saver.save(STATE, step=2).wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in held:
                os.close(fd)
        saver.save(STATE, step=3).wait()
