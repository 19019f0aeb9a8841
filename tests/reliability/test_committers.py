"""Sixteen processes commit the same step at once, on the local disk and on a real S3 server: one wins, the others fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConditionFailedError
from titan_ckpt.format.commit import Before, _encode, publish, write_commit
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.digest import digest
from titan_ckpt.saving import agreement, commit
from titan_ckpt.saving.saver import save
from titan_ckpt.store.base import Buffer, ObjectInfo
from titan_ckpt.store.local import FileStore

COMMITTERS = 16
# No torch, to keep sixteen processes light. Each has its own checkpoint, complete except for the commit.
SCRIPT = """
import sys
from dataclasses import replace
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.format.commit import write_commit
from titan_ckpt.errors import ConditionFailedError
from titan_ckpt.format.names import data_file, new_attempt
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.store.open import open_store
template, target = open_checkpoint(sys.argv[1]), open_store(sys.argv[2])
(file,) = template.manifest.files
attempt = new_attempt()
path = data_file(attempt, 0)
target.write(f"{template.folder}/{path}", [template.store.read(template.path(file.path))])
manifest = replace(template.manifest, attempt=attempt, files=(replace(file, path=path),))
print("ready", flush=True)
sys.stdin.readline()
try:
    write_commit(target, manifest, dcp_metadata(manifest), replaces=None)
    print(attempt)
except ConditionFailedError as error:
    print("lost:", error)
"""


@contextmanager
def committers(template: str, target: str) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, template, target],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for _ in range(COMMITTERS)
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.s3)])
def test_sixteen_processes_have_one_winner_and_it_is_whole(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store_url = str(tmp_path / "run") if where == "file" else str(request.getfixturevalue("s3_url"))
    template = str(tmp_path / "template")
    save(template, {"w": torch.arange(1000.0)}, step=1)
    with committers(template, store_url) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=240)[0].strip() for process in processes]
    winners = [text for text in outputs if not text.startswith("lost:")]
    assert len(winners) == 1, outputs
    assert all("another job committed step 1" in text for text in outputs if text not in winners)
    checkpoint = open_checkpoint(store_url)
    assert checkpoint.manifest.attempt == winners[0]
    assert torch.equal(checkpoint.read("w"), torch.arange(1000.0))
    assert verify(store_url, read_data=True) == []  # `.metadata`, too, is the winner's


@pytest.mark.parametrize("left", ["another save's", "none", "damaged"])
def test_verify_fix_restores_the_index_that_was_committed(tmp_path: Path, left: str) -> None:
    """As a loser leaves it that dies between its two writes."""
    run, loser = tmp_path / "run", tmp_path / "loser"
    state = {"model": {"layers.0.w": torch.arange(9.0), "b": torch.ones(2)}, "step": 1}
    save(str(run), state, step=1)
    save(str(loser), state | {"model": {"layers.0.w": torch.zeros(9), "b": torch.ones(2)}}, step=1)
    index = run / "step-00000001" / ".metadata"
    committed = index.read_bytes()
    if left == "another save's":
        for attempt in (loser / "step-00000001").glob("a-*"):
            attempt.rename(run / "step-00000001" / attempt.name)
        index.write_bytes((loser / "step-00000001" / ".metadata").read_bytes())
    elif left == "damaged":
        index.write_bytes(committed[:-5])
    else:
        index.unlink()
    assert main(["verify", str(run)]) == 1
    assert main(["verify", str(run), "--fix"]) == 0
    assert index.read_bytes() == committed
    assert main(["verify", str(run), "--fix", "--data"]) == 0


def test_verify_fix_writes_only_what_is_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These keys cannot be told from the names, and the `.metadata` that held them is gone; as of a release before structures."""
    paths = {"a.b.c": ("a.b", "c"), "x.y.z": ("x", "y", "z")}
    monkeypatch.setattr(agreement, "merge", lambda _: None)
    monkeypatch.setattr(commit, "dcp_metadata", partial(dcp_metadata, paths=paths))
    save(str(tmp_path), {"a.b": {"c": torch.ones(2)}, "x": {"y": {"z": torch.ones(2)}}}, step=1)
    (tmp_path / "step-00000001" / ".metadata").unlink()
    assert main(["verify", str(tmp_path), "--fix"]) == 3
    assert not (tmp_path / "step-00000001" / ".metadata").exists()
    assert float(open_checkpoint(str(tmp_path)).read("a.b.c").sum()) == 2


def test_a_loser_that_wrote_late_puts_the_winners_index_back(tmp_path: Path) -> None:
    """The other job commits between this one's last look at COMMIT and its write of `.metadata`."""
    template, run = str(tmp_path / "template"), tmp_path / "run"
    save(template, {"w": torch.zeros(3)}, step=1)
    opened = open_checkpoint(template)

    class Slow(FileStore):
        def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
            if path.endswith(".metadata") and not (run / "step-00000001" / "COMMIT.json").exists():
                raced.append(path)
                winner = FileStore(str(run))
                before = Before(commit=None, metadata=winner.stat(path).version)
                publish(winner, 1, "a-20260101T000000Z-00000001", b"the winner's", _commit_of(b"the winner's"), before)
                version = winner.stat(path).version  # as on S3: the winner's index was there all along
            return super().write_if(path, data, version=version)

    raced: list[str] = []
    there = FileStore(str(run)).write("step-00000001/.metadata", [b"the winner's"])
    with pytest.raises(ConditionFailedError):
        write_commit(
            Slow(str(run)), opened.manifest, b"the loser's", replaces=Before(commit=None, metadata=there.version)
        )
    assert raced
    assert (run / "step-00000001" / ".metadata").read_bytes() == b"the winner's"


def _commit_of(metadata: bytes) -> bytes:
    return _encode(
        {
            "format": "titan-ckpt-commit", "version": 1, "step": 1, "attempt": "a-20260101T000000Z-00000001", "kind": "full",
            "created": "2026-01-01T00:00:00Z", "size_bytes": 0, "mesh": "", "manifest": {"size": 1, "xxh3_128": "00" * 16},
            "metadata": {"size": len(metadata), "xxh3_128": digest(metadata).hex()},
        }
    )  # fmt: skip
