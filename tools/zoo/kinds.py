"""The kinds of states in the zoo: leaves in containers, tensors, optimizers and schedulers."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import pathlib
import random
import re
import types
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tools.zoo.animals import Colour, Counterlike, Level, Pair, Settings


@dataclass(frozen=True, slots=True)
class Kind:
    """A state to save, and one with the same names and other contents to load into."""

    name: str
    full: Callable[[], Any]
    blank: Callable[[], Any]


def kinds() -> list[Kind]:
    """All kinds, in a fixed order; each state has a tensor, without which there is nothing to reshard."""
    found = [*_leaves_in_containers(), *_tensors(), *_optimizers(), *_schedulers(), *_objects()]
    return [Kind(kind.name, _with_tensor(kind.full, 1.0), _with_tensor(kind.blank, 0.0)) for kind in found]


def _with_tensor(make: Callable[[], Any], value: float) -> Callable[[], Any]:
    return lambda: {**make(), "anchor": torch.full((4,), value)}


LEAVES: dict[str, Any] = {
    "int": 7, "big int": 10**40, "float": 1e-300, "nan": float("nan"), "bool": True, "none": None, "text": "é\n",
    "surrogate": "caf\udce9", "bytes": b"\x00\xff", "bytearray": bytearray(b"ab"), "complex": 1j, "range": range(3),
    "slice": slice(1, 2), "ellipsis": ..., "list": [1, [2, ["a"]]], "tuple": (1, (2,)), "empty list": [], "empty tuple": (),
    "set": {1, 2},
    "frozenset": frozenset("a"), "deque": collections.deque([1], maxlen=2), "date": datetime.date(2020, 1, 1),
    "datetime": datetime.datetime(2020, 1, 1, 2, 3, 4, 5), "aware": datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
    "time": datetime.time(1, 2), "delta": datetime.timedelta(1, 2, 3), "decimal": decimal.Decimal("1.5"),
    "fraction": fractions.Fraction(2, 3), "uuid": uuid.UUID(int=5), "path": pathlib.Path("a/b"), "pattern": re.compile("a"),
    "namespace": argparse.Namespace(a=1), "simple": types.SimpleNamespace(b=2), "type": float, "np float": np.float64(0.1),
    "np int": np.int64(3), "np bool": np.bool_(False), "np half": np.float16(0.5), "np text": np.str_("a"),
    "np date": np.datetime64("2020-01-01"), "np array": np.arange(4.0), "np 2d": np.eye(2, dtype=np.float32),
    "np empty": np.empty(0),
    "np texts": np.array(["a", "bc"]), "np objects": np.array([1, None], dtype=object), "np dtype": np.dtype("f4"),
    "np fields": np.zeros(2, dtype=[("a", "i4")]), "np state": np.random.RandomState(0).get_state(),
    "random": random.Random(0).getstate(),
    "size": torch.Size([1, 2]), "dtype": torch.float32, "device": torch.device("cpu"), "layout": torch.strided,
    "enum": Colour.RED, "flag": Level.HIGH, "dataclass": Settings(0.5, ["a"]), "named tuple": Pair(1, "a"),
    "named tuple with tensor": Pair(torch.arange(3), 1), "tuple with tensor": (torch.arange(3.0), "a"),
    "set of tuples": {(1, "a"), (2, "b")}, "counter in tuple": (collections.Counter("aab"),),
    "defaultdict in tuple": (collections.defaultdict(int, a=1),), "generator": np.random.default_rng(1), "function": len,
    "lambda": (lambda: 0), "class": Settings,
}  # fmt: skip
_OTHER: dict[str, Any] = {
    "enum": Colour.BLUE, "flag": Level.LOW, "dataclass": Settings(), "named tuple": Pair(0, ""),
    "named tuple with tensor": Pair(torch.zeros(3, dtype=torch.int64), 0), "class": Settings,
    "function": len, "tuple with tensor": (torch.zeros(3), ""),
}  # fmt: skip
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "top": lambda leaf: {"x": leaf, "w": torch.ones(1)},
    "dict": lambda leaf: {"a": {"b": {"x": leaf}}, "w": torch.ones(1)},
    "number as key": lambda leaf: {"a": {0: {1: leaf}}},
    "list": lambda leaf: {"a": [leaf, leaf]},
    "list with a dict": lambda leaf: {"a": [{"x": leaf}, leaf]},
    "list in a list": lambda leaf: {"a": [[[{"x": leaf}], leaf], 1]},
    "tuple": lambda leaf: {"a": (leaf, {"x": leaf})},
    "ordered": lambda leaf: {"a": collections.OrderedDict(z=leaf, a=leaf)},
    "odd keys": lambda leaf: {"a": {None: leaf, (1, "b"): leaf, 2.5: leaf}},
}


def _leaves_in_containers() -> Iterator[Kind]:
    for leaf, value in LEAVES.items():
        for container, wrap in _CONTAINERS.items():
            if container != "top" and leaf == "lambda":
                continue

            def full(value: Any = value, wrap: Callable[[Any], Any] = wrap) -> Any:
                return wrap(value)

            def blank(leaf: str = leaf, wrap: Callable[[Any], Any] = wrap) -> Any:
                return wrap(_OTHER.get(leaf))

            yield Kind(f"{leaf} in {container}", full, blank)


def _random(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    count = int(torch.Size(sizes).numel()) * dtype.itemsize
    raw = torch.randint(
        0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    return raw.view(dtype).view(sizes)


_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
    "complex64", "complex128", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip
_VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "0-d": lambda: torch.tensor(2.5), "empty": lambda: torch.zeros(0, 3), "transposed": lambda: torch.arange(6.0).view(2, 3).T,
    "strided": lambda: torch.arange(10.0)[::2], "part": lambda: torch.arange(10.0)[3:5],
    "expanded": lambda: torch.ones(1).expand(3),
    "channels last": lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "conj": lambda: torch.tensor([1 + 2j, 3j]).conj(), "neg": lambda: torch.tensor([1 + 2j, 3j]).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)), "buffer": lambda: torch.nn.Buffer(torch.ones(2)),
    "needs grad": lambda: torch.ones(2, requires_grad=True), "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(), "meta": lambda: torch.empty(2, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
}  # fmt: skip


def _tensors() -> Iterator[Kind]:
    for dtype in (getattr(torch, name) for name in _DTYPES if hasattr(torch, name)):

        def full(dtype: torch.dtype = dtype) -> Any:
            return {"a": {"w": _random(dtype, 3, 4)}}

        def blank(dtype: torch.dtype = dtype) -> Any:
            return {"a": {"w": torch.zeros(12 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(3, 4)}}

        yield Kind(f"tensor {dtype}", full, blank)
    for name, make in _VIEWS.items():

        def view(make: Callable[[], torch.Tensor] = make) -> Any:
            return {"w": make(), "v": 1}

        def zeros(make: Callable[[], torch.Tensor] = make) -> Any:
            plain = make().detach()
            is_plain = plain.layout == torch.strided and not (plain.is_nested or plain.is_quantized or plain.is_meta)
            return {"w": torch.zeros(plain.shape, dtype=plain.dtype) if is_plain else make(), "v": 0}

        yield Kind(f"tensor {name}", view, zeros)


_OPTIMIZERS = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
_OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "RMSprop": {"centered": True, "momentum": 0.1},
}


def _optimizer(name: str, steps: int) -> torch.optim.Optimizer:
    torch.manual_seed(steps)
    params = [torch.nn.Parameter(torch.rand(2, 3)), torch.nn.Parameter(torch.rand(3, 2))]
    kind = getattr(torch.optim, name)
    groups: Any = params if name == "LBFGS" else [{"params": params[:1], "lr": 0.01}, {"params": params[1:]}]
    optimizer: torch.optim.Optimizer = kind(groups, **_OPTIONS.get(name, {}))

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = sum(param.square().sum() for param in params)
        assert isinstance(found, torch.Tensor)
        torch.autograd.backward(found)
        return found.detach()

    for _ in range(steps):
        optimizer.step(lambda: float(loss()))
    return optimizer


def _optimizers() -> Iterator[Kind]:
    for name in _OPTIMIZERS:
        if not hasattr(torch.optim, name):
            continue
        for steps, before in ((2, 1), (2, 0), (0, 0)):

            def full(name: str = name, steps: int = steps) -> Any:
                return {"optimizer": _optimizer(name, steps)}

            def blank(name: str = name, before: int = before) -> Any:
                return {"optimizer": _optimizer(name, before)}

            yield Kind(f"{name} after {steps} steps, object after {before}", full, blank)
            if (steps > 0) == (before > 0):
                yield Kind(
                    f"{name} after {steps} steps",
                    lambda full=full: {"optimizer": full()["optimizer"].state_dict()},  # type: ignore[misc]
                    lambda blank=blank: {"optimizer": blank()["optimizer"].state_dict()},  # type: ignore[misc]
                )


_S = torch.optim.lr_scheduler
_SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: _S.LambdaLR(o, lambda n: 0.9**n), "MultiplicativeLR": lambda o: _S.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: _S.StepLR(o, 2), "MultiStepLR": lambda o: _S.MultiStepLR(o, [1, 3]), "ConstantLR": _S.ConstantLR,
    "LinearLR": _S.LinearLR, "ExponentialLR": lambda o: _S.ExponentialLR(o, 0.9), "PolynomialLR": _S.PolynomialLR,
    "CosineAnnealingLR": lambda o: _S.CosineAnnealingLR(o, 10), "CyclicLR": lambda o: _S.CyclicLR(o, 0.01, 0.1),
    "CosineAnnealingWarmRestarts": lambda o: _S.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: _S.OneCycleLR(o, 0.1, 20),
    "ReduceLROnPlateau": _S.ReduceLROnPlateau,
    "SequentialLR": lambda o: _S.SequentialLR(o, [_S.LinearLR(o), _S.StepLR(o, 2)], [2]),
    "ChainedScheduler": lambda o: _S.ChainedScheduler([_S.LinearLR(o), _S.StepLR(o, 2)]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}  # fmt: skip


def _scheduler(name: str, steps: int) -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = _SCHEDULERS[name](optimizer)
    for step in range(steps):
        optimizer.step()
        scheduler.step(*([float(step)] if name == "ReduceLROnPlateau" else []))
    return scheduler


def _schedulers() -> Iterator[Kind]:
    for name in _SCHEDULERS:

        def full(name: str = name) -> Any:
            return {"schedule": _scheduler(name, 3)}

        def blank(name: str = name) -> Any:
            return {"schedule": _scheduler(name, 0)}

        yield Kind(name, full, blank)
        yield Kind(
            f"{name} state",
            lambda full=full: {"schedule": full()["schedule"].state_dict()},  # type: ignore[misc]
            lambda blank=blank: {"schedule": blank()["schedule"].state_dict()},  # type: ignore[misc]
        )


def _linear(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 3)


def _objects() -> Iterator[Kind]:
    yield Kind("module", lambda: {"model": _linear(1)}, lambda: {"model": _linear(2)})
    yield Kind("loader", lambda: {"loader": Counterlike(2)}, lambda: {"loader": Counterlike(0)})
    yield Kind(
        "averaged model",
        lambda: {"ema": torch.optim.swa_utils.AveragedModel(_linear(1))},
        lambda: {"ema": torch.optim.swa_utils.AveragedModel(_linear(2))},
    )
    yield Kind(
        "two names of one tensor",
        lambda: {"a": (weight := torch.arange(3.0)), "b": weight},
        lambda: {"a": torch.zeros(3), "b": torch.zeros(3)},
    )
