"""Sixteen processes commit the same step at once, on the local disk and on a real S3 server: one wins, the others fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.saving.saver import save

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
        outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    winners = [text for text in outputs if not text.startswith("lost:")]
    assert len(winners) == 1, outputs
    assert all("another job committed step 1" in text for text in outputs if text not in winners)
    checkpoint = open_checkpoint(store_url)
    assert checkpoint.manifest.attempt == winners[0]
    assert torch.equal(checkpoint.read("w"), torch.arange(1000.0))
    assert verify(store_url, read_data=True) == []  # `.metadata`, too, is the winner's
