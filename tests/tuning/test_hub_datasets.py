"""A Hugging Face dataset is loaded by its library, or streamed as the data files that the library finds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset as HubDataset
from pyarrow import Table, parquet

from tests.support.token_rows import rows_of
from titan_ckpt.errors import DataError
from titan_ckpt.trainer.config.train_config import DataConfig
from titan_ckpt.trainer.config.validation import ValidationConfig
from titan_ckpt.trainer.data.batches import Dataset, open_dataset
from titan_ckpt.trainer.data.tokenizer import ByteTokenizer

TEXTS = [[{"text": f"shard {shard} document {number} of the corpus"} for number in range(9)] for shard in range(3)]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))


def opened(source: str, cache: Path, **settings: Any) -> Dataset:
    data = DataConfig(source=source, seq_len=16, cache=str(cache), **settings)
    return open_dataset(data, ValidationConfig(), ByteTokenizer(), seed=3, is_writer=True)


def lines(records: list[dict[str, str]]) -> bytes:
    return "\n".join(map(json.dumps, records)).encode()


@pytest.mark.parametrize("kind", ["jsonl", "json.gz", "parquet"])
def test_data_files_are_streamed_as_files_are(tmp_path: Path, kind: str) -> None:
    hub, plain = tmp_path / "hub", tmp_path / "plain"
    for folder in (hub / "data", plain):
        folder.mkdir(parents=True)
    for shard, records in enumerate(TEXTS):
        name = f"train-{shard:05d}-of-00003"
        (plain / f"{name}.jsonl").write_bytes(lines(records))
        if kind == "parquet":
            parquet.write_table(Table.from_pylist(records), hub / "data" / f"{name}.parquet")
        else:
            packed = gzip.compress(lines(records)) if kind.endswith("gz") else lines(records)
            (hub / "data" / f"{name}.{kind}").write_bytes(packed)
    streamed = opened(f"datasets:{hub}", tmp_path / "cache", stream=True)
    assert rows_of(streamed, 2, 0, 300) == rows_of(opened(str(plain), tmp_path / "other", stream=True), 1, 0, 300)


def test_a_folder_of_data_files_is_loaded_whole(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_bytes(lines(TEXTS[0]))
    HubDataset.from_list(TEXTS[0]).save_to_disk(tmp_path / "saved")
    found = [opened(f"datasets:{tmp_path / name}", tmp_path / name / "c") for name in ("hub", "saved")]
    plain = opened(str(tmp_path / "hub" / "train.jsonl"), tmp_path / "plain")
    assert rows_of(found[0], 1, 0, 8) == rows_of(found[1], 1, 0, 8) == rows_of(plain, 1, 0, 8)


def test_what_cannot_be_streamed_is_named(tmp_path: Path) -> None:
    for name, ending in (("lines", "jsonl"), ("texts", "txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"train.{ending}").write_bytes(lines(TEXTS[0]))
    HubDataset.from_list(TEXTS[0]).save_to_disk(tmp_path / "saved")
    wrong = {
        "saved": "no shards to stream",
        "texts": "made of 'text'",
        "lines?split=test": "no split 'test' to stream; whole splits are train",
        "lines?split=train[:10%25]": "no split",
        "lines?shards=3": "unknown options shards",
        "missing": "could not open it",
    }
    for source, said in wrong.items():
        with pytest.raises(DataError, match=said.replace("[", r"\[")):
            opened(f"datasets:{tmp_path / source}", tmp_path / "cache", stream=True)
