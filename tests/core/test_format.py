"""The format: blobs that torch can read, DCP's index, the manifest, and rejection of unsafe content."""

from __future__ import annotations

import io
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_ckpt.errors import DamagedError, NewerFormatError, UnsafeContentError
from titan_ckpt.format import manifest_json as manifest_module
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.dcp_read import read_dcp_metadata
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import ChunkTable, FileEntry, Manifest, TensorEntry
from titan_ckpt.format.manifest_json import decode_manifest, encode_manifest
from titan_ckpt.format.names import parse_step, step_folder
from titan_ckpt.format.torch_blob import BLOB_ALIGNMENT, envelope
from titan_ckpt.loading.load import load, open_checkpoint
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Shard
from titan_ckpt.state.state_dict import TORCH_DTYPE
from tools.paths import DATA

DCP = DATA / "dcp"


@pytest.mark.parametrize("dtype", sorted(ELEMENT_SIZE))
@pytest.mark.parametrize("sizes", [(), (0,), (3, 0, 2), (5,), (4, 7), (2, 3, 300)])
def test_torch_reads_our_blobs_bit_for_bit(dtype: str, sizes: tuple[int, ...]) -> None:
    count = int(np.prod(sizes, dtype=np.int64)) * ELEMENT_SIZE[dtype]
    raw = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, count, dtype=np.uint8).tobytes()
    around = envelope(dtype, sizes)
    tensor = torch.load(io.BytesIO(around.prefix + raw + around.suffix), weights_only=True)
    assert tensor.dtype == TORCH_DTYPE[dtype]
    assert tuple(tensor.shape) == sizes
    assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == raw
    assert len(around.prefix) % BLOB_ALIGNMENT == 0
    assert around.length == len(around.prefix + raw + around.suffix)


def test_blob_past_4_gib_uses_zip64(tmp_path: Path) -> None:
    around = envelope("uint8", ((1 << 32) + 5,))
    with open(tmp_path / "big", "wb") as file:  # sparse: uses no disk space
        file.write(around.prefix)
        file.seek(around.payload_length, os.SEEK_CUR)
        file.write(around.suffix)
    tensor = torch.load(tmp_path / "big", mmap=True, weights_only=True)
    assert tensor.shape == ((1 << 32) + 5,)
    assert tensor[-1] == 0


def _manifest(num_tensors: int, num_ranks: int, *, with_digests: bool = True) -> Manifest:
    rows = num_tensors * num_ranks
    rng = np.random.default_rng(1)
    ones = np.ones(rows, dtype=np.int64)
    table = ChunkTable(
        file=np.tile(np.arange(num_ranks, dtype=np.int64), num_tensors),
        offset=np.repeat(np.arange(num_tensors, dtype=np.int64) * 1024, num_ranks),
        length=ones * 1000,
        payload_offset=ones * 384,
        payload_length=ones * 64,
        codec=ones * 0,
        box_offsets=np.stack([np.tile(np.arange(num_ranks) * 2, num_tensors), ones * 0], axis=1).reshape(-1),
        box_sizes=np.stack([ones * 2, ones * 8], axis=1).reshape(-1),
        digests=rng.bytes(16 * rows) if with_digests else None,
    )
    tensors = tuple(
        TensorEntry(
            fqn=f"model.layers.{n:05d}.w", dtype="float32", global_shape=(2 * num_ranks, 8),
            placements={"tp": Shard(0), "dp_shard": Shard(0)}, stages=(0,) if n == 0 else None,
            first_chunk=n * num_ranks, num_chunks=num_ranks,
        )
        for n in range(num_tensors)
    )  # fmt: skip
    attempt = "a-20260101T000000Z-0123abcd"
    files = tuple(
        FileEntry(path=f"{attempt}/__{r}_0.distcp", size_bytes=num_tensors * 1024, digest=bytes(16))
        for r in range(num_ranks)
    )
    return Manifest(
        step=7, attempt=attempt, kind="full", created="2026-01-01T00:00:00Z", versions={"torch": "2"},
        mesh=MeshSpec.of({"dp_shard": num_ranks}), pipeline=None, tensors=tensors, chunks=table, codecs=("raw",),
        objects=(), files=files, training={"step": 7}, config={"a": 1}, user={},
    )  # fmt: skip


@pytest.mark.parametrize(("num_tensors", "num_ranks"), [(1, 1), (3, 4), (70, 64)])
def test_manifest_comes_back_as_it_was(num_tensors: int, num_ranks: int) -> None:
    before = _manifest(num_tensors, num_ranks)
    after = decode_manifest(encode_manifest(before).manifest, where="m")
    assert after.tensors == before.tensors
    assert list(after.tensors[0].placements or {}) == ["tp", "dp_shard"]
    for tensor in after.tensors:
        assert list(after.chunks_of(tensor)) == list(before.chunks_of(tensor))
    assert (after.mesh, after.files, after.training) == (before.mesh, before.files, before.training)


