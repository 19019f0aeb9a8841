"""Modes and default devices of the caller's: what is saved and loaded is what the tensors hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.loading.load import load
from titan_ckpt.loading.policy import LoadPolicy
from titan_ckpt.saving.saver import SaveOptions, Saver

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "fake tensors alone": FakeTensorMode,
    "flop counter": lambda: FlopCounterMode(display=False),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_process", [False, True])
def test_a_save_in_a_mode_stores_the_values(mode: str, is_process: bool, tmp_path: Path) -> None:
    value = torch.ones(3000)
    with Saver(tmp_path, SaveOptions(upload_process=is_process)) as saver:
        saver.save({"t": value}, step=1).wait()  # makes the buffer that the next save uses again
        value.fill_(2)
        with MODES[mode]():
            saver.save({"t": value}, step=2).wait()
        value.fill_(3)
        with MODES[mode]():
            saver.save_now({"t": value}, step=3)
    assert open_checkpoint(f"{tmp_path}@2").read("t").tolist() == [2] * 3000
    assert open_checkpoint(f"{tmp_path}@3").read("t").tolist() == [3] * 3000


@pytest.mark.parametrize("policy", [LoadPolicy(), LoadPolicy(lossy_cast="error", cast="allow")])
@pytest.mark.parametrize("mode", MODES)
def test_a_load_in_a_mode_fills_the_tensors(mode: str, policy: LoadPolicy, tmp_path: Path) -> None:
    stored: dict[str, Any] = {
        "t": torch.arange(3000.0),
        "half": torch.arange(64).half(),
        "n": 3,
        "list": [torch.ones(2), "x"],
    }
    with Saver(tmp_path) as saver:
        saver.save(stored, step=1)
    target: dict[str, Any] = {"t": torch.zeros(3000), "half": torch.zeros(64), "n": 0, "list": [torch.zeros(2), ""]}
    target["half"] = target["half"].half() if policy == LoadPolicy() else target["half"]
    with MODES[mode]():
        load(tmp_path, target, policy=policy)
    assert torch.equal(target["t"], stored["t"])
    assert torch.equal(target["half"].half(), stored["half"])
    assert target["n"] == 3
    assert torch.equal(target["list"][0], torch.ones(2))


@pytest.mark.parametrize("mode", ["flop counter", "default device"])
def test_reading_without_a_template_in_a_mode(mode: str, tmp_path: Path) -> None:
    kinds = {
        "t": torch.ones(3),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.zeros(0),
        "view": torch.ones(1).expand(4),
    }
    with Saver(tmp_path) as saver:
        saver.save(kinds, step=1)
    with MODES[mode]():
        found = open_checkpoint(tmp_path).read_all()
        alone = open_checkpoint(tmp_path).read("t")
    assert alone.device.type == "cpu"
    assert alone.tolist() == [1, 1, 1]
    assert {name: value.to_dense().tolist() for name, value in found.items()} == {
        name: value.to_dense().tolist() for name, value in kinds.items()
    }
