"""Values that come back in every detail: times in a repeated hour, sets, numpy's arrays of objects and texts, strange strides."""

from __future__ import annotations

import array
import dataclasses
import datetime
import enum
import io
import ipaddress
import re
import time
import urllib.parse
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import ConfigError, DamagedError, UnsafeContentError, UsageError
from titan_ckpt.loading.load import load
from titan_ckpt.parsing.value_archive import write_archive
from titan_ckpt.parsing.values import decode_value
from titan_ckpt.saving.saver import save
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.state.values import encode_value

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
FOLDED = datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN)
_OBJECTS = np.dtype([("a", "i4"), ("b", object), ("c", [("d", object, (2,))])])
_STRINGS = np.dtypes.StringDType
ARRAYS: dict[str, Any] = {
    "fields": np.array([(1, "x", (["y", None],))], dtype=_OBJECTS),
    "texts": np.array([["a", "bcd"]], dtype=_STRINGS()),
    "texts or none": np.array(["a", None], dtype=_STRINGS(na_object=None)),
    "texts or nan": np.array(["a", np.nan], dtype=_STRINGS(na_object=np.nan)),
    "texts alone": np.array([""], dtype=_STRINGS(coerce=False)),
    "columns": np.asfortranarray(np.array([[1, "a"], [None, 2.5]], dtype=object)),
    "item": np.array([(1, "x", (["y", None],))], dtype=_OBJECTS)[0],
}


@pytest.mark.parametrize("moment", [FOLDED, FOLDED.replace(tzinfo=None), datetime.time(1, fold=1, tzinfo=BERLIN)])
def test_a_time_in_a_repeated_hour_comes_back(moment: Any, tmp_path: Path) -> None:
    save(str(tmp_path), {"at": moment, "all": [(moment, 1)]}, step=1)
    found = open_checkpoint(str(tmp_path)).read_all()
    for each in (found["at"], found["all"][0][0]):
        assert (each, each.fold, each.tzinfo) == (moment, 1, moment.tzinfo)
    assert torch.load(_blob(moment, tmp_path), weights_only=False).fold == 1


def _blob(value: Any, folder: Path) -> Path:
    path = folder / "blob"
    path.write_bytes(encode_value("x", value))
    return path


@pytest.mark.parametrize("kind", [set, frozenset])
def test_equal_sets_have_equal_bytes_on_all_ranks(kind: Any) -> None:
    one, other = kind([0, 8, "a", frozenset([1, 9])]), kind([frozenset([9, 1]), "a", 8, 0])
    assert list(map(str, one)) != list(map(str, other)), "the case is none"
    assert encode_value("x", {"a": (one,)}) == encode_value("x", {"a": (other,)})


def test_arrays_of_objects_and_texts_come_back(tmp_path: Path) -> None:
    save(str(tmp_path), {"arrays": ARRAYS}, step=1)
    state = {"arrays": dict.fromkeys(ARRAYS)}
    load(str(tmp_path), state)
    for found in (state["arrays"], open_checkpoint(str(tmp_path)).read_all()["arrays"]):
        for name, value in ARRAYS.items():
            array: Any = found[name]
            assert (type(array), array.dtype, repr(array)) == (type(value), value.dtype, repr(value)), name


_UNION = (b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00V8\x89\x88\x87R(K\x03X\x01\x00\x00\x00|cnumpy\ndtype\nX\x02\x00\x00\x00i8"
          b"\x89\x88\x87R}X\x01\x00\x00\x00acnumpy\ndtype\nX\x01\x00\x00\x00O\x89\x88\x87RK\x00\x86s\x86NNJ\xff\xff\xff\xffJ\xff\xff"
          b"\xff\xffK\x00tb.")  # fmt: skip


def test_objects_are_never_made_of_bytes() -> None:
    with pytest.raises(DamagedError, match="no shape"):
        decode_value(write_archive(_UNION), where="x")
    forged = encode_value("x", np.arange(2)).replace(b"i8", b"O8")
    with pytest.raises(DamagedError):
        decode_value(forged, where="x")


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_single_element_of_any_stride_is_saved(tmp_path: Path, *, is_staged: bool) -> None:
    state = {"real": torch.tensor([1 + 2j]).real, "row": torch.arange(6.0)[4:5:2].as_strided((1, 1), (7, 5))}
    save(str(tmp_path), {name: value.clone() if is_staged else value for name, value in state.items()}, step=1)
    into = {"real": torch.zeros(1, dtype=torch.complex64).real, "row": torch.zeros(1, 1)}
    load(str(tmp_path), into)
    assert [value.tolist() for value in into.values()] == [[1.0], [[4.0]]]


def test_a_mesh_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match="mesh_dim_names"):
        MeshSpec.of(object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        MeshSpec.of({"dp": 2})


class Outer:
    """Has classes inside, which protocol 2 of pickle names by `getattr`."""

    @dataclasses.dataclass
    class Inner:
        """An object of it."""

        number: int

    class Colour(enum.Enum):
        """A member of it."""

        RED = 1


def test_dcps_objects_of_nested_classes_are_no_damage(tmp_path: Path) -> None:
    dcp.save({"x": [Outer.Inner(3), Outer.Colour.RED], "w": torch.ones(1)}, checkpoint_id=tmp_path / "d", no_dist=True)
    state = {"x": [Outer.Inner(0), Outer.Colour.RED], "w": torch.zeros(1)}
    load(str(tmp_path / "d"), state)
    found = open_checkpoint(str(tmp_path / "d")).read_all(allow=[Outer.Inner, Outer.Colour])
    assert state["x"] == found["x"] == [Outer.Inner(3), Outer.Colour.RED]
    with pytest.raises(UnsafeContentError, match=r"Outer\.Inner"):
        open_checkpoint(str(tmp_path / "d")).read_all()


STANDARD: dict[str, Any] = {
    "address": ipaddress.ip_address("1.2.3.4"), "network": ipaddress.ip_network("fe80::/10"), "flags": re.I | re.M,
    "interface": ipaddress.ip_interface("10.0.0.1/8"), "numbers": array.array("d", [1.5, -0.0]), "moment": time.gmtime(0),
    "url": urllib.parse.urlparse("s3://bucket/run?a=b#c"), "split": urllib.parse.urlsplit(b"http://a/b"),
}  # fmt: skip


def test_more_of_the_standard_library_needs_no_template(tmp_path: Path) -> None:
    save(str(tmp_path), {"values": STANDARD}, step=1)
    found = open_checkpoint(str(tmp_path)).read_all("values")
    assert {name: repr(value) for name, value in found.items()} == {
        name: repr(value) for name, value in STANDARD.items()
    }


def test_a_buffer_of_bytes_comes_back_at_its_position(tmp_path: Path) -> None:
    buffer = io.BytesIO(b"abc")
    buffer.seek(2)
    save(str(tmp_path), {"m._extra_state": buffer}, step=1)
    found = open_checkpoint(str(tmp_path)).read_all()["m._extra_state"]
    assert (found.getvalue(), found.tell()) == (b"abc", 2)


def test_a_prefix_is_text(tmp_path: Path) -> None:
    save(str(tmp_path), {"3": {"w": torch.ones(1)}}, step=1)
    with pytest.raises(UsageError, match="prefix is 3"):
        load(str(tmp_path), {"w": torch.zeros(1)}, prefix=3)  # type: ignore[arg-type]
