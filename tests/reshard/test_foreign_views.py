"""Views that torch computes when they are read, conjugated or negated: plain DCP writes the values below, and how they show."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt import LoadPolicy, diff, load, open_checkpoint, reshard, save, verify
from titan_ckpt.errors import DamagedError, PlanError
from titan_ckpt.format.foreign_blob import _views
from titan_ckpt.sharding.placement import Box

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:ComplexHalf support")


def complex_values(dtype: torch.dtype) -> torch.Tensor:
    values = torch.complex(torch.arange(12.0) - 5.5, torch.arange(12.0) + 1).reshape(3, 4)
    values.imag[0, 1] = float("nan")
    return values.to(dtype)


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "conjugated complex64": lambda: complex_values(torch.complex64).conj(),
    "conjugated complex128": lambda: complex_values(torch.complex128).conj(),
    "conjugated complex32": lambda: complex_values(torch.complex32).conj(),
    "conjugated and transposed": lambda: complex_values(torch.complex64).mH,
    "negated imaginary part": lambda: torch._neg_view(torch.randn(3, 4)),
    "negated complex": lambda: torch._neg_view(complex_values(torch.complex64)[1:]),
    "negated and conjugated": lambda: torch._neg_view(complex_values(torch.complex64)[1:].conj()),
    "negated bfloat16": lambda: torch._neg_view(torch.randn(3, 4).to(torch.bfloat16)),
    "negated int16": lambda: torch._neg_view(torch.arange(-3, 9, dtype=torch.int16).reshape(3, 4)),
    "no elements": lambda: torch.zeros(0, 4, dtype=torch.complex64).conj(),
    "a scalar": lambda: torch.tensor(1 + 2j).conj(),
}


def written(folder: Path, value: torch.Tensor) -> str:
    dcp.save({"w": value}, checkpoint_id=folder / "step-3")
    return str(folder / "step-3")


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", VIEWS)
def test_every_reader_gives_what_plain_dcp_gives(tmp_path: Path, name: str) -> None:
    value = VIEWS[name]()
    url = written(tmp_path, value)
    expected, found, judged = ({"w": torch.zeros(value.shape, dtype=value.dtype)} for _ in range(3))
    dcp.load(expected, checkpoint_id=url)
    assert raw(expected["w"]) == raw(value)
    load(url, found)
    load(url, judged, policy=LoadPolicy(verify="all", lossy_cast="error", broadcast=True))
    opened = open_checkpoint(url)
    for each in (found["w"], judged["w"], opened.read("w"), opened.read_all()["w"]):
        assert raw(each) == raw(value)
    assert not verify(url, read_data=True)


def test_a_part_is_read_and_copied_into_another_view(tmp_path: Path) -> None:
    value = complex_values(torch.complex64).conj()
    url = written(tmp_path, value)
    assert raw(open_checkpoint(url).read("w", Box((1, 1), (2, 3)))) == raw(value[1:, 1:])
    target = torch.zeros(3, 4, dtype=torch.complex64).conj()
    load(url, {"w": target})
    assert raw(target) == raw(value)


def test_values_are_compared_and_cast_as_they_show(tmp_path: Path) -> None:
    value = torch._neg_view(torch.arange(12.0).reshape(3, 4))
    url = written(tmp_path, value)
    save(tmp_path / "ours", {"w": value.resolve_neg()}, step=3)
    assert not diff(url, tmp_path / "ours")
    found = {"w": torch.zeros(3, 4, dtype=torch.float64)}
    load(url, found, policy=LoadPolicy(cast="allow"))
    assert torch.equal(found["w"], value.double())


def test_reshard_refuses_without_a_word_of_damage(tmp_path: Path) -> None:
    url = written(tmp_path, complex_values(torch.complex64).conj())
    with pytest.raises(PlanError, match=r"w: stored as a view.*resolve_conj"):
        reshard(url, tmp_path / "out", "dp_shard=2")


@pytest.mark.parametrize("marks", [{"conj": True}, {"other": True}, {"neg": 3}, 7])
def test_marks_that_torch_does_not_write_are_damage(marks: object) -> None:
    arguments: Any = (("storage", "torch.FloatStorage", "0", "cpu", 2), 0, (2,), (1,), False, {}, marks)
    with pytest.raises(DamagedError, match="no such view"):
        _views(arguments, "float32", "here")


def test_a_negated_view_of_unsigned_numbers_is_damage() -> None:
    arguments: Any = (
        ("storage", "torch.storage.UntypedStorage", "0", "cpu", 4),
        0,
        (2,),
        (1,),
        False,
        {},
        "torch.uint16",
    )
    assert _views(arguments, "uint16", "here") == (False, False)
    with pytest.raises(DamagedError, match="no such view"):
        _views((*arguments, {"neg": True}), "uint16", "here")


def test_a_damaged_value_without_a_digest_is_not_copied(tmp_path: Path) -> None:
    """The directory of its archive says another length than its bytes have: no loader takes it, and a copy would get a digest."""
    source = tmp_path / "dcp"
    dcp.save({"w": torch.arange(8.0), "cfg": {"a": 1}}, checkpoint_id=source, no_dist=True)
    (path,) = source.glob("*.distcp")
    data = bytearray(path.read_bytes())
    (entry,) = open_checkpoint(str(source)).manifest.objects
    for place in range(entry.offset, entry.offset + entry.length):
        if data[place : place + 4] == b"PK\1\2":
            data[place + 24] ^= 0x55
    path.write_bytes(data)
    assert any(problem.fqn == "cfg.a" for problem in verify(str(source), read_data=True))
    with pytest.raises(DamagedError, match=r"value 'cfg\.a'"):
        reshard(str(source), str(tmp_path / "copy"), "dp_shard=2")
