"""Token files of other trainers, Parquet and tar shards are read where they lie, alike on every mesh."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.support.token_rows import rows_of
from titan_ckpt.errors import DataError
from titan_ckpt.trainer.config.train_config import DataConfig, SourceConfig
from titan_ckpt.trainer.config.validation import ValidationConfig
from titan_ckpt.trainer.data.batches import Dataset, open_dataset
from titan_ckpt.trainer.data.binary_tokens import open_megatron, open_nanogpt
from titan_ckpt.trainer.data.corpus import DocumentReader, list_files
from titan_ckpt.trainer.data.records import read_documents, read_records
from titan_ckpt.trainer.data.token_source import TokenSource
from titan_ckpt.trainer.data.tokenizer import ByteTokenizer

IDS = np.random.default_rng(0).integers(0, 257, 1000)
BYTES = ByteTokenizer()


def write_megatron(folder: Path, ids: Any, lengths: list[int], *, code: int, dtype: str) -> str:
    """A data set as Megatron's IndexedDatasetBuilder lays it out; each sequence is a document."""
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * np.dtype(dtype).itemsize
    bounds = np.arange(len(lengths) + 1)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    parts = [np.asarray(lengths, "<i4"), pointers.astype("<i8"), bounds.astype("<i8")]
    (folder / "set_text_document.idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    (folder / "set_text_document.bin").write_bytes(np.asarray(ids).astype(dtype).tobytes())
    return str(folder / "set_text_document")


def write_llmc(path: Path, ids: Any) -> None:
    """A shard as llm.c's data_common.py writes it, for GPT-2's tokenizer."""
    head = np.zeros(256, dtype="<i4")
    head[:3] = 20240520, 1, len(ids)
    path.write_bytes(head.tobytes() + np.asarray(ids).astype("<u2").tobytes())


def test_nanogpt_files_are_read_with_and_without_header(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(IDS.astype("<u2").tobytes())
    for number, part in enumerate(np.array_split(IDS, [100, 101, 700])):
        write_llmc(tmp_path / f"shard_{number}.bin", part)
    plain = open_nanogpt(str(tmp_path / "train.bin"), BYTES)
    shards = open_nanogpt(str(tmp_path / "shard_*.bin"), BYTES)
    for start, count in ((0, 1000), (95, 20), (100, 1), (690, 310), (999, 5), (1000, 5)):
        assert plain.read(start, count).tolist() == IDS[start : start + count].tolist()
        assert shards.read(start, count).tolist() == IDS[start : start + count].tolist()


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_megatron_data_sets_are_read(code: int, dtype: str, tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path, IDS, [300, 1, 699], code=code, dtype=dtype)
    for url in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        assert open_megatron(url, BYTES).read(250, 200).tolist() == IDS[250:450].tolist()


def test_a_file_on_an_object_store_is_read_by_range() -> None:
    import fsspec

    fsspec.filesystem("memory").pipe("/bucket/train.bin", IDS.astype("<u2").tobytes())
    assert open_nanogpt("memory://bucket/train.bin", BYTES).read(3, 9).tolist() == IDS[3:12].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index, data: (index[:30], data), "not an index of Megatron"),
        (lambda index, data: (b"X" + index[1:], data), "magic b'XMIDIDX"),
        (lambda index, data: (index[:17] + b"\x07" + index[18:], data), "type 7: expected"),
        (lambda index, data: (index[:-40], data), "is it cut off"),
        (lambda index, data: (index, data[:-2]), "but its index promises 2000"),
        (lambda index, data: (index[:17] + b"\x04" + index[18:], data), "but its index promises 4000"),
    ],
)
def test_damaged_megatron_files_are_named(change: Any, message: str, tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path, IDS, [300, 700], code=8, dtype="<u2")
    files = [Path(prefix + suffix) for suffix in (".idx", ".bin")]
    for file, content in zip(files, change(*(file.read_bytes() for file in files)), strict=True):
        file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_megatron(prefix, BYTES)


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    Path(write_megatron(tmp_path, IDS, [1000], code=8, dtype="<u2") + ".idx").unlink()
    with pytest.raises(DataError, match=r"expected .*set_text_document\.bin and \.idx"):
        open_megatron(f"{tmp_path}/set_text_document", BYTES)