def test_large_manifest_is_small_and_keeps_its_digests_beside_it() -> None:
    before = _manifest(873, 1024)
    encoded = encode_manifest(before)
    assert len(encoded.manifest) < 1_000_000
    assert encoded.digests == before.chunks.digests
    assert len(decode_manifest(encoded.manifest, where="m").chunks) == 873 * 1024


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_manifest_is_refused_or_still_consistent(data: st.DataObject) -> None:
    text = bytearray(encode_manifest(_manifest(3, 4)).manifest)
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(32, 126))
    try:
        manifest = decode_manifest(bytes(text), where="m")
    except (DamagedError, UnsafeContentError):
        return
    for tensor in manifest.tensors:
        assert all(chunk.offset + chunk.length <= 2**40 for chunk in manifest.chunks_of(tensor))


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "a-20260101T000000Z-0123abcd/../x", "..\\x", ""])
def test_a_manifest_cannot_point_outside_its_run(path: str) -> None:
    content = json.loads(encode_manifest(_manifest(1, 1)).manifest)
    content["files"][0]["path"] = path
    with pytest.raises(UnsafeContentError, match="is not a data file of this run"):
        decode_manifest(json.dumps(content).encode(), where="m")


class Canary:
    """A pickle that leaves a trace if executed."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self._mark),))


def test_a_malicious_index_executes_nothing(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Canary(tmp_path / "mark")))
    with pytest.raises(UnsafeContentError, match="mkdir"):
        open_checkpoint(str(tmp_path))
    assert not (tmp_path / "mark").exists()


def test_a_malicious_value_executes_nothing(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(2), "value": Canary(tmp_path / "mark")}, checkpoint_id=tmp_path / "theirs")
    with pytest.raises(UnsafeContentError, match=r"value 'value' holds posix\.mkdir, which is not plain data"):
        load(str(tmp_path / "theirs"), {"w": torch.zeros(2), "value": 0})
    assert not (tmp_path / "mark").exists()


def _state(factor: float = 1.0) -> dict[str, Any]:
    return {
        "model": {
            "a": torch.arange(12.0).reshape(3, 4) * factor,
            "scalar": torch.tensor(3.0 * factor),
            "empty": torch.zeros(0, 3),
            "transposed": (torch.arange(12.0) * factor).reshape(3, 4).t(),
        },
        "step": int(7 * factor),
        "nested": {"list": [1, 2]},
    }


def test_foreign_checkpoint_opens_without_unpickling(tmp_path: Path) -> None:
    dcp.save(_state(), checkpoint_id=tmp_path / "step-12")
    loaded = _state(0)
    report = load(open_checkpoint(str(tmp_path), step=12), loaded)
    assert report.unverified_bytes == 0  # torch wrote a CRC-32 of each record
    for name, tensor in _state()["model"].items():
        assert torch.equal(loaded["model"][name], tensor)
    assert loaded["step"] == 7


def test_a_checkpoint_of_a_newer_dcp_opens_with_any_torch() -> None:
    """Written by torch 2.15: its index has strides, on which `dcp.load` of 2.13 fails."""
    loaded = _state(0)
    load(open_checkpoint(str(DCP / "torch-2.15")), loaded)
    for name, tensor in _state()["model"].items():
        assert torch.equal(loaded["model"][name], tensor)
    assert loaded["step"] == 7


def test_our_index_of_a_foreign_checkpoint_equals_theirs(tmp_path: Path) -> None:
    dcp.save(_state(), checkpoint_id=tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    sizes = {name: (tmp_path / name).stat().st_size for name in os.listdir(tmp_path)}
    theirs = pickle.loads(data)  # noqa: S301  (written by this test)
    for tensor in theirs.state_dict_metadata.values():
        # torch 2.15 writes strides that nothing reads; earlier versions reject an index with strides
        if hasattr(tensor, "properties") and hasattr(tensor.properties, "strides"):
            tensor.properties.strides = None
    paths = {fqn: tuple(map(str, path)) for fqn, path in theirs.planner_data.items()}
    manifest = read_dcp_metadata(data, sizes=sizes, step=0, where="x")
    ours = pickle.loads(dcp_metadata(manifest, paths=paths))  # noqa: S301  (written by this test)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == paths


def test_a_foreign_data_file_that_is_gone_is_named(tmp_path: Path) -> None:
    dcp.save(_state(), checkpoint_id=tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(DamagedError, match=r"__0_0\.distcp is missing"):
        open_checkpoint(str(tmp_path))


def test_only_canonical_names_are_steps() -> None:
    assert parse_step(step_folder(123456789)) == 123456789
    for name in ("step-1", "step-00000001-keep", "best-step-00000001", "step-000000001", "Step-00000001"):
        assert parse_step(name) is None


def test_digest_column_is_inline_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "MAX_INLINE_DIGESTS", 3)
    small, large = encode_manifest(_manifest(1, 3)), encode_manifest(_manifest(1, 4))
    assert small.digests is None
    assert large.digests is not None
    assert decode_manifest(large.manifest, where="m").chunks.digests is None


def test_a_table_past_the_limit_needs_as_many_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "MAX_VALUES", 1000)
    text = encode_manifest(_manifest(10, 20)).manifest
    for stored in (0, 50):
        with pytest.raises(DamagedError, match=f"values, but only {stored} stored digests"):
            decode_manifest(text, where="m", num_digests=lambda stored=stored: stored)  # type: ignore[misc]
    assert len(decode_manifest(text, where="m", num_digests=lambda: 200).chunks) == 200
    monkeypatch.setattr(manifest_module, "MOST_VALUES", 1500)
    with pytest.raises(DamagedError, match="a chunk table of"):
        decode_manifest(text, where="m", num_digests=lambda: 200)


def test_manifest_of_another_version_is_refused() -> None:
    content = json.loads(encode_manifest(replace(_manifest(1, 1), step=3)).manifest)
    content["version"] = 99
    with pytest.raises(NewerFormatError, match="version 99"):
        decode_manifest(json.dumps(content).encode(), where="m")
