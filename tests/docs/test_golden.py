"""Checkpoints of every released format version stay readable; later versions are rejected with a message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._extension import ExtensionRegistry

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.dcp.storage import PlanesZstd
from titan_ckpt.errors import DamagedError, NewerFormatError
from titan_ckpt.format.commit import COMMIT_VERSION
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest_json import MANIFEST_VERSION
from titan_ckpt.loading.load import load
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Shard
from tools.golden_run import ASSET, ENCODED_STEP, INCREMENTAL_STEP, NOTE, RAW_STEP, STEPS, tensors
from tools.paths import DATA

GOLDEN = DATA / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir())
CASES = [(version, step) for version in VERSIONS for step in STEPS]


def _blank(step: int) -> dict[str, Any]:
    """The golden state's names and shapes with different values."""
    state = {fqn: torch.zeros_like(tensor) for fqn, tensor in tensors(step).items()}
    return {**state, "note": dict.fromkeys(NOTE)}


def _check(state: dict[str, Any], step: int) -> None:
    for fqn, expected in tensors(step).items():
        assert torch.equal(state[fqn], expected), fqn
    assert state["note"] == NOTE


def test_the_current_format_version_has_a_golden_run() -> None:
    assert MANIFEST_VERSION == COMMIT_VERSION
    assert f"v{MANIFEST_VERSION}" in VERSIONS


@pytest.mark.parametrize(("version", "step"), CASES)
def test_a_golden_checkpoint_verifies_and_loads_its_values(version: str, step: int) -> None:
    checkpoint = open_checkpoint(f"{GOLDEN / version}@{step}")
    assert verify(checkpoint, read_data=True) == []
    assert checkpoint.manifest.mesh == MeshSpec.parse("dp_shard=2")
    assert checkpoint.manifest.training == {"step": step, "tokens_seen": 100 * step}
    assert checkpoint.manifest.by_fqn["model.weight"].placements == {"dp_shard": Shard(0)}
    assert checkpoint.asset("tokenizer.json") == ASSET
    state = _blank(step)
    load(checkpoint, state)
    _check(state, step)


@pytest.mark.parametrize(("version", "step"), CASES)
def test_plain_dcp_load_reads_a_golden_checkpoint(version: str, step: int) -> None:
    registry = ExtensionRegistry()
    registry.register(PlanesZstd)
    folder = GOLDEN / version / f"step-{step:08d}"
    extra = {"_extension_registry": registry} if step == ENCODED_STEP else {}
    state = _blank(step)
    dcp.load(state, storage_reader=FileSystemReader(folder, **extra))
    _check(state, step)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_golden_steps_are_what_they_are_meant_to_be(version: str) -> None:
    codecs, other_steps = {}, {}
    for step in STEPS:
        manifest = open_checkpoint(f"{GOLDEN / version}@{step}").manifest
        codecs[step] = {manifest.codecs[row] for row in np.asarray(manifest.chunks.codec).tolist()}
        other_steps[step] = any(file.path.startswith(f"../step-{RAW_STEP:08d}/") for file in manifest.files)
    assert codecs[RAW_STEP] == codecs[INCREMENTAL_STEP] == {"raw"}
    assert "planes-zstd" in codecs[ENCODED_STEP]
    assert other_steps == {RAW_STEP: False, INCREMENTAL_STEP: True, ENCODED_STEP: False}


@pytest.mark.parametrize(("version", "step"), CASES)
def test_a_golden_checkpoint_reshards(version: str, step: int, tmp_path: Path) -> None:
    plan = plan_reshard(open_checkpoint(f"{GOLDEN / version}@{step}"), MeshSpec.parse("dp_shard=3"))
    run_plan(plan, str(tmp_path / "run"))
    state = _blank(step)
    load(f"{tmp_path / 'run'}@{step}", state)
    _check(state, step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the current golden run, for tests to modify."""
    shutil.copytree(GOLDEN / f"v{MANIFEST_VERSION}", tmp_path / "run")
    return tmp_path / "run"


def _seal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change COMMIT.json and write it as a save would, with a correct digest."""
    path = folder / "COMMIT.json"
    content = json.loads(path.read_text())
    del content["xxh3_128"]
    change(content)
    body = json.dumps(content, indent=1).encode()
    path.write_text(json.dumps({**content, "xxh3_128": digest(body).hex()}, indent=1))


def _newer_commit(run: Path) -> None:
    _seal(run / f"step-{STEPS[-1]:08d}", lambda content: content.update(version=MANIFEST_VERSION + 1))


def _newer_manifest(run: Path) -> None:
    folder = run / f"step-{STEPS[-1]:08d}"
    (path,) = folder.glob("a-*/manifest.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": MANIFEST_VERSION + 1}))
    data = path.read_bytes()
    _seal(folder, lambda content: content.update(manifest={"size": len(data), "xxh3_128": digest(data).hex()}))


@pytest.mark.parametrize("make", [_newer_commit, _newer_manifest])
def test_a_later_format_is_refused_not_skipped(run: Path, make: Callable[[Path], None]) -> None:
    make(run)
    for url in (str(run), f"{run}@{STEPS[-1]}"):
        with pytest.raises(
            NewerFormatError, match=rf"format version {MANIFEST_VERSION + 1}; this .* reads .*: upgrade titan-ckpt"
        ):
            open_checkpoint(url)
    assert open_checkpoint(f"{run}@{STEPS[0]}").step == STEPS[0]


def test_command_prints_one_line_and_exits_with_3(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _newer_commit(run)
    assert main(["inspect", str(run)]) == 3
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert "upgrade titan-ckpt (pip install -U titan-ckpt)" in stderr
    assert list_checkpoints(str(run))[-1].state == "newer"


def test_a_flipped_version_is_damage_and_not_a_later_format(run: Path) -> None:
    path = run / f"step-{STEPS[-1]:08d}" / "COMMIT.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 3'))
    with pytest.raises(DamagedError, match="its content does not match its digest"):
        open_checkpoint(f"{run}@{STEPS[-1]}")
    assert open_checkpoint(str(run)).step == STEPS[-2]
