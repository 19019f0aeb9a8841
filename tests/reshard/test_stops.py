"""Interrupted, damaged or parallel resharding keeps complete files and never shows partial results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.reshard_states import (
    SMALL,
    assert_dcp_reads,
    data_bytes,
    llama,
    resharded,
    saved,
)
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import AlreadyExistsError, DamagedError, StoreError, TitanError
from titan_ckpt.resharding.reshard import Workers, plan_reshard, run_plan
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.store.base import Buffer, ObjectInfo
from titan_ckpt.store.local import FileStore


class Breaking(FileStore):
    """A disk that fails halfway through the `count`-th data file."""

    def __init__(self, url: str, count: int) -> None:
        super().__init__(url)
        self.count = count

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        if path.endswith(".distcp"):
            self.count -= 1
            if self.count == 0:
                return super().write(path, self._half(parts))
        return super().write(path, parts)

    def _half(self, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        yield next(iter(parts))
        raise StoreError("no space left on device")


@pytest.mark.parametrize("files_done", [1, 2, 4])
def test_a_run_that_was_stopped_goes_on_and_keeps_whole_files(tmp_path: Path, files_done: int) -> None:
    whole = saved(str(tmp_path / "whole"), llama())
    source = resharded(whole, str(tmp_path / "source"), "dp_shard=8")
    url = str(tmp_path / "out")
    plan = plan_reshard(source, MeshSpec.parse("dp_shard=4"))
    with pytest.raises(StoreError, match="no space left"):
        run_plan(plan, url, store=Breaking(url, files_done), memory_bytes=SMALL)
    with pytest.raises(TitanError, match="not committed"):
        open_checkpoint(url)
    again = run_plan(plan_reshard(source, MeshSpec.parse("dp_shard=4")), url, memory_bytes=SMALL)
    assert again.kept_files + again.num_files == 4
    expected = resharded(source, str(tmp_path / "expected"), "dp_shard=4")
    assert again.checkpoint is not None
    assert data_bytes(again.checkpoint) == data_bytes(expected)
    assert [
        e.path for e in again.checkpoint.store.list() if e.path.endswith(".distcp.json") or "reshard.json" in e.path
    ] == []


def test_a_kept_file_that_was_damaged_meanwhile_is_written_again(tmp_path: Path) -> None:
    whole = saved(str(tmp_path / "whole"), llama())
    source = resharded(whole, str(tmp_path / "source"), "dp_shard=4")
    url, plan = str(tmp_path / "out"), plan_reshard(source, MeshSpec.parse("dp_shard=2"))
    with pytest.raises(StoreError, match=r"1 of 2 files|still missing"):
        run_plan(plan, url, workers=Workers(count=2, index=0, poll_s=0.0, patience_s=0.0))
    (done,) = Path(url).glob("step-*/a-*/*.distcp")
    data = bytearray(done.read_bytes())
    data[len(data) // 2] ^= 1
    done.write_bytes(data)
    report = run_plan(plan, url)
    assert report.kept_files == 0
    assert report.checkpoint is not None
    assert data_bytes(report.checkpoint) == data_bytes(resharded(source, str(tmp_path / "expected"), "dp_shard=2"))


def test_a_damaged_source_commits_nothing_and_is_left_alone(tmp_path: Path) -> None:
    source = resharded(saved(str(tmp_path / "whole"), llama()), str(tmp_path / "source"), "dp_shard=2")
    (path,) = Path(source.url).glob("step-*/a-*/__1_0.distcp")
    data = bytearray(path.read_bytes())
    chunk = source.manifest.chunk(source.manifest.by_fqn["model.lm_head.weight"], 1)
    data[chunk.offset + chunk.payload_offset + 3] ^= 64
    path.write_bytes(data)
    url = str(tmp_path / "out")
    plan = plan_reshard(open_checkpoint(source.url), MeshSpec.parse("tp=2"))
    with pytest.raises(
        DamagedError, match=r"__1_0.distcp: model.lm_head.weight: .* expected [0-9a-f]{32}: the source is damaged"
    ):
        run_plan(plan, url)
    with pytest.raises(TitanError, match="not committed"):
        open_checkpoint(url)
    assert run_plan(plan, url, is_checked=False).checkpoint is not None
    assert path.read_bytes() == data


def test_a_source_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    source = resharded(saved(str(tmp_path / "whole"), llama()), str(tmp_path / "source"), "dp_shard=2")
    (path,) = Path(source.url).glob("step-*/a-*/__0_0.distcp")

    def rewrite(_: int) -> None:
        path.write_bytes(path.read_bytes())

    plan = plan_reshard(source, MeshSpec.parse("dp_shard=4"))
    with pytest.raises(DamagedError, match="changed while it was read"):
        run_plan(plan, str(tmp_path / "out"), on_progress=rewrite)


def test_workers_share_the_files_and_meet_in_the_store(tmp_path: Path) -> None:
    source = resharded(saved(str(tmp_path / "whole"), llama()), str(tmp_path / "source"), "dp_shard=4")
    url = str(tmp_path / "out")
    command = [sys.executable, "-m", "titan_ckpt", "reshard", source.url, url, "--mesh", "dp_shard=6", "--json"]
    workers = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(i), "WORLD_SIZE": "3"}, stdout=subprocess.PIPE)
        for i in range(3)
    ]
    outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert outputs[1:] == [b"", b""]
    assert json.loads(outputs[0])["files"] == 2
    expected = resharded(source, str(tmp_path / "expected"), "dp_shard=6")
    assert data_bytes(open_checkpoint(url)) == data_bytes(expected)


@pytest.mark.dist
def test_under_torchrun_workers_write_shares_and_one_commits(tmp_path: Path) -> None:
    source = saved(str(tmp_path / "whole"), llama())
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
        "127.0.0.1:0", "-m", "titan_ckpt", "reshard", source.url, str(tmp_path / "out"), "--mesh", "dp_shard=6", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == 3
    assert len(open_checkpoint(str(tmp_path / "out")).manifest.files) == 6
    assert_dcp_reads(str(tmp_path / "out"), llama())


def test_a_killed_run_leaves_nothing_visible_and_goes_on(tmp_path: Path) -> None:
    source = resharded(saved(str(tmp_path / "whole"), llama()), str(tmp_path / "source"), "dp_shard=4")
    url = str(tmp_path / "out")
    script = (
        "import os, signal, sys\n"
        "from titan_ckpt.checkpoint.open import open_checkpoint\n"
        "from titan_ckpt.sharding.mesh import MeshSpec\n"
        "from titan_ckpt import plan_reshard, run_plan\n"
        "plan = plan_reshard(open_checkpoint(sys.argv[1]), MeshSpec.parse('dp_shard=6'))\n"
        "seen = []\n"
        "def progress(size):\n"
        "    seen.append(size)\n"
        "    if len(seen) == 40:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "run_plan(plan, sys.argv[2], on_progress=progress)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, source.url, url], check=False, timeout=240)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(TitanError, match="not committed"):
        open_checkpoint(url)
    made = resharded(source, url, "dp_shard=6")
    assert data_bytes(made) == data_bytes(resharded(source, str(tmp_path / "expected"), "dp_shard=6"))


def test_a_second_run_of_the_same_command_does_not_wait_for_ever(tmp_path: Path) -> None:
    source = resharded(saved(str(tmp_path / "whole"), llama()), str(tmp_path / "source"), "dp_shard=4")
    url, plan = str(tmp_path / "out"), plan_reshard(source, MeshSpec.parse("dp_shard=2"))

    class Overtaken(FileStore):
        """While this run writes its last record, the other run commits and removes all records."""

        def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
            found = super().write(path, parts)
            if path.endswith(".distcp.json") and path.find("_1_") > 0:
                run_plan(plan, url, memory_bytes=SMALL)
            return found

    with pytest.raises(AlreadyExistsError, match="just committed by another run"):
        run_plan(plan, url, store=Overtaken(url), memory_bytes=SMALL, workers=Workers(poll_s=0.0))
    expected = resharded(source, str(tmp_path / "expected"), "dp_shard=2")
    assert data_bytes(open_checkpoint(url)) == data_bytes(expected)
