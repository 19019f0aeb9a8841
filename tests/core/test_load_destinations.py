"""What a load refuses before a tensor changes: lossy casts, tensors that cannot be filled, values that cannot be read."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import CheckpointError, LoadContractError, TitanError, UsageError
from titan_ckpt.format.names import step_folder
from titan_ckpt.loading.casts import PAIRS, count_changed, holds_every_value
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.saving.saver import save
from titan_ckpt.state.state_dict import TORCH_DTYPE
from titan_ckpt.store.local import FileStore
from tools.rank_pool import RankPool

BY_VALUE = LoadPolicy(cast="allow", lossy_cast="error", extra="allow")
EDGES = [0, 1, 2, 3, 127, 128, 255, 256, 257, 2047, 2048, 2049, 65504, 65505, 65519, 65520, 70001]
EDGES += [2**n + d for n in (15, 16, 24, 31, 32, 53, 63) for d in (-1, 0, 1)]
FLOATS = [0.5, 1.5, 448.0, 449.0, 57344.0, 6e-8, 1e-7, 2.0**-9, 2.0**-126, 2.0**-149, 2.0**-133, 3.4e38, 1e300]
SPECIAL = [float("inf"), float("-inf"), float("nan"), -0.0]


def samples(dtype: torch.dtype) -> torch.Tensor:
    """Values at the edges of every dtype, as far as `dtype` holds them."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_complex:
        part = samples({2: torch.float16, 4: torch.float32, 8: torch.float64}[dtype.itemsize // 2])
        return torch.complex(torch.cat([part, part]), torch.cat([torch.zeros_like(part), part.flip(0)]))
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    if dtype.is_floating_point:
        wide = torch.tensor([*map(float, EDGES), *FLOATS, *SPECIAL], dtype=torch.float64)
        return torch.cat([wide, -wide]).to(dtype)
    info = torch.iinfo(dtype)
    values = [value for edge in EDGES for value in (edge, -edge) if info.min <= value <= info.max]
    return torch.tensor(np.array([*values, info.min, info.max], dtype=str(dtype).removeprefix("torch.")))


def exact(value: Any) -> tuple[Any, Any]:
    """(real, imaginary) as what compares exactly: fractions, or the name of what no number is."""
    parts = (value.real, value.imag) if isinstance(value, complex) else (value, 0)
    real, imaginary = (part if np.isfinite(part) else str(part) for part in parts)
    return tuple(Fraction(p) if not isinstance(p, str) else p for p in (real, imaginary))  # type: ignore[return-value]


def listed(tensor: torch.Tensor) -> list[tuple[Any, Any]]:
    is_narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4
    return [exact(value) for value in (tensor.float() if is_narrow else tensor).tolist()]


def expected_changes(values: torch.Tensor, target: torch.dtype) -> int:
    """By exact arithmetic: a float target holds what the cast shows; an integer target holds what lies in its range."""
    before = listed(values)
    if target.is_complex:
        return sum(a != b for a, b in zip(before, listed(values.to(target)), strict=True))
    if target.is_floating_point:
        real = values.real if values.dtype.is_complex else values
        after = listed(real.to(target))
        return sum(a != b for a, b in zip(before, after, strict=True))
    info = torch.iinfo(target) if target != torch.bool else None
    low, high = (0, 1) if info is None else (info.min, info.max)
    is_held = [isinstance(r, Fraction) and i == 0 and r.denominator == 1 and bool(low <= r <= high) for r, i in before]
    return is_held.count(False)


@pytest.mark.parametrize("source", [name for name in TORCH_DTYPE if name != "float4_e2m1fn_x2"])
def test_changed_values_are_counted_exactly_for_all_pairs(source: str) -> None:
    values = samples(TORCH_DTYPE[source])
    for name, target in TORCH_DTYPE.items():
        if target == PAIRS:
            continue
        found = count_changed(values, target)
        assert found == expected_changes(values, target), f"{source} -> {name}"
        if holds_every_value(TORCH_DTYPE[source], target):
            assert found == 0, f"{source} -> {name}"
        elif values.dtype.itemsize == 1:  # every value was tried
            assert found > 0, f"{source} -> {name} loses nothing"


def test_an_integer_too_large_for_fp16_is_refused_unread(tmp_path: Path) -> None:
    save(str(tmp_path), {"a": torch.tensor([1, 70001]), "b": torch.ones(3)}, step=1)
    state: dict[str, Any] = {"a": torch.zeros(2, dtype=torch.float16), "b": torch.zeros(3)}
    with pytest.raises(LoadContractError, match="a: int64 -> float16 changes 1 of 2 values"):
        load(str(tmp_path), state, policy=BY_VALUE)
    assert state["a"].tolist() == [0, 0]
    assert state["b"].tolist() == [0, 0, 0]


def test_a_cast_that_changes_no_value_is_no_loss(tmp_path: Path) -> None:
    save(str(tmp_path), {"a": torch.tensor([1, 2048]), "b": torch.tensor([0.5, float("nan")])}, step=1)
    state: dict[str, Any] = {"a": torch.zeros(2, dtype=torch.float16), "b": torch.zeros(2, dtype=torch.bfloat16)}
    report = load(str(tmp_path), state, policy=BY_VALUE)
    assert state["a"].tolist() == [1, 2048]
    assert report.cast == {"a": "int64 -> float16", "b": "float32 -> bfloat16"}
    with pytest.raises(LoadContractError, match="a: int64 -> float16 may lose precision"):
        load(str(tmp_path), state)


def _bad_tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    base = torch.zeros(8)
    path = tmp_path / "map"
    path.write_bytes(bytes(mmap.PAGESIZE))
    mapped = np.memmap(path, dtype=np.float32, mode="r", shape=(4,))
    from_numpy = torch.frombuffer(np.lib.stride_tricks.as_strided(mapped), dtype=torch.float32)
    return {
        "meta": torch.zeros(4, device="meta"),
        "expanded": torch.zeros(1).expand(4),
        "overlapping": base.as_strided((2, 2), (1, 1)),
        "read-only": from_numpy,
    }


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("what", ["meta", "expanded", "overlapping", "read-only"])
def test_a_tensor_that_cannot_be_filled_is_named(tmp_path: Path, what: str) -> None:
    target = _bad_tensors(tmp_path)[what]
    save(f"{tmp_path}/run", {"w": torch.ones(target.shape), "other": torch.ones(2)}, step=1)
    state: dict[str, Any] = {"w": target, "other": torch.zeros(2)}
    with pytest.raises(LoadContractError, match=r"\n  w: .*(memory|meta)"):
        load(f"{tmp_path}/run", state)
    assert state["other"].tolist() == [0, 0]


def test_memory_shared_with_another_value_is_refused(tmp_path: Path) -> None:
    save(str(tmp_path), {"a": torch.ones(4), "b": torch.full((4,), 2.0), "c": torch.ones(4)}, step=1)
    shared, policy = torch.zeros(8), LoadPolicy(extra="allow")
    with pytest.raises(LoadContractError, match="b: is the same memory as a"):
        load(str(tmp_path), {"a": shared[:4], "b": shared[:4]}, policy=policy)
    with pytest.raises(LoadContractError, match="b: shares memory with a"):
        load(str(tmp_path), {"a": shared[:4], "b": shared[2:6]}, policy=policy)
    assert shared.tolist() == [0] * 8
    load(str(tmp_path), {"a": shared[:4], "c": shared[:4]}, policy=policy)
    assert shared.tolist() == [1] * 4 + [0] * 4
    load(str(tmp_path), {"a": shared.view(4, 2)[:, 0], "b": shared.view(4, 2)[:, 1]}, policy=policy)
    assert shared.tolist() == [1, 2] * 4


def test_leaves_inference_and_conjugated_tensors_are_filled(tmp_path: Path) -> None:
    with torch.inference_mode():
        inference = torch.zeros(2, dtype=torch.float64)
    state: dict[str, Any] = {
        "leaf": torch.zeros(2, requires_grad=True),
        "leaf64": torch.zeros(2, dtype=torch.float64, requires_grad=True),
        "inference": inference,
        "conj": torch.zeros(2, dtype=torch.complex64).conj(),
        "neg": torch.zeros(2, dtype=torch.complex64).conj().imag,
        "column": torch.zeros(2, 2).t(),
    }
    stored = {name: torch.ones(tensor.shape) for name, tensor in state.items()}
    stored["conj"] = torch.tensor([1 + 2j, 3 - 4j])
    save(str(tmp_path), stored, step=1)
    load(str(tmp_path), state, policy=LoadPolicy(cast="allow"))
    for name, tensor in state.items():
        assert tensor.detach().tolist() == stored[name].tolist(), name


def test_a_value_that_cannot_be_read_leaves_the_tensors_alone(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.ones(4), "note": "text"}, step=1)
    checkpoint = open_checkpoint(str(tmp_path))
    (entry,) = checkpoint.manifest.objects
    path = tmp_path / step_folder(1) / entry.file
    data = bytearray(path.read_bytes())
    data[entry.offset + entry.length // 2] ^= 1
    path.write_bytes(data)
    state: dict[str, Any] = {"w": torch.zeros(4), "note": ""}
    with pytest.raises(CheckpointError):
        load(str(tmp_path), state)
    assert state["w"].tolist() == [0] * 4


def test_keys_that_are_not_text_come_back_under_themselves(tmp_path: Path) -> None:
    optimizer = {"state": {0: {"step": 3, "m": torch.ones(2)}, 1: {"step": 4, "m": torch.zeros(2)}}}
    groups = [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}]
    given: dict[str, Any] = {"optimizer": {**optimizer, "groups": groups}, "pair": ({"x": 1}, {"x": 2})}
    save(str(tmp_path), given, step=1)
    found: dict[str, Any] = {
        "optimizer": {
            "state": {n: {"step": 0, "m": torch.full((2,), 9.0)} for n in (0, 1)},
            "groups": [{"lr": 0.0, "params": []}, {"lr": 0.0, "params": []}],
        },
        "pair": ({"x": 0}, {"x": 0}),
    }
    load(str(tmp_path), found)
    assert found["optimizer"]["groups"] == groups
    assert found["pair"] == given["pair"]
    assert list(found["optimizer"]["state"]) == [0, 1]
    assert found["optimizer"]["state"][0]["step"] == 3
    assert found["optimizer"]["state"][0]["m"].tolist() == [1, 1]


class Handle:
    """A key whose text is an address."""


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a": {0: torch.ones(1), "0": torch.ones(1)}}, "two entries named 'a.0'"),
        ({"a": {0: 1, "0": 2}}, "two entries named 'a.0'"),
        ({"a.b": 1, "a": {"b": 2}}, "two entries named 'a.b'"),
        ({"a": {None: 1, "None": 2}}, "two entries named 'a.None'"),
        ({"a": {Handle(): 1}}, "a: a key of type Handle"),
        ({"a": {(1, Handle()): 1}}, "a: a key of type tuple"),
        ({"a": {torch.ones(1): 1}}, "a: a key of type Tensor"),
    ],
)
def test_keys_that_would_be_confused_are_refused_by_name(tmp_path: Path, state: dict[str, Any], text: str) -> None:
    with pytest.raises((UsageError, Exception), match=text):
        save(str(tmp_path), state, step=1)
    with pytest.raises(UsageError, match=text):
        load(str(tmp_path), state)


