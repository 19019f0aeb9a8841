"""A corpus is read shard by shard: the same samples on any mesh and after a resume, with no pass over all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.token_rows import rows_of
from tests.support.training_runs import read_losses, train
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import DataError
from titan_ckpt.trainer.config.train_config import DataConfig, SourceConfig
from titan_ckpt.trainer.config.validation import ValidationConfig
from titan_ckpt.trainer.data.batches import Dataset, open_dataset
from titan_ckpt.trainer.data.shard_stream import ASSET, StreamSource, counts_asset, recall_counts
from titan_ckpt.trainer.data.tokenizer import ByteTokenizer

SHARDS, SEQ_LEN = 8, 16


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(SHARDS):
        texts = [{"text": f"shard {number} document {document} " * (number + 1)} for document in range(12)]
        (folder / f"{number}.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return folder


def opened(corpus: Path, cache: str = "cache", **settings: Any) -> Dataset:
    values: dict[str, Any] = {
        "source": str(corpus),
        "seq_len": SEQ_LEN,
        "stream": True,
        "cache": str(corpus.parent / cache),
    } | settings
    return open_dataset(DataConfig(**values), ValidationConfig(), ByteTokenizer(), seed=3, is_writer=True)


def tokenised(corpus: Path, cache: str) -> int:
    return len(list((corpus.parent / cache).glob("shard-*/tokens.json")))


def finish(dataset: Dataset) -> None:
    """Wait for shards that are being tokenised."""
    for source in dataset.sources:
        assert isinstance(source, StreamSource)
        source._pool.shutdown()


def test_every_mesh_and_resume_reads_the_same_stream(corpus: Path) -> None:
    whole = rows_of(opened(corpus), 1, 0, 1600)
    assert whole == rows_of(opened(corpus), 4, 0, 1600)
    first = opened(corpus, "other")
    begun = rows_of(first, 2, 0, 800)
    again = opened(corpus, "another")
    recall_counts(again.sources, counts_asset(first.sources)[ASSET], "x")
    assert whole == begun + rows_of(again, 4, 800, 1600)
    assert first.fingerprint == again.fingerprint


def test_an_epoch_has_every_sample_once_in_another_order(corpus: Path) -> None:
    dataset = opened(corpus)
    source = dataset.sources[0]
    assert isinstance(source, StreamSource)
    source.sample(5000)
    size = sum(source.counts[:SHARDS])
    epochs = [[source.sample(n)["tokens"].tolist() for n in range(e * size, (e + 1) * size)] for e in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    plain = opened(corpus, shuffle=False).sources[0]
    assert sorted(plain.sample(n)["tokens"].tolist() for n in range(size)) == sorted(epochs[0])


def test_only_shards_that_are_needed_are_tokenised(corpus: Path) -> None:
    first = opened(corpus)
    assert tokenised(corpus, "cache") == 0
    rows_of(first, 1, 0, 4)
    finish(first)
    assert tokenised(corpus, "cache") == 2  # the first, and the next one in advance
    far = opened(corpus, shuffle=True)
    rows_of(far, 1, 600, 604)
    resumed = opened(corpus, "fresh")
    recall_counts(resumed.sources, counts_asset(far.sources)[ASSET], "x")
    rows_of(resumed, 1, 600, 604)
    finish(resumed)
    assert tokenised(corpus, "fresh") == 2


def test_a_shard_that_fails_is_named(corpus: Path) -> None:
    (corpus / "5.jsonl").write_text('{"text": "fine"}\n{broken\n')
    with pytest.raises(DataError, match=r"5\.jsonl: line 2: not JSON"):
        rows_of(opened(corpus), 1, 0, 3000)


def test_a_shard_that_changed_since_it_was_counted_is_named(corpus: Path) -> None:
    dataset = opened(corpus)
    rows_of(dataset, 1, 0, 4)
    (source,) = dataset.sources
    assert isinstance(source, StreamSource)
    again = opened(corpus, "other").sources[0]
    assert isinstance(again, StreamSource)
    again.recall([count + 1 for count in source.counts])
    with pytest.raises(DataError, match=r"\.jsonl: \d+ samples, but \d+ when it was read before"):
        again.sample(0)


def test_a_rank_that_waits_in_vain_says_for_what(corpus: Path) -> None:
    data = DataConfig(source=str(corpus), seq_len=SEQ_LEN, stream=True, cache=str(corpus.parent / "none"))
    waiting = open_dataset(data, ValidationConfig(), ByteTokenizer(), seed=3, is_writer=False, wait_s=0.0)
    with pytest.raises(DataError, match=r"\.jsonl: not tokenised by local rank 0 within 0 s"):
        rows_of(waiting, 1, 0, 4)


def test_shards_too_short_for_a_sample_are_refused(corpus: Path) -> None:
    with pytest.raises(DataError, match=r"all other shards are shorter than data\.seq_len = 100000"):
        rows_of(opened(corpus, seq_len=100_000), 1, 0, 4)


def test_streams_are_mixed_by_their_weights(corpus: Path) -> None:
    mixture = (SourceConfig(url=f"{corpus}/[0-3].jsonl", weight=3.0), SourceConfig(url=f"{corpus}/[4-7].jsonl"))
    dataset = opened(corpus, source="", mixture=mixture)
    places = [dataset.order.at(position).source for position in range(1024)]
    assert places.count(0) == 768
    assert rows_of(dataset, 1, 0, 200) == rows_of(opened(corpus, "b", source="", mixture=mixture), 4, 0, 200)


def test_a_run_resumes_its_stream_exactly_without_its_cache(corpus: Path, tmp_path: Path) -> None:
    fixed = (
        f"data.source={corpus}",
        "data.stream=true",
        "data.seq_len=16",
        "train.global_batch_size=8",
        "train.steps=6",
    )
    assert train(str(tmp_path / "a"), tmp_path / "whole", *fixed) == 0
    assert train(str(tmp_path / "b"), tmp_path / "parts", *fixed, "train.max_seconds=0.0001") == 0
    assert max(read_losses(tmp_path / "parts")) == 1
    assert ASSET in open_checkpoint(str(tmp_path / "parts")).manifest.assets
    assert train(str(tmp_path / "c"), tmp_path / "parts", *fixed) == 0
    assert read_losses(tmp_path / "parts") == read_losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("validation.fraction=0.1", "nothing can be held out"),
        ("data.format=nanogpt", "data.stream reads text as shards"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(
    setting: str, message: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(str(tmp_path / "a"), tmp_path / "x", f"data.source={corpus}", "data.stream=true", setting) == 2
    assert message in capsys.readouterr().err
