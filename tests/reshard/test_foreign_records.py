"""Files that torch and DCP wrote: every path that reads them compares dtype, size and CRC-32 with what lies in the file."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt.checkpoint.objects import read_object
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.checkpoint.read import read_box
from titan_ckpt.converters.torch_file import export_torch, import_torch
from titan_ckpt.errors import DamagedError
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Box

WEIGHT = torch.arange(64.0).reshape(8, 8) + 1


def _flip(path: Path, found: bytes, *, at: int = 101) -> None:
    """Flip a bit of the bytes `found`, `at` bytes from their start."""
    data = bytearray(path.read_bytes())
    data[data.index(found) + at] ^= 64
    path.write_bytes(data)


def _load(folder: Path, _: Path) -> None:
    load(str(folder), {"w": torch.zeros(8, 8)}, policy=LoadPolicy(cast="allow", lossy_cast="allow"))


def _load_all(folder: Path, _: Path) -> None:
    load(str(folder), {"w": torch.zeros(8, 8)}, policy=LoadPolicy(cast="allow", lossy_cast="allow", verify="all"))


def _read(folder: Path, _: Path) -> None:
    open_checkpoint(str(folder)).read("w")


def _reshard(folder: Path, target: Path) -> None:
    run_plan(plan_reshard(open_checkpoint(str(folder)), MeshSpec.parse("dp_shard=2")), str(target))


def _to_torch(folder: Path, target: Path) -> None:
    export_torch(open_checkpoint(str(folder)), str(target))


READERS = [_load, _load_all, _read, _reshard, _to_torch]
WEIGHTS = {"rows": WEIGHT, "columns": WEIGHT.T}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("reader", "layout"),
    [(reader, layout) for reader in READERS for layout in WEIGHTS if (reader, layout) != (_reshard, "columns")],
)
def test_a_flipped_bit_of_a_foreign_tensor_is_found(
    tmp_path: Path, reader: Callable[[Path, Path], None], layout: str
) -> None:
    folder = tmp_path / "step-3"
    dcp.save({"w": WEIGHTS[layout]}, checkpoint_id=folder)
    reader(folder, tmp_path / "whole")
    _flip(folder / "__0_0.distcp", WEIGHT.numpy().tobytes())
    with pytest.raises(DamagedError, match="w: "):
        reader(folder, tmp_path / "out")
    assert not (tmp_path / "out").is_file()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_part_of_a_foreign_tensor_is_checked_whole(tmp_path: Path) -> None:
    folder = tmp_path / "step-3"
    dcp.save({"w": WEIGHT}, checkpoint_id=folder)
    _flip(folder / "__0_0.distcp", WEIGHT.numpy().tobytes())
    checkpoint, last_row = open_checkpoint(str(folder)), Box((7, 0), (1, 8))
    assert torch.equal(torch.from_numpy(read_box(checkpoint, checkpoint.manifest.by_fqn["w"], last_row)), WEIGHT[7:])
    with pytest.raises(DamagedError, match="w: bytes"):
        checkpoint.read("w", last_row)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_flipped_bit_of_a_foreign_value_is_found(tmp_path: Path) -> None:
    folder, text = tmp_path / "step-3", "a value of some length, so that a bit of it can be changed"
    dcp.save({"note": text}, checkpoint_id=folder)
    assert read_object(open_checkpoint(str(folder)), "note") == text
    _flip(folder / "__0_0.distcp", text.encode(), at=20)
    with pytest.raises(DamagedError, match="CRC-32"):
        read_object(open_checkpoint(str(folder)), "note")


def test_a_flipped_bit_of_a_torch_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": WEIGHT}, path)
    import_torch(str(path), str(tmp_path / "whole"))
    _flip(path, WEIGHT.numpy().tobytes())
    with pytest.raises(DamagedError, match=r"data/0.*CRC-32"):
        import_torch(str(path), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_torch_file_without_crcs_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": WEIGHT}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("m/data/0").CRC == 0
    import_torch(str(path), str(tmp_path / "run"))
    assert torch.equal(open_checkpoint(str(tmp_path / "run")).read("w"), WEIGHT)


def _with_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Let the index of a DCP checkpoint name another dtype for `w`."""
    path = folder / ".metadata"
    metadata: Any = pickle.loads(path.read_bytes())  # noqa: S301
    metadata.state_dict_metadata["w"].properties.dtype = dtype
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stored", [torch.float32, torch.float8_e4m3fn, torch.uint16, torch.bool])
@pytest.mark.parametrize("named", [torch.float64, torch.int32, torch.float16, torch.float8_e5m2, torch.int8])
def test_an_index_of_another_dtype_is_damage(tmp_path: Path, stored: torch.dtype, named: torch.dtype) -> None:
    folder = tmp_path / "step-3"
    dcp.save({"w": WEIGHT.to(stored), "x": WEIGHT}, checkpoint_id=folder)
    _with_dtype(folder, named)
    with pytest.raises(DamagedError, match=f"index says '{str(named)[6:]}', the stored tensor is '{str(stored)[6:]}'"):
        open_checkpoint(str(folder)).read("w")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_compares_the_dtype(tmp_path: Path, reader: Callable[[Path, Path], None]) -> None:
    folder = tmp_path / "step-3"
    dcp.save({"w": WEIGHT}, checkpoint_id=folder)
    _with_dtype(folder, torch.int32)
    with pytest.raises(DamagedError, match="w at byte"):
        reader(folder, tmp_path / "out")
