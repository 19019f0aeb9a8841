"""Classes of torchao's whose settings are objects of their own classes: `read_all` makes them without being allowed to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.state.test_subclasses import _bits
from titan_ckpt import load, open_checkpoint, save
from titan_ckpt.checkpoint.subclasses import put_together
from titan_ckpt.format.structure import MARK, Mark
from titan_ckpt.state.subclasses import without_shapes

pytestmark = pytest.mark.filterwarnings("ignore")


def _nf4(seed: int) -> torch.Tensor:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    found: torch.Tensor = to_nf4(torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)))
    return found


def _float8_of_training(seed: int) -> torch.Tensor:
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, LinearMMConfig, ScaledMMConfig

    values = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)
    made: Any = Float8TrainingTensor
    found: torch.Tensor = made(values, torch.ones(()), torch.bfloat16, LinearMMConfig(*[ScaledMMConfig()] * 3))
    return found


def _sparse_blocks(seed: int) -> torch.Tensor:
    from torchao.sparsity.blocksparse import BlockSparseTensor

    found: torch.Tensor = BlockSparseTensor.from_dense(
        torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)), 4
    )
    return found


@pytest.mark.parametrize("make", [_nf4, _float8_of_training, _sparse_blocks])
def test_it_is_read_without_a_template_and_into_one(tmp_path: Path, make: Callable[[int], torch.Tensor]) -> None:
    old, new = make(1), make(2)
    assert _bits(old) != _bits(new)
    save(tmp_path / "run", {"w": old}, step=1)
    opened = open_checkpoint(tmp_path / "run")
    assert _bits(opened.read_all()["w"]) == _bits(opened.read("w")) == _bits(old)
    load(opened, {"w": new})
    assert _bits(new) == _bits(old)


def test_settings_of_another_device_are_no_others() -> None:
    """What was saved on a GPU is read on a laptop, and loaded into a state in host memory."""
    tensor: Any = _nf4(1)
    names, context = tensor.__tensor_flatten__()
    there = context | {"tensor_meta": replace(context["tensor_meta"], device=torch.device("cuda:0"))}
    assert without_shapes(there, 2) == without_shapes(context, 2)
    assert without_shapes(context | {"block_size": 3}, 2) != without_shapes(context, 2)
    mark = Mark(
        name=f"{type(tensor).__module__}.NF4Tensor",
        dtype="float32",
        shape=(64, 512),
        parts=tuple(names),
        own={},
        context=there,
    )
    made = put_together({"w": {name: getattr(tensor, name) for name in names} | {MARK: mark.value}}, {}, "here")["w"]
    assert made.device == torch.device("cpu")
    assert _bits(made) == _bits(tensor)
