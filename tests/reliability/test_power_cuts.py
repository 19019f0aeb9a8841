"""Power cuts on a modelled disk: a seeded sample of `scripts/faults.py --power-cuts`, and what the model would find."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from titan_ckpt.store import local
from titan_ckpt.store.local import FileStore
from tools.faults.power import build_cut, recorded
from tools.faults.power_cases import JOBS, run_cuts


def test_a_power_cut_loses_nothing_that_was_promised(tmp_path: Path) -> None:
    outcome = run_cuts(tmp_path, 8 * len(JOBS), seed=5)
    assert outcome.problems == []
    assert outcome.by_job == dict.fromkeys(JOBS, 8)


def test_the_model_finds_folders_that_are_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_fsync_folder", lambda _: None)
    assert run_cuts(tmp_path, 10, seed=5, jobs=("saves",)).problems


def test_the_model_finds_files_that_are_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(descriptor: int, parts: object) -> None:
        os.write(descriptor, b"".join(map(bytes, parts)))  # type: ignore[call-overload]

    monkeypatch.setattr(local, "_write_through", write)
    assert run_cuts(tmp_path, 10, seed=5, jobs=("saves",)).problems


@pytest.mark.parametrize("survives", [0.0, 1.0])
def test_a_cut_keeps_what_was_synced_and_maybe_the_rest(
    tmp_path: Path, survives: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with recorded(root) as recording:
        FileStore(str(root)).write("a/b", [b"synced"])
        recording.mark("run 1")
        (root / "a" / "b").rename(root / "a" / "c")
        with open(root / "late", "wb", buffering=0) as file:
            os.write(file.fileno(), b"late")
    rng = random.Random(1)
    monkeypatch.setattr(rng, "choice", lambda options: survives if 0.3 in options else options[-1])
    assert build_cut(recording, len(recording.events), tmp_path / "cut", rng) == ["run 1"]
    found = {str(p.relative_to(tmp_path / "cut")): p.read_bytes() for p in (tmp_path / "cut").rglob("*") if p.is_file()}
    assert found == ({"a/c": b"synced", "late": b""} if survives else {"a/b": b"synced"})


def test_a_deletion_is_durable_before_the_next_begins(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    store = FileStore(str(root))
    with recorded(root) as recording:
        store.write("step/COMMIT.json", [b"1"])
        store.write("step/a/data", [b"2"])
        store.delete(["step/COMMIT.json"])
        number = len(recording.events)
        store.delete(["step/a/data"])
    for seed in range(20):
        cut = tmp_path / f"cut-{seed}"
        build_cut(recording, number, cut, random.Random(seed))
        assert not (cut / "step" / "COMMIT.json").exists()
