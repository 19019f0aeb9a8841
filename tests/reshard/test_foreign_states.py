"""States of DCP that its index says otherwise than ours does: quantised tensors, which we store as values, and empty names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import titan_ckpt as tc

pytestmark = pytest.mark.filterwarnings("ignore")  # torch says that quantisation has moved to torchao


def state(seed: int) -> dict[str, torch.Tensor]:
    values = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    scales, zeros = torch.rand(4, generator=torch.Generator().manual_seed(seed)) + 0.1, torch.arange(4)
    return {
        "plain": values,
        "whole": torch.quantize_per_tensor(values, 0.1 + seed, 3, torch.qint8),
        "rows": torch.quantize_per_channel(values, scales, zeros, 0, torch.quint8),
        "wide": torch.quantize_per_tensor(values, 0.1, 0, torch.qint32),
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_of_dcp_with_quantised_tensors_is_read(tmp_path: Path) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path / "run" / "step-5")
    assert same(tc.open_checkpoint(tmp_path / "run").read_all(), state(1))
    loaded = state(2)
    tc.load(tmp_path / "run", loaded)
    assert same(loaded, state(1))
    loaded = state(2)
    dcp.load(loaded, storage_reader=tc.StorageReader(f"{tmp_path / 'run'}@5"))
    assert same(loaded, state(1))
    assert tc.diff(f"{tmp_path / 'run'}@5", f"{tmp_path / 'run'}@5", values=True) == []


def test_what_dcp_saves_of_them_through_our_writer_is_read(tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=tc.StorageWriter(tmp_path / "run", step=5))
    for read in (
        lambda target: tc.load(tmp_path / "run", target),
        lambda target: dcp.load(target, checkpoint_id=tmp_path / "run" / "step-00000005"),
    ):
        loaded = state(2)
        read(loaded)
        assert same(loaded, state(1))


def test_an_empty_name_in_a_checkpoint_of_dcp_is_a_name(tmp_path: Path) -> None:
    saved = {"": torch.arange(3.0), "a": {"": 1, ".": 2}, "b": {"": torch.ones(2)}}
    dcp.save(saved, checkpoint_id=tmp_path / "run" / "step-5")
    found = tc.open_checkpoint(tmp_path / "run").read_all()
    assert found["a"] == {"": 1, ".": 2}
    assert found[""].tolist() == [0, 1, 2]
    assert found["b"][""].tolist() == [1, 1]
