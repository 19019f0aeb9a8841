"""`prune`, `cp`, `reshard` and `convert` as functions: what the commands do, on the same engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import titan_ckpt as tc
from titan_ckpt.errors import AlreadyExistsError, ConfigError, NotCommittedError, UsageError

STATE = {"model": {"w": torch.arange(8.0), "b": torch.ones(2)}, "optimizer": {"w": torch.zeros(8)}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        tc.save(tmp_path / "run", STATE, step=step)
    return tmp_path / "run"


def steps(run: Path) -> list[int]:
    return [info.step for info in tc.list_checkpoints(run)]


def test_prune_previews_and_deletes_only_when_told(run: Path) -> None:
    policy = tc.RetentionPolicy(keep_last=1, pins=frozenset({1}))
    preview = tc.prune(run, policy)
    assert (preview.is_deleted, preview.steps, steps(run)) == (False, [2], [1, 2, 3])
    assert preview.size_bytes > 0
    done = tc.prune(tc.open_store(run), policy, dry_run=False)
    assert (done.is_deleted, done.steps, done.kept, steps(run)) == (True, [2], (), [1, 3])


def test_prune_of_a_list_reads_nothing_and_says_what_would_go(run: Path) -> None:
    gone = tc.prune(tc.list_checkpoints(run), tc.RetentionPolicy(keep_last=2))
    assert ([info.step for info in gone], steps(run)) == ([1], [1, 2, 3])


def test_prune_refuses_what_is_no_run_and_pins_it_lacks(run: Path, tmp_path: Path) -> None:
    policy, wrong = tc.RetentionPolicy(keep_last=1), 3
    with pytest.raises(UsageError, match=r"has no step 7; nothing was deleted\. The nearest steps: 3, 2, 1"):
        tc.prune(run, tc.RetentionPolicy(keep_last=1, pins=frozenset({7})), dry_run=False)
    with pytest.raises(NotCommittedError):
        tc.prune(tmp_path / "nothing", policy)
    bad: list[tuple[Any, Any, Any]] = [(wrong, policy, True), (run, {}, True), (run, policy, "no"), ([1], policy, True)]
    bad.append((f"{run}@1", policy, True))
    for where, what, dry_run in bad:
        with pytest.raises(UsageError):
            tc.prune(where, what, dry_run=dry_run)
    assert steps(run) == [1, 2, 3]


def test_cp_copies_a_step_and_previews(run: Path, tmp_path: Path) -> None:
    planned = tc.cp(f"{run}@2", tmp_path / "copy", dry_run=True)
    assert not (tmp_path / "copy").exists()
    seen: list[int] = []
    report = tc.cp(f"{run}@2", tmp_path / "copy", on_bytes=seen.append)
    assert (report.step, report.copied_bytes, sum(seen)) == (2, planned.copied_bytes, planned.copied_bytes)
    assert tc.diff(f"{run}@2", tmp_path / "copy") == []
    assert tc.cp(tc.open_checkpoint(run, step=2), tc.open_store(tmp_path / "copy")).was_committed
    with pytest.raises(UsageError, match="is the source's own run"):
        tc.cp(run, run)


def test_reshard_selects_casts_and_renames(run: Path, tmp_path: Path) -> None:
    report = tc.reshard(run, tmp_path / "two", "dp_shard=2", only="model", dtype="bfloat16", rename={"model.*": "m.*"})
    assert report.checkpoint is not None
    made = tc.open_checkpoint(tmp_path / "two")
    assert {(t.fqn, t.dtype) for t in made.manifest.tensors} == {("m.w", "bfloat16"), ("m.b", "bfloat16")}
    assert str(made.manifest.mesh) == "dp_shard=2"
    with pytest.raises(AlreadyExistsError):
        tc.reshard(run, tmp_path / "two", tc.MeshSpec.parse("1"))
    bad: list[tuple[dict[str, Any], str]] = [
        ({"include": "model.*"}, "give a list of globs"),
        ({"rename": ["a=b"]}, "rename is"),
        ({"stages_per_rank": 0}, "stages_per_rank is 0"),
        ({"memory_bytes": "1GB"}, "memory"),
    ]
    for options, text in bad:
        with pytest.raises(UsageError, match=text):
            tc.reshard(run, tmp_path / "three", "dp_shard=2", **options)
    with pytest.raises(ConfigError):
        tc.reshard(run, tmp_path / "three", "dp_shard=two")
    assert not (tmp_path / "three").exists()


def test_convert_goes_to_torch_and_back(run: Path, tmp_path: Path) -> None:
    tc.convert("to-torch", run, tmp_path / "model.pt", only="model")
    assert sorted(torch.load(tmp_path / "model.pt")) == ["b", "w"]
    tc.convert("from-torch", tmp_path / "model.pt", tmp_path / "again", under="model")
    assert tc.open_checkpoint(tmp_path / "again").read("model.w").tolist() == list(range(8))
    with pytest.raises(UsageError, match="direction is 'to_hf'; did you mean 'to-hf'"):
        tc.convert("to_hf", run, tmp_path / "x")
    with pytest.raises(UsageError, match=r"to-hf has no option 'dtyp'; did you mean 'dtype'\? it has dtype"):
        tc.convert("to-hf", run, tmp_path / "x", dtyp="bfloat16")