def _does_not_fit_on_rank_1(rank: int, url: str) -> tuple[str, bool]:
    mesh = init_device_mesh("cpu", (2,))
    save(url, {"a": DTensor.from_local(torch.ones(2), mesh, [Shard(0)]), "b": torch.ones(3)}, step=1)
    state: dict[str, Any] = {"a": DTensor.from_local(torch.full((2,), 9.0), mesh, [Shard(0)])}
    state["b"] = torch.full((3 + rank,), 9.0)
    try:
        load(url, state)
    except TitanError as error:
        return str(error), bool((state["a"].to_local() == 9).all() and (state["b"] == 9).all())
    return "", False


@pytest.mark.dist
def test_what_does_not_fit_on_one_rank_changes_nothing_anywhere(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        (other, is_same), (own, is_same_there) = pool.run(_does_not_fit_on_rank_1, str(tmp_path / "run"))
    assert "nothing was loaded, since rank 1 failed: LoadContractError" in other
    assert "global shape (3,), model wants (4,)" in own
    assert is_same
    assert is_same_there


def test_neighbours_are_one_request_of_a_store_that_scatters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (3, 70_000, 400_000, 5, 300_000, 1_000)
    state = {f"t{n}": torch.randn(size) for n, size in enumerate(sizes)}
    save(str(tmp_path), {"m": state}, step=1)
    monkeypatch.setattr(FileStore, "is_scattering", True)
    requests: list[int] = []
    read = FileStore.read_scattered

    def counted(self: FileStore, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        requests.append(len(buffers))
        read(self, path, start, buffers)

    monkeypatch.setattr(FileStore, "read_scattered", counted)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    found["t4"] = torch.zeros(600_000)[::2]
    load(str(tmp_path), {"m": found})
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert requests == [2 * len(sizes) - 1]  # tensors, and what lies between them
