"""Values that are not tensors come back equal, or are refused when they are saved."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import pathlib
import pickle
import random
import re
import types
import uuid
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.testing._internal.two_tensor import TwoTensor

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.dcp.storage import StorageReader, StorageWriter
from titan_ckpt.errors import (
    CheckpointError,
    DamagedError,
    LoadContractError,
    TitanError,
    UnsafeContentError,
    UsageError,
)
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.parsing.values import decode_value
from titan_ckpt.saving.saver import save
from titan_ckpt.state.values import encode_value


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntFlag):
    LOW, HIGH = 1, 2


class Point(NamedTuple):
    x: int
    y: torch.Tensor


@dataclass
class Settings:
    lr: float = 0.1
    names: list[str] = field(default_factory=lambda: ["a"])


@dataclass(frozen=True, slots=True)
class Frozen:
    colour: Colour = Colour.RED


class Plain:
    def __init__(self) -> None:
        self.best = {"loss": 1.5}


def _cyclic() -> collections.deque[Any]:
    found: collections.deque[Any] = collections.deque([1])
    found.append(found)
    return found


PLAIN: dict[str, Any] = {
    "int": 10**30, "float": float("-inf"), "text": "caf\udce9.txt", "none": None, "bytes": b"\x00\xff", "empty bytes": b"",
    "bytearray": bytearray(b"a"), "complex": 1 - 2j, "range": range(1, 9, 2), "slice": slice(1, None), "ellipsis": ...,
    "set": {1, (2, "a")}, "frozenset": frozenset({"a", frozenset({1})}), "deque": collections.deque([1, None], maxlen=3),
    "tuple": (1, ("a", [2.5, {"k": ()}])), "counter": (collections.Counter("aab"),),
    "defaultdict": (collections.defaultdict(list, a=[1]),), "ordered": (collections.OrderedDict(b=1, a=2),),
    "date": datetime.date(2020, 2, 29), "time": datetime.time(1, 2, 3, 4), "delta": datetime.timedelta(days=-1, microseconds=5),
    "datetime": datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
    "zone": datetime.datetime(2020, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")),
    "decimal": Decimal("1.10"), "fraction": Fraction(-1, 3), "uuid": uuid.UUID(int=7), "path": pathlib.Path("/a/b"),
    "windows path": pathlib.PureWindowsPath("c:/a"), "namespace": argparse.Namespace(a=1), "simple": types.SimpleNamespace(a=[1]),
    "pattern": re.compile("a+", re.IGNORECASE), "type": int, "none type": type(None), "random": random.Random(3).getstate(),
    "np float": np.float64(1.5), "np bool": np.bool_(True), "np text": np.str_("ab"),
    "np date": np.datetime64("2020-01-01T00:00", "s"),
    "np half": np.float16(0.1), "np dtype": np.dtype("<f4"), "np type": np.float32,
    "np state": np.random.RandomState(1).get_state(),
    "array": np.arange(6.0).reshape(2, 3), "big-endian": np.arange(3, dtype=">i4"), "columns": np.asfortranarray(np.eye(3)),
    "empty array": np.empty((0, 3), dtype=np.int8), "0-d array": np.array(3), "texts": np.array(["a", "bcd"]),
    "fields": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8", (2,))]), "objects": np.array([None, "a"], dtype=object),
    "dates": np.array(["2020-01-01"], dtype="M8[D]"), "np state dict": (np.random.PCG64(3).state,),
    "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "sub-byte": torch.uint16, "device": torch.device("cuda:1"),
    "layout": torch.sparse_coo, "scheme": torch.per_tensor_affine,
}  # fmt: skip
OTHERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "tensor in a tuple": ((torch.arange(3), 1), repr),
    "views of one storage": ((torch.arange(6).view(2, 3).T, torch.ones(2, dtype=torch.bfloat16)), repr),
    "parameter": ((torch.nn.Parameter(torch.ones(2), requires_grad=False),), repr),
    "generator": (torch.Generator().manual_seed(5), lambda found: found.get_state().tolist()),
    "random": (random.Random(3), lambda found: found.getstate()),
    "np generator": (np.random.default_rng(4), lambda found: (found.bit_generator.state, found.spawn(1)[0].random())),
    "np random state": (np.random.RandomState(4), lambda found: found.random_sample(3).tolist()),
    "enum": (Colour.RED, lambda found: found is Colour.RED),
    "flag": (Level.LOW | Level.HIGH, lambda found: (type(found), int(found))),
    "named tuple": (Point(1, torch.ones(2)), repr),
    "dataclass": (Settings(lr=0.5), repr),
    "slots": (Frozen(), repr),
    "object": (Plain(), lambda found: (type(found), vars(found))),
    "cycle": (_cyclic(), lambda found: (found[0], found[1] is found)),
    "shared": ([a := [1], a], lambda found: (found, found[0] is found[1])),
}  # fmt: skip


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and repr(a) == repr(b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return type(a) is type(b) and bool(a == b)


def test_every_plain_value_comes_back(tmp_path: Path) -> None:
    save(str(tmp_path), {"values": PLAIN}, step=1)
    target = {"values": dict.fromkeys(PLAIN)}
    load(str(tmp_path), target)
    assert [name for name, value in PLAIN.items() if not _is_equal(value, target["values"][name])] == []
    everything = open_checkpoint(str(tmp_path)).read_all("values")
    assert [name for name, value in PLAIN.items() if not _is_equal(value, everything[name])] == []


@pytest.mark.parametrize("name", OTHERS)
def test_a_value_comes_back_where_one_of_its_class_stands(name: str, tmp_path: Path) -> None:
    value, shown = OTHERS[name]
    save(str(tmp_path), {"value": value}, step=1)
    expected, state = shown(value), {"value": value}
    load(str(tmp_path), state)
    assert shown(state["value"]) == expected
    assert name in ("cycle", "shared", "tensor in a tuple", "enum", "flag") or state["value"] is not value


def test_a_class_is_needed_at_its_place_or_in_allow(tmp_path: Path) -> None:
    save(str(tmp_path), {"value": Settings(lr=0.5), "w": torch.ones(2)}, step=1)
    state: dict[str, Any] = {"value": None, "w": torch.zeros(2)}
    with pytest.raises(
        UnsafeContentError, match=r"value 'value' holds .*test_values\.Settings.*LoadPolicy\(allow=\[Settings\]\)"
    ):
        load(str(tmp_path), state)
    assert state["w"].tolist() == [0, 0]
    load(str(tmp_path), state, policy=LoadPolicy(allow=[Settings]))
    assert state["value"] == Settings(lr=0.5)
    assert open_checkpoint(str(tmp_path)).read_all("value", allow=[Settings]) == Settings(lr=0.5)
    with pytest.raises(UsageError, match=r"allow: expected a list of classes"):
        LoadPolicy(allow="Settings")


class Cursed:
    def __reduce__(self) -> Any:
        return (pathlib.Path.touch, (pathlib.Path("never"),))


@pytest.mark.parametrize("value", ["".join, [{}.get], Cursed(), [Cursed()], OSError(2), lambda: 0])
def test_what_cannot_be_loaded_is_refused_at_save(value: Any, tmp_path: Path) -> None:
    with pytest.raises(TitanError, match=r"run\.thing: a .* (is not saved|cannot be stored)"):
        save(str(tmp_path), {"run": {"thing": value}, "w": torch.ones(1)}, step=1)
    assert not list(tmp_path.glob("step*/*"))


def _pickled(value: Any) -> bytes:
    class _Archive:
        def __reduce__(self) -> Any:
            return value

    from titan_ckpt.parsing.value_archive import write_archive

    return write_archive(pickle.dumps(_Archive(), protocol=2))


@pytest.mark.parametrize(
    "call",
    [
        (exec, ("raise SystemExit",)),
        (eval, ("1",)),
        (getattr, (pathlib.Path, "touch")),
        (bytearray, (1 << 40,)),
        (Fraction, ("1e999999999",)),
        (Decimal, ("1" * 5000,)),
        (np.dtype, ("V99999999999",)),
        (range, (1, 2), {"a": 1}),
        (collections.deque, ([], 3, 4)),
        (datetime.date, (b"\xff" * 4,)),
        (torch.Size, (["a"],)),
        (zoneinfo.ZoneInfo._unpickle, ("../../etc/passwd", True)),  # type: ignore[attr-defined]
        (type, ("A", (), {})),
        (int, ("1" * 9,)),
        (np.random.SeedSequence, ()),
        (torch.Tensor, (10**9,)),
        (torch.FloatTensor, (10**9,)),
        (torch.device, ("x",)),
    ],
)
def test_calls_that_no_writer_makes_are_refused(call: Any) -> None:
    with pytest.raises((DamagedError, UnsafeContentError), match="x"):
        decode_value(_pickled(call), where="x")


@pytest.mark.parametrize("code", ["V0", "S0", "U0"])
def test_an_array_of_items_without_bytes_is_small(code: str) -> None:
    data = encode_value("x", np.empty((77,), dtype=code))
    assert decode_value(data, where="x").shape == (77,)
    wrong = data.replace(b"KM\x85", b"\x8a\x05\x00\x00\x00\x00\x40\x85")
    assert wrong != data
    with pytest.raises(DamagedError, match="x"):
        decode_value(wrong, where="x")


def test_conjugated_and_negated_views_keep_their_values(tmp_path: Path) -> None:
    conjugated, negated = (torch.complex(torch.arange(3.0), torch.ones(3)).conj() for _ in range(2))
    save(str(tmp_path), {"v": (conjugated, negated.imag), "q": collections.deque([conjugated])}, step=1)
    found = open_checkpoint(str(tmp_path)).read_all()
    assert torch.equal(found["v"][0], conjugated)
    assert torch.equal(found["v"][1], negated.imag)
    assert torch.equal(found["q"][0], conjugated)


def test_dcps_planner_stores_a_tensor_made_of_others(tmp_path: Path) -> None:
    old, new = [TwoTensor(torch.full((2,), n), torch.full((2,), -n)) for n in (1.0, 2.0)]  # type: ignore[no-untyped-call]
    dcp.save({"moment": old}, storage_writer=StorageWriter(f"{tmp_path}@1"))
    dcp.load({"moment": new}, storage_reader=StorageReader(f"{tmp_path}@1"))
    assert (new.a.tolist(), new.b.tolist()) == ([1, 1], [-1, -1])


def test_a_tensor_cannot_reach_past_its_storage() -> None:
    data = encode_value("x", (torch.arange(4),))
    wrong = data.replace(b"K\x04\x85", b"K\x09\x85")
    assert wrong != data
    with pytest.raises(DamagedError, match="x"):
        decode_value(wrong, where="x")


def test_plain_torch_reads_what_we_write(tmp_path: Path) -> None:
    for name, value in PLAIN.items():
        if name == "big-endian":
            continue  # torch.load swaps it, also in what torch.save wrote
        path = tmp_path / "value.pt"
        path.write_bytes(encode_value(name, value))
        assert _is_equal(torch.load(path, weights_only=False), value), name


def test_pairs_of_four_bits_are_cast_to_nothing_else(tmp_path: Path) -> None:
    pairs = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(2, 3)
    halves = torch.complex(torch.tensor([0.1, 2.5]).half(), torch.ones(2).half())
    save(str(tmp_path), {"pairs": {"w": pairs}, "halves": {"w": halves}}, step=1)
    blank, wide = torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.complex64)
    anything = LoadPolicy(cast="allow", lossy_cast="allow")
    with pytest.raises(LoadContractError, match=r"pairs.w: float4_e2m1fn_x2 -> uint8 is not a cast"):
        load(str(tmp_path), {"pairs": {"w": blank}}, policy=anything)
    load(str(tmp_path), {"pairs": {"w": blank.view(torch.float4_e2m1fn_x2)}, "halves": {"w": wide}}, policy=anything)
    assert blank.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert wide.tolist() == halves.to(torch.complex64).tolist()
    dcp.load(other := {"halves": {"w": torch.zeros_like(halves)}}, checkpoint_id=tmp_path / "step-00000001")
    assert other["halves"]["w"].tolist() == halves.tolist()


class Outer:
    @dataclass
    class Inner:
        rate: float


class ByName:
    """Made with arguments by name."""

    def __new__(cls, *, rate: float) -> ByName:
        made = object.__new__(cls)
        made.rate = rate
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, float]]:
        return (), {"rate": self.rate}

    rate: float


_FIELDS = [("a", "i4"), ("b", "f8")]
_FLAGS = np.array([(False, True)], dtype=[("a", "?"), ("b", "?")])
_ARRAYS: dict[str, Any] = {
    "records": np.rec.array([(1, 2.0), (3, 4.0)], dtype=_FIELDS), "record": np.rec.array([(1, 2.0)], dtype=_FIELDS)[0],
    "masked": np.ma.array([[1, 2], [3, 4]], mask=[[False, True], [True, False]], fill_value=9),
    "masked fields": np.ma.array([(1, 2.0)], mask=_FLAGS, dtype=_FIELDS),
    "titles": np.zeros(2, dtype=[(("Title", "a"), "i4"), ("b", "f8")]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The chararray class is deprecated:DeprecationWarning")  # numpy 2.5
def test_arrays_of_numpys_other_kinds_come_back(tmp_path: Path) -> None:
    arrays = {**_ARRAYS, "texts": np.char.array(["a", "bc"])}
    save(str(tmp_path), {"w": torch.ones(1), "arrays": arrays}, step=1)
    for found in (open_checkpoint(str(tmp_path)).read_all()["arrays"], dict.fromkeys(arrays)):
        state = {"arrays": found}
        load(str(tmp_path), state)
        for name, value in arrays.items():
            array: Any = state["arrays"][name]
            assert type(array) is type(value), name
            assert (array.dtype, repr(array)) == (value.dtype, repr(value)), name


def test_objects_of_nested_classes_and_names_come_back(tmp_path: Path) -> None:
    big = 2**60
    save(
        str(tmp_path), {"in": Outer.Inner(0.5), "by": ByName(rate=2), "m": {big: {"w": torch.ones(2)}, -big: 1}}, step=1
    )
    state: Any = {"in": Outer.Inner(0), "by": ByName(rate=0), "m": {big: {"w": torch.zeros(2)}, -big: 0}}
    load(str(tmp_path), state)
    assert (state["in"], state["by"].rate) == (Outer.Inner(0.5), 2)
    assert list(open_checkpoint(str(tmp_path)).read_all("m")) == [big, -big]
    assert state["m"][big]["w"].tolist() == [1, 1]


class Stubborn:
    """Saves a state and loads none."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, _: Any) -> None:
        raise KeyError("a")


