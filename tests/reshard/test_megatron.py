"""A checkpoint that Megatron-Core 0.16.1 wrote (`tools/golden_megatron.py`) is read, verified and resharded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt import open_checkpoint, verify
from titan_ckpt.cli.main import main
from tools.paths import DATA

RUN = str(DATA / "megatron")
QKV, NORM = "decoder.layers.self_attention.linear_qkv.weight", "decoder.final_layernorm.weight"


@pytest.mark.parametrize("url", [RUN, f"{RUN}@1000", f"{RUN}/iter_0001000"])
def test_a_checkpoint_of_megatron_opens_by_each_of_its_names(url: str) -> None:
    checkpoint = open_checkpoint(url)
    assert checkpoint.step == 1000
    assert torch.equal(checkpoint.read(QKV), torch.arange(512.0).view(64, 8))
    assert torch.equal(checkpoint.read(NORM), torch.ones(8, dtype=torch.bfloat16))
    assert verify(checkpoint, read_data=True) == []


def test_a_checkpoint_of_megatron_is_listed_and_resharded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", RUN]) == 0
    assert capsys.readouterr().out.split("\n")[1].split()[:2] == ["1000", "foreign"]
    assert main(["reshard", RUN, str(tmp_path / "four"), "--mesh", "dp_shard=4"]) == 0
    state = {QKV: torch.zeros(64, 8)}
    dcp.load(state, checkpoint_id=str(tmp_path / "four" / "step-00001000"))
    assert np.array_equal(state[QKV].numpy(), np.arange(512).reshape(64, 8))