def test_ids_of_another_tokenizer_or_size_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(np.array([1, 2, 300, 4], dtype="<u2").tobytes())
    with pytest.raises(DataError, match=r"train\.bin: token 2 is 300, read as <u2; .* ids up to 256"):
        open_nanogpt(str(tmp_path / "train.bin"), BYTES)
    (tmp_path / "odd.bin").write_bytes(b"\x01\x00\x02")
    with pytest.raises(DataError, match="3 bytes of ids of 2 bytes each"):
        open_nanogpt(str(tmp_path / "odd.bin"), BYTES)
    write_llmc(tmp_path / "cut.bin", IDS)
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-100])
    with pytest.raises(DataError, match="as its header promises"):
        open_nanogpt(str(tmp_path / "cut.bin"), BYTES)


def test_every_mesh_and_resume_reads_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(IDS.astype("<u2").tobytes())
    prefix = write_megatron(tmp_path, IDS, [500, 500], code=8, dtype="<u2")
    mixture = (
        SourceConfig(url=str(tmp_path / "train.bin"), format="nanogpt", weight=2.0),
        SourceConfig(url=prefix, format="megatron"),
    )
    data = DataConfig(mixture=mixture, seq_len=16)

    def opened() -> Dataset:
        return open_dataset(data, ValidationConfig(), BYTES, seed=1, is_writer=True)

    first, again = opened(), opened()
    assert first.fingerprint == again.fingerprint
    assert rows_of(first, 1, 0, 200) == rows_of(again, 4, 0, 100) + rows_of(first, 2, 100, 200)
    (tmp_path / "train.bin").write_bytes(np.roll(IDS, 1).astype("<u2").tobytes())
    assert opened().fingerprint != first.fingerprint
    assert isinstance(first.sources[0], TokenSource)


def _documents(path: Path, **settings: Any) -> list[str]:
    reader = DocumentReader(**settings)
    return [text.decode() for file in list_files(str(path)) for text in read_documents(file, reader)]


def _write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as shard:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("name", ["000.tar", "000.tar.gz", "000.tgz"])
def test_tar_shards_give_their_texts_in_order(name: str, tmp_path: Path) -> None:
    record = json.dumps({"text": "two ü"}).encode()
    members = {"a/1.txt": b"one", "a/1.jpg": b"\xff", "a/2.json": record, "a/.hidden.txt": b"x", "a/3.cls": b"7"}
    _write_tar(tmp_path / name, members)
    assert _documents(tmp_path) == ["one", "two ü"]


def test_a_shard_that_fails_is_named(tmp_path: Path) -> None:
    _write_tar(tmp_path / "000.tar", {"1.txt": b"x" * 2000, "2.txt": b"y" * 2000})
    whole = (tmp_path / "000.tar").read_bytes()
    ends = range(0, len(whole.rstrip(b"\0")) // 512 * 512, 500)  # within headers, within texts, and at their borders
    for end in (*ends, 512, 2560, 5120):
        (tmp_path / "000.tar").write_bytes(whole[:end])
        with pytest.raises(DataError, match=r"000\.tar: cannot be read as a tar shard, after \d members"):
            _documents(tmp_path)
    (tmp_path / "000.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(DataError, match="cannot be read as a tar shard, after 0 members"):
        _documents(tmp_path)


def test_a_bad_member_is_named_or_skipped(tmp_path: Path) -> None:
    _write_tar(tmp_path / "000.tar", {"1.json": b"{", "2.json": b'{"other": 1}', "3.txt": b"good"})
    with pytest.raises(DataError, match=r"000\.tar: member 1: not JSON"):
        _documents(tmp_path)
    assert _documents(tmp_path, bad_line="skip") == ["good"]


def test_parquet_rows_are_read_or_named(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one", "two", None, "🙂"], "id": [1, 2, 3, 4]})
    parquet.write_table(table, tmp_path / "part.parquet", row_group_size=2)
    with pytest.raises(DataError, match=r"part\.parquet: row 2: no string 'text'"):
        _documents(tmp_path)
    assert _documents(tmp_path, bad_line="skip") == ["one", "two", "🙂"]
    with pytest.raises(DataError, match="row 0: no string 'body'"):
        _documents(tmp_path, text_field="body")
    data = (tmp_path / "part.parquet").read_bytes()
    (tmp_path / "part.parquet").write_bytes(data[:-20])
    with pytest.raises(DataError, match=r"part\.parquet: cannot be read as Parquet, at row 0"):
        _documents(tmp_path)


def test_nulls_that_arrow_adds_are_left_out(tmp_path: Path) -> None:
    rows = [{"calls": [{"x": 1}], "content": None}, {"calls": [{"y": 2}], "content": "a"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "part.parquet")
    found = [row for file in list_files(str(tmp_path)) for _, row in read_records(file, DocumentReader())]
    assert found == rows


def test_parquet_without_its_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from titan_ckpt.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "part.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match="pyarrow"):
        _documents(tmp_path)