def test_what_cannot_be_changed_is_refused_before_anything_is(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.ones(2), "m": {"a": (1, torch.ones(1))}, "s": Stubborn()}, step=1)
    fixed: dict[str, Any] = {"w": torch.zeros(2), "m": types.MappingProxyType({"a": (0, torch.zeros(1))})}
    with pytest.raises(LoadContractError, match=r"m\.a: is in a mappingproxy, which cannot be changed"):
        load(str(tmp_path), fixed)
    assert fixed["w"].tolist() == [0, 0]
    with pytest.raises(
        CheckpointError, match=r"s: the tensors are loaded, but Stubborn\.load_state_dict failed: KeyError"
    ):
        load(str(tmp_path), {"s": Stubborn()})


WRAPPED: dict[str, Any] = {
    "UserList": collections.UserList([1, "two", [3.0]]),
    "UserDict": collections.UserDict({"a": 1, 2: "b"}),
    "UserString": collections.UserString("text"),
    "ChainMap": collections.ChainMap({"a": 1}, {"b": (2,)}),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_of_the_standard_library_need_no_template(name: str, tmp_path: Path) -> None:
    save(str(tmp_path), {"inside": ("tuple", WRAPPED[name])}, step=1)
    found = open_checkpoint(str(tmp_path)).read_all()["inside"][1]
    assert type(found) is type(WRAPPED[name])
    assert found == WRAPPED[name]
    assert vars(found) == vars(WRAPPED[name])


@pytest.mark.parametrize("into", [torch.zeros(4, 3), torch.zeros(1, 3).expand(4, 3)])
def test_an_expanded_tensor_in_a_tuple_comes_back(into: torch.Tensor, tmp_path: Path) -> None:
    expanded = torch.arange(3.0).expand(4, 3)
    save(str(tmp_path), {"pair": (expanded, 3)}, step=1)
    state = {"pair": (into, 0)}
    load(str(tmp_path), state)
    assert torch.equal(state["pair"][0], expanded)
    assert state["pair"][1] == 3
    assert torch.equal(open_checkpoint(str(tmp_path)).read_all()["pair"][0], expanded)


def test_a_tensor_expanded_beyond_reason_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TitanError, match=r"pair: a tuple is not saved.*more elements than its storage"):
        save(str(tmp_path), {"pair": (torch.zeros(1).expand(1 << 29), 0)}, step=1)


def test_a_state_that_contains_itself_is_named(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"deep": [1]}
    inner["deep"].append(inner)
    with pytest.raises(TitanError, match=r"contains itself, at 'model\.deep\.1'"):
        save(str(tmp_path), {"model": inner}, step=1)


def test_a_refusal_gives_the_advice_of_saving_alone(tmp_path: Path) -> None:
    with pytest.raises(TitanError, match=r"a\.e: a ValueError is not saved.*made by code\. Save its") as raised:
        save(str(tmp_path), {"a": {"e": ValueError("x")}}, step=1)
    assert "LoadPolicy" not in str(raised.value)
    with pytest.raises(TitanError, match=r"m\.w: is not initialised and has no shape yet"):
        save(str(tmp_path), {"m": {"w": torch.nn.UninitializedParameter()}}, step=1)
