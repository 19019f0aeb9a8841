"""Safetensors headers: we read what the reference library writes and name the fault in an invalid header."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.hf_models import raw, write_safetensors
from titan_ckpt.converters.hf.safetensors_header import (
    DTYPE_CODES,
    MAX_HEADER_BYTES,
    encode_header,
    header_length,
    parse_header,
    read_header,
)
from titan_ckpt.errors import DamagedError, PlanError, TitanError
from titan_ckpt.store.open import open_store

TWO = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2], dtype=torch.int64)}


def _file(folder: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def _refused(path: Path, kind: type[TitanError] = DamagedError) -> str:
    with pytest.raises(kind) as caught:
        read_header(open_store(str(path.parent)), path.name)
    return str(caught.value)


def _entry(start: int, stop: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_safetensors_and_our_reader_read_each_others_files(tmp_path: Path, dtype: str) -> None:
    safetensors = importlib.import_module("safetensors.torch")
    values = torch.arange(16, dtype=torch.uint8).view(torch.bool if dtype == "bool" else torch.uint8)
    tensor = values.ne(0) if dtype == "bool" else values.view(getattr(torch, dtype))
    write_safetensors(tmp_path / "ours.safetensors", {"x.y": tensor})
    (tmp_path / "theirs.safetensors").write_bytes(safetensors.save({"x.y": tensor}, {"format": "pt"}))
    read = safetensors.load_file(tmp_path / "ours.safetensors")["x.y"]
    assert (read.dtype, raw(read)) == (tensor.dtype, raw(tensor))
    store = open_store(str(tmp_path))
    ours, theirs = (read_header(store, name) for name in ("ours.safetensors", "theirs.safetensors"))
    assert ours.tensors == theirs.tensors
    assert ours.metadata == theirs.metadata == {"format": "pt"}


def test_data_begins_at_a_multiple_of_8(tmp_path: Path) -> None:
    for width in range(1, 12):
        write_safetensors(tmp_path / "m.safetensors", {"n" * width: torch.zeros(3)})
        assert read_header(open_store(str(tmp_path)), "m.safetensors").tensors[0].offset % 8 == 0


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.tuples(st.sampled_from(list(DTYPE_CODES)), st.lists(st.integers(0, 5), max_size=3)),
        max_size=5,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_header_reads_back_as_it_was_written(content: dict[str, tuple[str, list[int]]]) -> None:
    rows = [(name, dtype, tuple(shape)) for name, (dtype, shape) in content.items() if name != "__metadata__"]
    data = encode_header(rows, {})
    length = int.from_bytes(data[:8], "little")
    empty = parse_header(data[8:], size_bytes=len(data) + _data_bytes(data[8 : 8 + length]), where="test")
    assert sorted((t.name, t.dtype, t.shape) for t in empty.tensors) == sorted(rows)


def _data_bytes(text: bytes) -> int:
    return max([entry["data_offsets"][1] for entry in json.loads(text).values()], default=0)


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_random_bytes_never_raise_anything_but_our_errors(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(TitanError):
        read_header(open_store(str(tmp_path)), path.name)


_ANY = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()), st.just({}))


@given(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__"]), _ANY)
@settings(deadline=None)
def test_field_of_any_kind_never_raises_anything_but_our_errors(field: str, value: object) -> None:
    content: dict[str, Any] = {"a": _entry(0, 8)}
    if field == "__metadata__":
        content[field] = value
    else:
        content["a"][field] = value
    text = json.dumps(content).encode()
    with contextlib.suppress(TitanError):
        parse_header(text, size_bytes=8 + len(text) + 8, where="model.safetensors")


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, TWO)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        _refused(path)


def test_empty_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    assert "0 bytes are too few" in _refused(path)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (b"PK\x03\x04" + b"\0" * 60, "zip archive"),
        (b"GGUF" + b"\0" * 60, "GGUF"),
        (b"<!DOCTYPE html><html>", "web page"),
    ],
)
def test_other_kinds_of_file_are_recognised(tmp_path: Path, start: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(start)
    assert message in _refused(path)


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580, int.from_bytes(b"<ht", "little")])
def test_a_header_length_that_looks_like_another_magic_is_read(tmp_path: Path, length: int) -> None:
    text = json.dumps({"a": _entry(0, 8)}).encode().ljust(length)
    assert [
        tensor.name for tensor in read_header(open_store(str(tmp_path)), _file(tmp_path, text, bytes(8)).name).tensors
    ]


def test_huge_header_is_refused_before_it_is_read() -> None:
    with pytest.raises(DamagedError, match="limit"):
        header_length((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), 1 << 40, "model.safetensors")


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    assert "b overlaps" in _refused(_file(tmp_path, {"a": _entry(0, 8), "b": _entry(4, 12)}, bytes(12)))


def test_gap_between_tensors_is_refused(tmp_path: Path) -> None:
    assert "b leaves a gap" in _refused(_file(tmp_path, {"a": _entry(0, 8), "b": _entry(12, 16)}, bytes(16)))


def test_tensor_past_the_end_is_refused(tmp_path: Path) -> None:
    assert "truncated" in _refused(_file(tmp_path, {"a": _entry(0, 16)}, bytes(8)))


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    assert "follow the last tensor" in _refused(_file(tmp_path, {"a": _entry(0, 8)}, bytes(9)))


def test_shape_that_contradicts_the_offsets_is_refused(tmp_path: Path) -> None:
    assert "a: F32 of shape (3,)" in _refused(_file(tmp_path, {"a": _entry(0, 8, [3])}, bytes(8)))


@pytest.mark.parametrize("shape", [[-1], [1.5], ["2"], [1 << 70], [True]])
def test_shape_that_is_no_shape_is_refused(tmp_path: Path, shape: list[int]) -> None:
    assert "whole numbers" in _refused(_file(tmp_path, {"a": _entry(0, 8, shape)}, bytes(8)))


def test_tensor_listed_twice_is_refused(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    )
    assert "'a' twice" in _refused(_file(tmp_path, header, bytes(8)))


@pytest.mark.parametrize(
    "entry", [[], 1, {}, {"dtype": "F32", "shape": [1]}, {"dtype": "F32", "shape": 1, "data_offsets": [0]}]
)
def test_malformed_entry_is_refused(tmp_path: Path, entry: object) -> None:
    assert re.search(r": a(\.\w+)?: (expected|has no)", _refused(_file(tmp_path, {"a": entry})))


def test_dtype_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    assert "dtype 'F4'" in _refused(_file(tmp_path, {"a": _entry(0, 4, [8], "F4")}, bytes(4)), PlanError)


def test_deeply_nested_header_is_refused(tmp_path: Path) -> None:
    _refused(_file(tmp_path, b'{"a":' + b"[" * 100_000))


def test_complex128_has_no_place_in_safetensors() -> None:
    with pytest.raises(PlanError, match="complex128"):
        encode_header([("a", "complex128", (1,))], {})
