"""Codec, incremental saves, retention and ownership of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._extension import ExtensionRegistry

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.dcp.storage import PlanesZstd
from titan_ckpt.errors import DamagedError, NotCommittedError, UsageError
from titan_ckpt.format import codec
from titan_ckpt.format.torch_blob import envelope
from titan_ckpt.loading.load import LoadPolicy, load, open_checkpoint
from titan_ckpt.resharding.placement_rules import PlacementRule
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver, save
from titan_ckpt.saving.second_tier import open_nearest
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Box, Shard
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.copy import copy_checkpoint
from titan_ckpt.upkeep.ownership import FencedError
from titan_ckpt.upkeep.retention import RetentionPolicy

ENCODED = SaveOptions(codec="planes-zstd")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["uint8", "bfloat16", "float32", "int64", "complex128"]),
    st.integers(0, 700_000),
    st.integers(0, 2**32),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_any_range_of_an_encoded_payload_is_its_raw_bytes(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, size: int, seed: int, at: float, part: float
) -> None:
    around = envelope(dtype, (size,))
    itemsize = around.payload_length // max(size, 1)
    raw = np.random.default_rng(seed).integers(0, 7, around.payload_length, dtype=np.uint8).tobytes()
    head = codec.encode_head(around, itemsize or 1)
    payload = b"".join(codec.encode(memoryview(raw), itemsize or 1))
    store = FileStore(str(tmp_path_factory.mktemp("codec")))
    store.write("x", [head, payload])
    first = int(at * len(raw))
    out = bytearray(int(part * (len(raw) - first)))
    encoded = codec.EncodedPayload(
        path="x", start=len(head), length=len(payload), raw_length=len(raw), itemsize=itemsize or 1
    )
    codec.read_raw(store, encoded, first, memoryview(out))
    assert bytes(out) == raw[first : first + len(out)]
    if raw:
        assert codec.decode_blob(head + payload, "x") == around.prefix + raw + around.suffix


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "w": torch.randn(900, 1000), "b": torch.randn(300, 700).to(torch.bfloat16), "s": torch.tensor(3),
        "e": torch.zeros(0, 2), "step": 4,
    }  # fmt: skip


def _zeros() -> dict[str, Any]:
    return {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for key, value in _state().items()}


def _assert_equal(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        assert torch.equal(loaded[key], value) if isinstance(value, torch.Tensor) else loaded[key] == value, key


def test_an_encoded_checkpoint_is_bit_exact_and_smaller(tmp_path: Path) -> None:
    report = save(str(tmp_path), _state(), step=1, options=ENCODED)
    assert report.written_bytes < 0.95 * report.raw_bytes
    loaded = _zeros()
    assert load(str(tmp_path), loaded).unverified_bytes == 0
    _assert_equal(loaded, _state())
    part = open_checkpoint(str(tmp_path)).read("w", Box((100, 3), (700, 900)))
    assert torch.equal(part, _state()["w"][100:800, 3:903])


def test_plain_dcp_reads_an_encoded_checkpoint_by_extension(tmp_path: Path) -> None:
    save(str(tmp_path), _state(), step=1, options=ENCODED)
    registry = ExtensionRegistry()
    registry.register(PlanesZstd)
    reader = dcp.FileSystemReader(tmp_path / "step-00000001", _extension_registry=registry)
    loaded = _zeros()
    dcp.load(loaded, storage_reader=reader)
    _assert_equal(loaded, _state())


def test_damage_inside_an_encoded_chunk_is_found_and_named(tmp_path: Path) -> None:
    save(str(tmp_path), _state(), step=1, options=ENCODED)
    checkpoint = open_checkpoint(str(tmp_path))
    chunk = next(checkpoint.manifest.chunks_of(checkpoint.manifest.by_fqn["w"]))
    path = tmp_path / "step-00000001" / chunk.file
    data = bytearray(path.read_bytes())
    for at in (0.01, 0.5, 0.999):
        flipped = bytearray(data)
        flipped[chunk.offset + chunk.payload_offset + int(at * (chunk.payload_length - 1))] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(DamagedError, match="not what was saved"):
            load(checkpoint, _zeros(), policy=LoadPolicy())


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(UsageError, match="use one of raw, planes-zstd"):
        SaveOptions(codec="gzip")


def test_an_unchanged_chunk_is_not_written_again(tmp_path: Path) -> None:
    state = {"frozen": torch.randn(300_000), "lora": torch.zeros(10)}
    with Saver(str(tmp_path), SaveOptions(incremental=True)) as saver:
        first = saver.save(state, step=1).wait()
        state["lora"] += 1
        second = saver.save(state, step=2).wait()
    assert first.written_bytes > 1_200_000
    assert second.written_bytes < 2_000
    loaded = {"frozen": torch.zeros(300_000), "lora": torch.zeros(10)}
    load(str(tmp_path), loaded)
    _assert_equal(loaded, state)
    plain = {"frozen": torch.zeros(300_000), "lora": torch.zeros(10)}
    dcp.load(plain, checkpoint_id=tmp_path / "step-00000002")
    _assert_equal(plain, state)


def test_a_new_jobs_incremental_save_builds_on_the_newest(tmp_path: Path) -> None:
    state = {"frozen": torch.randn(300_000)}
    for step in (1, 2, 3):
        with Saver(str(tmp_path), SaveOptions(incremental=True)) as saver:
            report = saver.save(state, step=step).wait()
    assert report.written_bytes == 0
    assert open_checkpoint(str(tmp_path)).manifest.files[0].path.startswith("../step-00000001/")


def test_an_incremental_save_of_other_ranks_shapes_writes_all(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.arange(8.0)}, step=1)
    with Saver(str(tmp_path), SaveOptions(incremental=True)) as saver:
        saver.save({"w": torch.arange(8.0).to(torch.float64)}, step=2).wait()
    loaded = {"w": torch.zeros(8, dtype=torch.float64)}
    load(str(tmp_path), loaded)
    assert loaded["w"].tolist() == list(range(8))


def test_a_reference_to_a_lost_file_is_found_before_the_commit(tmp_path: Path) -> None:
    state = {"frozen": torch.randn(3000)}
    with Saver(str(tmp_path), SaveOptions(incremental=True)) as saver:
        saver.save(state, step=1).wait()
        next((tmp_path / "step-00000001").glob("a-*/__0_0.distcp")).unlink()
        with pytest.raises(SaveError, match=r"expected \d+ bytes, it is missing"):
            saver.save(state, step=2).wait()
    assert [info.step for info in list_checkpoints(str(tmp_path)) if info.state == "committed"] == [1]


def test_retention_keeps_what_policy_and_later_steps_need(tmp_path: Path) -> None:
    state = {"frozen": torch.randn(3000), "w": torch.zeros(3)}
    options = SaveOptions(incremental=True, retention=RetentionPolicy(keep_last=2, keep_every=4))
    with Saver(str(tmp_path), options) as saver:
        for step in range(1, 8):
            state["w"] += 1
            saver.save(state, step=step).wait()
    committed = [info.step for info in list_checkpoints(str(tmp_path)) if info.state == "committed"]
    assert committed == [4, 6, 7]
    loaded = {"frozen": torch.zeros(3000), "w": torch.zeros(3)}
    load(open_checkpoint(str(tmp_path), step=4), loaded)
    assert torch.equal(loaded["frozen"], state["frozen"])
    assert loaded["w"].tolist() == [4.0] * 3


def test_a_fenced_job_can_no_longer_commit(tmp_path: Path) -> None:
    with Saver(str(tmp_path)) as zombie:
        zombie.save({"w": torch.zeros(2)}, step=1).wait()
        with Saver(str(tmp_path)) as successor:
            successor.save({"w": torch.ones(2)}, step=2).wait()
            with pytest.raises(SaveError, match=r"took this run over .* was not committed") as caught:
                zombie.save({"w": torch.zeros(2)}, step=3).wait()
            assert FencedError.__name__ in str(caught.value)
            successor.save({"w": torch.ones(2)}, step=3).wait()
    assert torch.equal(open_checkpoint(str(tmp_path)).read("w"), torch.ones(2))


def test_every_commit_reaches_the_second_tier_and_either_resumes(tmp_path: Path) -> None:
    fast, safe = str(tmp_path / "fast"), str(tmp_path / "safe")
    options = SaveOptions(mirror=safe, incremental=True, retention=RetentionPolicy(keep_last=1))
    state = {"frozen": torch.randn(3000), "w": torch.zeros(3)}
    with Saver(fast, options) as saver:
        for step in range(1, 6):
            state["w"] += 1
            saver.save(state, step=step)
    assert [info.step for info in list_checkpoints(safe) if info.state == "committed"] == [1, 2, 3, 4, 5]
    assert [info.step for info in list_checkpoints(fast) if info.state == "committed"][-1] == 5
    assert len(list_checkpoints(fast)) < 5
    for url in (fast, safe):
        loaded = {"frozen": torch.zeros(3000), "w": torch.zeros(3)}
        load(url, loaded)
        _assert_equal(loaded, state)


def test_resuming_takes_the_nearest_tier_whole_on_every_rank(tmp_path: Path) -> None:
    fast, safe = str(tmp_path / "fast"), str(tmp_path / "safe")
    with Saver(fast, SaveOptions(mirror=safe)) as saver:
        saver.save({"w": torch.zeros(3)}, step=1)
        saver.save({"w": torch.ones(3)}, step=2)
    assert open_nearest([fast, safe]).url == fast
    assert open_nearest([fast, safe], all_steps=lambda step: [step, step]).url == fast
    answers = iter([[2, -1], [2, 2]])
    assert open_nearest([fast, safe], all_steps=lambda _: next(answers)).url == safe
    for path in (tmp_path / "fast" / "step-00000002").glob("a-*/__0_0.distcp"):
        path.unlink()
    assert open_nearest([fast, safe]).url == safe
    with pytest.raises(NotCommittedError, match="no tier holds"):
        open_nearest([str(tmp_path / "none")])


def test_a_failed_mirror_is_reported_and_the_next_step_mirrored(tmp_path: Path) -> None:
    fast, safe = tmp_path / "fast", tmp_path / "safe"
    safe.mkdir()
    (safe / "step-00000001").write_text("a file where a folder must be")
    saver = Saver(str(fast), SaveOptions(mirror=str(safe)))
    saver.save({"w": torch.zeros(3)}, step=1).wait()
    with pytest.raises(SaveError, match="mirroring step 1"):
        saver.close()
    with Saver(str(fast), SaveOptions(mirror=str(safe))) as saver:
        saver.save({"w": torch.zeros(3)}, step=2).wait()
    assert open_checkpoint(str(safe)).step == 2


def test_an_encoded_checkpoint_is_resharded_through_its_codec(tmp_path: Path) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    state = {"model": {"w": torch.randn(900, 1000), "b": torch.arange(7, dtype=torch.int16)}, "step": 4}
    save(source, state, step=1, options=SaveOptions(codec="planes-zstd", mesh=MeshSpec()))
    rules = (PlacementRule(glob="*", placements={"dp_shard": Shard(0)}),)
    plan = plan_reshard(open_checkpoint(source), MeshSpec.parse("dp_shard=3"), rules=rules)
    run_plan(plan, target)
    loaded: dict[str, Any] = {"model": {"w": torch.zeros(900, 1000), "b": torch.zeros(7, dtype=torch.int16)}, "step": 0}
    assert load(target, loaded).unverified_bytes == 0
    _assert_equal(loaded["model"], state["model"])  # type: ignore[arg-type]
    assert len(open_checkpoint(target).manifest.files) == 3


def test_a_copy_of_an_incremental_checkpoint_stands_on_its_own(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    state = {"model": {"frozen": torch.randn(3000), "w": torch.zeros(3)}, "step": 0}
    with Saver(str(run), SaveOptions(incremental=True)) as saver:
        for step in (1, 2, 3):
            state["model"]["w"] += 1  # type: ignore[index]
            saver.save(state, step=step)
    source = open_checkpoint(str(run))
    for _ in range(2):  # the second copy finds every file present
        report = copy_checkpoint(source, FileStore(str(copy)))
    assert report.copied_bytes == 0
    assert sorted(path.name for path in copy.iterdir()) == ["step-00000003"]
    assert verify(str(copy), read_data=True) == []
    plain: dict[str, Any] = {"model": {"frozen": torch.zeros(3000), "w": torch.zeros(3)}, "step": 1}
    dcp.load(plain, checkpoint_id=copy / "step-00000003")
    _assert_equal(plain["model"], state["model"])  # type: ignore[arg-type]
