"""Tensors that are not dense and plain: sparse, nested and quantised ones, subclasses, attributes; alone and inside of values."""

from __future__ import annotations

import collections
import pathlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nested._internal.nested_tensor
from torch.testing._internal.two_tensor import TwoTensor

from titan_ckpt import LoadPolicy, load, open_checkpoint, save
from titan_ckpt.errors import DamagedError, LoadContractError, UnsafeContentError
from titan_ckpt.parsing.value_archive import write_archive
from titan_ckpt.parsing.values import decode_value

pytestmark = pytest.mark.filterwarnings("ignore")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Held:
    x: Any


class Noted(torch.Tensor):
    """A dense tensor of a class of the user's."""


def _noted(value: float) -> torch.Tensor:
    tensor: Any = torch.full((2,), value).as_subclass(Noted)
    tensor.note = {"a": value}
    return tensor  # type: ignore[no-any-return]


def _attribute(value: float) -> torch.Tensor:
    tensor: Any = torch.nn.Parameter(torch.full((2,), value))
    tensor.axis = 3
    return tensor  # type: ignore[no-any-return]


def _int8(value: float) -> torch.Tensor:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(32, 32, bias=False)
    torch.nn.init.constant_(layer.weight, value)
    quantize_(layer, Int8WeightOnlyConfig(version=2))
    return layer.weight


FORMS: dict[str, Callable[[float], torch.Tensor]] = {
    "sparse": lambda value: (torch.eye(3) * value).to_sparse(),
    "csr": lambda value: (torch.eye(3) * value).to_sparse_csr(),
    "bsc": lambda value: (torch.ones(4, 4) * value).to_sparse_bsc((2, 2)),
    "nested": lambda value: torch.nested.nested_tensor([torch.full((1,), value), torch.full((2,), value)]),
    "jagged": lambda value: torch.nested.nested_tensor(
        [torch.full((1,), value), torch.full((2,), value)], layout=torch.jagged
    ),
    "quantised": lambda value: torch.quantize_per_tensor(torch.full((2,), value), 0.5, 1, torch.quint8),
    "by channel": lambda value: torch.quantize_per_channel(
        torch.full((2, 2), value), torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.qint8
    ),
    "wrapper": lambda value: TwoTensor(torch.full((2,), value), torch.zeros(2)),  # type: ignore[no-untyped-call]
    "int8": _int8,
    "subclass": _noted,
    "attribute": _attribute,
    "buffer": lambda value: torch.nn.Buffer(torch.full((2,), value)),
}
HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tuple": lambda tensor: (tensor, 1),
    "named": lambda tensor: Pair(tensor, 1),
    "deque": lambda tensor: collections.deque([tensor]),
    "dataclass": lambda tensor: Held(tensor),
    "with others": lambda tensor: (pathlib.Path("a"), tensor, np.ones(1)),
}


def _shown(value: Any) -> str:
    """A text that tells values apart; sizes of jagged dimensions are counted anew in each process."""
    if isinstance(value, torch.Tensor):
        inner = value.values() if value.layout is torch.jagged else value
        return f"{type(value).__name__} {inner!r} {getattr(value, 'note', '')} {getattr(value, 'axis', '')}"
    if isinstance(value, Held):
        return f"Held({_shown(value.x)})"
    if isinstance(value, list | tuple | collections.deque):
        return f"{type(value).__name__}{[_shown(each) for each in value]}"
    return repr(value)


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_inside_a_value_comes_back_as_with_dcp(tmp_path: pathlib.Path, form: str) -> None:
    full, blank = FORMS[form](2.0), FORMS[form](0.0)
    save(tmp_path, {name: hold(full) for name, hold in HOLDERS.items()} | {"w": torch.ones(1)}, step=1)
    state = {name: hold(blank) for name, hold in HOLDERS.items()}
    theirs = {name: hold(blank) for name, hold in HOLDERS.items()}
    load(tmp_path, state, policy=LoadPolicy(extra="allow"))
    dcp.load(theirs, checkpoint_id=tmp_path / "step-00000001")
    for name, hold in HOLDERS.items():
        assert _shown(state[name]) == _shown(theirs[name]) == _shown(hold(full))


