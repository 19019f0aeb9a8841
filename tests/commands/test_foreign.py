"""The tools on plain DCP checkpoints in torchtitan's layout: `step-N`, CRC-32s, copies, torchtitan's names."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import AlreadyExistsError, DamagedError
from titan_ckpt.loading.load import load
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Shard
from titan_ckpt.store.base import Buffer, ObjectInfo
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.copy import copy_checkpoint

FUSED = "layers.0.attention.qkv_linear.wqkv.weight"


def state(step: int) -> dict[str, Any]:
    """Names and nesting as torchtitan 0.3.0 saves them: the model's at the top level, the others in their own parts."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(12, 4, generator=generator)
    return {
        "tok_embeddings.weight": torch.randn(10, 4, generator=generator),
        "layers.0.attention.qkv_linear.wq.weight": weight[:4].clone(),
        "optimizer": {f"state.{FUSED}.exp_avg": weight, f"state.{FUSED}.step": torch.tensor(float(step))},
        "lr_scheduler": {"last_epoch": step},
        "dataloader": {"dp_rank_0": bytes(range(100)), "world_size": 1},
        "train_state": {"step": step, "ntokens_seen": 64 * step},
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three steps."""
    folder = tmp_path / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (2, 4, 10):
            dcp.save(state(step), checkpoint_id=folder / f"step-{step}")
    (folder / "step-12").mkdir()
    (folder / "best-step-11").mkdir()
    return folder


def call_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_torchtitan_run_is_listed_and_its_newest_step_opens(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = call_json(capsys, "ls", str(run))
    assert code == 0
    assert [(row["step"], row["state"], row["size_bytes"] > 0) for row in rows] == [
        (2, "foreign", True), (4, "foreign", True), (10, "foreign", True),
    ]  # fmt: skip
    assert open_checkpoint(str(run)).step == 10
    assert open_checkpoint(f"{run}@4").step == 4


def damages(run: Path) -> Iterator[tuple[str, int]]:
    """One byte of each tensor and value: its name and its position in the file."""
    manifest, data = open_checkpoint(str(run / "step-10")).manifest, (run / "step-10" / "__0_0.distcp").read_bytes()
    for tensor in manifest.tensors:
        chunk = open_checkpoint(str(run / "step-10")).locate(manifest.chunk(tensor, 0), row_major=False)
        yield tensor.fqn, chunk.offset + chunk.payload_offset
    for entry in manifest.objects:
        yield entry.fqn, data.index(b"\x80\x02", entry.offset) + 2  # inside the pickled value


def test_verify_reads_every_byte_and_names_what_is_damaged(run: Path) -> None:
    path = run / "step-10" / "__0_0.distcp"
    right = path.read_bytes()
    assert verify(str(run / "step-10"), read_data=True) == []
    for fqn, at in damages(run):
        path.write_bytes(right[:at] + bytes([right[at] ^ 4]) + right[at + 1 :])
        assert verify(str(run / "step-10")) == []
        (problem,) = verify(str(run / "step-10"), read_data=True)
        assert problem.fqn == fqn
        assert problem.start is not None
        assert problem.end is not None
        assert problem.start <= at < problem.end


def test_records_that_carry_no_crc_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"w": torch.arange(9.0)}, checkpoint_id=tmp_path / "step-1")
    finally:
        torch.serialization.set_crc32_options(True)
    assert verify(str(tmp_path / "step-1"), read_data=True) == []
    assert "carry no CRC-32" in caplog.text


def test_a_copy_is_a_checkpoint_that_plain_dcp_loads(run: Path, tmp_path: Path) -> None:
    report = copy_checkpoint(open_checkpoint(str(run)), FileStore(str(tmp_path / "mirror")))
    assert (report.step, report.num_files, report.kept_bytes, report.was_committed) == (10, 1, 0, False)
    loaded = state(0)
    dcp.load(loaded, checkpoint_id=tmp_path / "mirror" / "step-10")
    assert torch.equal(loaded["tok_embeddings.weight"], state(10)["tok_embeddings.weight"])
    assert loaded["train_state"] == state(10)["train_state"]
    again = copy_checkpoint(open_checkpoint(str(run)), FileStore(str(tmp_path / "mirror")))
    assert (again.copied_bytes, again.was_committed) == (0, True)


class _Stops(FileStore):
    """Fails at the index, when all data files exist."""

    def write(self, path: str, parts: Any) -> ObjectInfo:
        if path.endswith(".metadata"):
            raise OSError("the cable was pulled")
        return super().write(path, parts)


def test_an_interrupted_copy_is_no_checkpoint_and_goes_on(run: Path, tmp_path: Path) -> None:
    source = open_checkpoint(str(run))
    with pytest.raises(OSError, match="cable"):
        copy_checkpoint(source, _Stops(str(tmp_path / "mirror")))
    assert not (tmp_path / "mirror" / "step-10" / ".metadata").exists()
    report = copy_checkpoint(source, FileStore(str(tmp_path / "mirror")))
    assert (report.copied_bytes, report.was_committed) == (0, False)
    assert verify(str(tmp_path / "mirror"), read_data=True) == []


class _Together(FileStore):
    """Once `is_waiting`, holds all replies until two callers have asked."""

    is_waiting = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._asked, self._both, self._lock = 0, Event(), Lock()

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        if self.is_waiting:
            with self._lock:
                self._asked += 1
                if self._asked == 2:
                    self._both.set()
            assert self._both.wait(240), "reads come one after another"
        return super().read(path, start, length)


def test_the_places_in_blobs_are_looked_for_side_by_side(run: Path) -> None:
    store = _Together(str(run))
    checkpoint = open_checkpoint(str(run), store=store)
    store.is_waiting = True
    target = {name: torch.zeros_like(value) for name, value in state(10).items() if isinstance(value, torch.Tensor)}
    load(checkpoint, target)
    assert all(torch.equal(tensor, state(10)[name]) for name, tensor in target.items())


def test_damage_is_never_copied_into_a_checkpoint(run: Path, tmp_path: Path) -> None:
    fqn, at = next(damages(run))
    path = run / "step-10" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=fqn):
        copy_checkpoint(open_checkpoint(str(run)), FileStore(str(tmp_path / "mirror")))
    assert not (tmp_path / "mirror" / "step-10" / ".metadata").exists()


def test_a_copy_does_not_replace_another_checkpoint(run: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "mirror" / "step-10")
    with pytest.raises(AlreadyExistsError, match="step-10 is another checkpoint"):
        copy_checkpoint(open_checkpoint(str(run)), FileStore(str(tmp_path / "mirror")))


def test_a_copy_replaces_no_file_of_a_save_under_way(run: Path, tmp_path: Path) -> None:
    """Another program has written data there, and not yet its index."""
    theirs = tmp_path / "mirror" / "step-10" / "__0_0.distcp"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"theirs")
    with pytest.raises(AlreadyExistsError, match="it was kept"):
        copy_checkpoint(open_checkpoint(str(run)), FileStore(str(tmp_path / "mirror")))
    assert theirs.read_bytes() == b"theirs"


class _Moves(FileStore):
    """A source that is written while it is read."""

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        super().read_into(path, start, buffer)
        if path.endswith("__0_0.distcp"):
            self.touch(path)

    def touch(self, path: str) -> None:
        data: Buffer = Path(self.url.removeprefix("file://"), path).read_bytes()
        super().write(path, [data])


def test_a_source_that_changes_while_it_is_copied_is_refused(run: Path, tmp_path: Path) -> None:
    source = open_checkpoint(str(run / "step-10"), store=_Moves(str(run / "step-10")))
    with pytest.raises(DamagedError, match="changed while it was copied"):
        copy_checkpoint(source, FileStore(str(tmp_path / "mirror")))
    assert not (tmp_path / "mirror" / "step-10" / ".metadata").exists()


def test_torchtitans_fused_optimizer_state_reshards_and_loads(run: Path, tmp_path: Path) -> None:
    plan = plan_reshard(open_checkpoint(str(run)), MeshSpec.parse("dp_shard=2,tp=2"))
    assert plan.placed[f"optimizer.state.{FUSED}.exp_avg"].placements == {"tp": Shard(0), "dp_shard": Shard(0)}
    run_plan(plan, str(tmp_path / "out"))
    target = state(0)
    load(str(tmp_path / "out"), target)
    assert torch.equal(target["optimizer"][f"state.{FUSED}.exp_avg"], state(10)["optimizer"][f"state.{FUSED}.exp_avg"])
    assert target["dataloader"] == state(10)["dataloader"]