@pytest.mark.parametrize("form", ["sparse", "csr", "nested", "jagged", "quantised", "by channel"])
def test_a_special_tensor_alone_is_stored_as_a_value(tmp_path: pathlib.Path, form: str) -> None:
    save(tmp_path, {"a": {"t": FORMS[form](2.0)}, "w": torch.ones(1)}, step=1)
    state: dict[str, Any] = {"a": {"t": FORMS[form](1.0)}, "w": torch.zeros(1)}
    present = state["a"]["t"]
    load(tmp_path, state)
    assert _shown(state["a"]["t"]) == _shown(FORMS[form](2.0))
    assert _shown(open_checkpoint(tmp_path).read_all()["a"]["t"]) == _shown(FORMS[form](2.0))
    assert (present is state["a"]["t"]) == (form != "jagged")
    dcp.load(theirs := {"a": {"t": FORMS[form](1.0)}}, checkpoint_id=tmp_path / "step-00000001")
    assert _shown(theirs["a"]["t"]) == _shown(FORMS[form](2.0))
    with pytest.raises(LoadContractError, match=r"a\.t"):
        load(tmp_path, {"a": {"t": torch.zeros(3)}, "w": torch.zeros(1)})


def test_read_all_makes_allowed_and_known_classes(tmp_path: pathlib.Path) -> None:
    save(tmp_path, {"mine": (FORMS["wrapper"](2.0),), "known": (_int8(2.0),), "alone": FORMS["wrapper"](2.0)}, step=1)
    opened = open_checkpoint(tmp_path)
    for name in ("mine", "alone"):
        with pytest.raises(UnsafeContentError, match=r"allow=\[TwoTensor\]"):
            opened.read_all(name)
    found = opened.read_all(allow=[TwoTensor])
    assert _shown(found["mine"][0]) == _shown(found["alone"]) == _shown(FORMS["wrapper"](2.0))
    assert _shown(found["known"][0]) == _shown(_int8(2.0))
    load(tmp_path, state := {"alone": FORMS["wrapper"](0.0), "mine": (FORMS["wrapper"](0.0),), "known": None})
    assert _shown(state["alone"]) == _shown(FORMS["wrapper"](2.0))


def test_an_array_mapped_from_a_file_comes_back_without_it(tmp_path: pathlib.Path) -> None:
    mapped = np.memmap(tmp_path / "data", dtype="f4", mode="w+", shape=(3,))
    mapped[:] = 2
    save(tmp_path / "run", {"a": mapped, "w": torch.ones(1)}, step=1)
    state: dict[str, Any] = {"a": None, "w": torch.zeros(1)}
    theirs: dict[str, Any] = {"a": None}
    load(tmp_path / "run", state)
    dcp.load(theirs, checkpoint_id=tmp_path / "run/step-00000001")
    assert type(state["a"]) is type(theirs["a"]) is np.memmap
    assert state["a"].tolist() == [2.0] * 3


class Forged:
    """Pickles as the call of a function with these arguments."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def _forged(function: Callable[..., Any], *arguments: Any) -> bytes:
    return write_archive(pickle.dumps(Forged(function, *arguments), protocol=2))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (_forged(torch._tensor._rebuild_from_type_v2, print, torch.Tensor, ("x",), {}), DamagedError),
        (
            _forged(torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_wrapper_subclass, TwoTensor, (), {}),
            DamagedError,
        ),
        (
            _forged(torch._utils._rebuild_wrapper_subclass, dict, torch.float32, (2,), (1,), 0, 0, 0, False),
            UnsafeContentError,
        ),
        (_forged(torch._utils._rebuild_sparse_tensor, 1, (1, 2, 3)), DamagedError),
        (_forged(torch._utils._rebuild_nested_tensor, 1, 2, 3, 4), DamagedError),
        (_forged(torch._utils._rebuild_qtensor, 1, 0, (1 << 40,), (1,), (1.0, 0), False, {}), DamagedError),
        (_forged(torch.nested._internal.nested_tensor._rebuild_njt, {"values": 1}), DamagedError),
    ],
)
def test_forged_calls_of_tensors_are_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_value(data, where="x")
