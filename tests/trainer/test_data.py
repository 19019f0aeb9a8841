"""Data: documents from files, and a sample order that depends only on seed and position."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_ckpt.errors import AlreadyExistsError, ConfigError, DataError
from titan_ckpt.trainer.config.train_config import DataConfig, SourceConfig
from titan_ckpt.trainer.config.validation import ValidationConfig
from titan_ckpt.trainer.data.batches import BatchLoader, BatchShape, Dataset, open_dataset, unigram_entropy
from titan_ckpt.trainer.data.corpus import DocumentReader, list_files
from titan_ckpt.trainer.data.records import read_documents
from titan_ckpt.trainer.data.sample_order import BLOCK, SampleOrder, SourceSize, permuted, shares
from titan_ckpt.trainer.data.token_files import check_free, open_tokens, pretokenise
from titan_ckpt.trainer.data.token_source import TokenSource
from titan_ckpt.trainer.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, check_vocabulary, open_tokenizer
from titan_ckpt.trainer.seams.loss import IGNORED


def _documents(url: str, reader: DocumentReader | None = None) -> list[bytes]:
    rules = reader or DocumentReader()
    return [document for file in list_files(url) for document in read_documents(file, rules)]


def _jsonl(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def _dataset(folder: Path, texts: list[str], *, seq_len: int = 4, seed: int = 0, held_out: float = 0.0) -> Dataset:
    """One source per text."""
    tokens = []
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
        pretokenise(
            list_files(str(folder / f"{number}.txt")),
            ByteTokenizer(),
            DocumentReader(),
            str(folder / f"tokens{number}"),
        )
        tokens.append(TokenSource(file=open_tokens(str(folder / f"tokens{number}")), seq_len=seq_len))
    weights = [float(number + 1) for number in range(len(texts))]
    return Dataset(tokens, weights, seq_len=seq_len, seed=seed, shuffle=True, held_out=held_out)


# ------------------------------------------------------------------------------------------------------- files


def test_text_and_jsonl_plain_gz_and_zst_give_the_same_documents(tmp_path: Path) -> None:
    content = _jsonl("one", "zwei")
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(content) + zstandard.compress(_jsonl("three")))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"text"))
    assert _documents(f"{tmp_path}/*") == [b"one", b"zwei", b"one", b"zwei", b"one", b"zwei", b"three", b"text"]


def test_a_file_a_folder_a_glob_and_a_memory_url_are_listed(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "deep/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [f.path for f in list_files(str(tmp_path))] == ["a.txt", "b.md", "deep/c.txt"]
    assert [f.path for f in list_files(f"{tmp_path}/*.txt")] == ["a.txt"]
    assert [f.path for f in list_files(f"{tmp_path}/**/*.txt")] == ["a.txt", "deep/c.txt"]
    assert _documents(f"{tmp_path}/deep/c.txt") == [b"deep/c.txt"]


def test_bad_jsonl_line_is_located_or_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(_jsonl("fine") + b"{broken\n" + b'{"body": 1}\n' + _jsonl("also fine"))
    with pytest.raises(DataError, match=r"a.jsonl: line 2: not JSON .*data.bad_line"):
        _documents(f"{tmp_path}/a.jsonl")
    skipping = DocumentReader(bad_line="skip")
    assert _documents(f"{tmp_path}/a.jsonl", skipping) == [b"fine", b"also fine"]
    assert list(skipping.skipped_lines.values()) == [2]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"\x7fELF\0\0", "binary data"),
        ("a.jsonl", b'{"body": "x"}\n', "no string 'text'"),
        ("a.jsonl", b"[1]\n", "found list"),
        ("a.txt.gz", b"no gzip", "cannot be unpacked"),
        ("a.jsonl.zst", b"no zstd", "cannot be unpacked"),
    ],
)
def test_unusable_content_is_refused_by_file(name: str, content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=expected) as caught:
        _documents(f"{tmp_path}/{name}")
    assert name in str(caught.value)


def test_empty_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(DataError, match="hold no text"):
        pretokenise(list_files(str(tmp_path)), ByteTokenizer(), DocumentReader(), str(tmp_path / "tokens"))
    with pytest.raises(DataError, match="nothing at"):
        list_files(f"{tmp_path}/*.jsonl")


def test_too_little_text_for_one_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing is left to train on.*data.seq_len"):
        _dataset(tmp_path, ["abc"], seq_len=16)


# -------------------------------------------------------------------------------------------------- tokenizers


def test_the_byte_tokenizer_saved_as_json_gives_the_same_ids() -> None:
    text = bytes(range(1, 128)) + "äß€😀".encode()
    ours, theirs = ByteTokenizer(), HuggingFaceTokenizer(ByteTokenizer().to_json(), where="bytes")
    np.testing.assert_array_equal(ours.encode([text])[0], theirs.encode([text])[0])
    assert (theirs.vocab_size, theirs.separator) == (ours.vocab_size, ours.separator)
    assert theirs.decode(list(text)) == ours.decode(list(text)) == text.decode()


def test_a_tokenizer_with_more_ids_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ids up to 256, but model\.vocab_size = 256"):
        check_vocabulary(ByteTokenizer(), 256)


def test_unusable_tokenizer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a tokenizer.json"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    assert open_tokenizer(str(tmp_path)).separator == 256
    with pytest.raises(ConfigError, match="has no token <nope>"):
        open_tokenizer(str(tmp_path), separator="<nope>")


# ------------------------------------------------------------------------------------------------------- order


@given(st.integers(1, 500), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_permutation_hits_every_number_once(size: int, key: int) -> None:
    assert sorted(permuted(n, size, key) for n in range(size)) == list(range(size))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_shares_fill_a_block_and_leave_nobody_out(weights: list[float]) -> None:
    counts = shares(weights)
    assert sum(counts) == BLOCK
    assert min(counts) >= 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_every_source_is_read_epoch_by_epoch_in_its_share(sizes: list[int], seed: int) -> None:
    weights = [float(k + 1) for k in range(len(sizes))]
    sources = tuple(SourceSize(num_samples=n, weight=w) for n, w in zip(sizes, weights, strict=True))
    order = SampleOrder(sources, seed)
    places = [order.at(p) for p in range(2 * BLOCK)]
    for k, count in enumerate(shares(weights)):
        mine = [p for p in places if p.source == k]
        assert len(mine) == 2 * count
        for epoch, number in Counter(p.epoch for p in mine).items():
            distinct = {p.index for p in mine if p.epoch == epoch}
            assert len(distinct) == number, "a sample came twice in an epoch"


def test_order_depends_on_the_seed_and_repeats_with_it() -> None:
    sources = (SourceSize(num_samples=1000),)
    first, again, other = (SampleOrder(sources, seed) for seed in (1, 1, 2))
    assert [first.at(p) for p in range(50)] == [again.at(p) for p in range(50)]
    assert [first.at(p) for p in range(50)] != [other.at(p) for p in range(50)]


def test_position_a_billion_is_as_near_as_position_0() -> None:
    order = SampleOrder((SourceSize(num_samples=43_227), SourceSize(num_samples=7)), seed=3)
    near, far = ([order.at(start + p) for p in range(100)] for start in (0, 10**9))
    assert all(0 <= place.index < 43_227 for place in near + far)


# ----------------------------------------------------------------------------------------------------- batches


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_every_sample_of_a_batch_goes_to_exactly_one_data_rank(batch: int, microbatch: int, degree: int) -> None:
    shapes = [
        BatchShape(global_batch_size=batch, microbatch_size=microbatch, data_rank=r, data_degree=degree)
        for r in range(degree)
    ]
    dealt = [offset for shape in shapes for offset in shape.offsets()]
    assert [offset for offset in dealt if offset is not None] == list(range(batch))
    assert len({len(shape.offsets()) for shape in shapes}) == 1
    assert dealt.count(None) == shapes[0].padding


def test_the_order_is_unbroken_when_the_data_degree_goes_4_2_3_8(tmp_path: Path) -> None:
    text = "".join(chr(33 + i % 90) for i in range(4000))
    dataset = _dataset(tmp_path, [text, text[::-1]], seed=7)
    straight = [dataset.order.at(p) for p in range(4 * 12)]
    reference = [dataset.read(place)["tokens"].tolist() for place in straight]
    position, seen = 0, []
    for degree in (4, 2, 3, 8):
        for rank in range(degree):
            shape = BatchShape(global_batch_size=12, microbatch_size=1, data_rank=rank, data_degree=degree)
            loader = BatchLoader(dataset, repeat(shape), position=position)
            batch = next(loader)
            loader.close()
            seen += [m["tokens"][0].tolist() for m in batch.microbatches if (m["labels"] != IGNORED).any()]
            assert batch.count == 12 * 4
        position += 12
    assert seen == reference


def test_labels_are_the_tokens_one_further(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, ["abcdefghijklm"], seq_len=4)
    microbatch = dataset.batch(0, BatchShape(global_batch_size=3, microbatch_size=3)).microbatches[0]
    for tokens, labels in zip(microbatch["tokens"].tolist(), microbatch["labels"].tolist(), strict=True):
        assert labels == [t + 1 for t in tokens]


def test_held_out_samples_are_never_trained_on(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, ["x" * 400, "y" * 800], held_out=0.2)
    held_out = {(p.source, p.index) for p in dataset.held_out_samples(1000)}
    assert len(held_out) == sum(size.num_held_out for size in dataset.order.sources) > 10
    trained = {(p.source, p.index) for p in (dataset.order.at(n) for n in range(3 * BLOCK))}
    assert not held_out & trained


def test_fingerprint_depends_on_text_not_on_location(tmp_path: Path) -> None:
    prints = []
    for name, text in (("a", "some text " * 9), ("b", "some text " * 9), ("c", "other text " * 9)):
        (tmp_path / name).mkdir()
        prints.append(_dataset(tmp_path / name, [text]).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_an_error_of_the_loader_thread_reaches_the_loop(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, ["abcdefghijklm"], seq_len=4)
    loader = BatchLoader(dataset, repeat(BatchShape(global_batch_size=1, microbatch_size=1)), position=-(10**30))
    tokens = dataset.sources
    assert isinstance(tokens, list)
    tokens.clear()
    with pytest.raises(IndexError):
        list(itertools.islice(loader, 5))
    loader.close()


# ------------------------------------------------------------------------------------------------ tokenised data


def test_pretokenised_corpus_reads_alike_mapped_and_by_range(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    files = list_files(str(tmp_path / "a.txt"))
    header = pretokenise(files, ByteTokenizer(), DocumentReader(), str(tmp_path / "t"))
    pretokenise(files, ByteTokenizer(), DocumentReader(), "memory://pretokenised")
    local, remote = open_tokens(str(tmp_path / "t")), open_tokens("memory://pretokenised")
    assert (header.num_tokens, header.num_documents) == (10, 1)
    assert local.read(2, 8).tolist() == remote.read(2, 8).tolist() == [*b"me text", 256]
    assert local.header == remote.header


def test_token_files_overwrite_nothing(tmp_path: Path) -> None:
    for name in ("tokens.bin", "tokens.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("mine")
        with pytest.raises(AlreadyExistsError, match=f"{name} is there already"):
            check_free(str(tmp_path / name))
    check_free(str(tmp_path / "new"))


def test_a_damaged_pretokenised_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    pretokenise(list_files(str(tmp_path / "a.txt")), ByteTokenizer(), DocumentReader(), str(tmp_path / "t"))
    (tmp_path / "t" / "tokens.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="5 bytes, but its header promises 20"):
        open_tokens(str(tmp_path / "t"))


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 100)
    pretokenise(list_files(str(tmp_path / "a.txt")), ByteTokenizer(), DocumentReader(), str(tmp_path / "t"))
    (tmp_path / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    config = DataConfig(source=str(tmp_path / "t"), seq_len=8)
    with pytest.raises(DataError, match="another tokenizer"):
        open_dataset(config, ValidationConfig(), open_tokenizer(str(tmp_path)), seed=0, is_writer=True)


def test_standard_library_corpus_is_tokenised_once(tmp_path: Path) -> None:
    config = DataConfig(source="python-stdlib", cache=str(tmp_path))
    datasets = [
        open_dataset(config, ValidationConfig(), ByteTokenizer(), seed=0, is_writer=is_writer)
        for is_writer in (True, False)
    ]
    assert datasets[0].fingerprint == datasets[1].fingerprint
    source = datasets[0].sources[0]
    assert isinstance(source, TokenSource)
    assert len(source.file) > 5_000_000
    assert 2.5 < unigram_entropy(source.file) < 4.0


def test_a_mixture_takes_its_sources_by_weight(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 500)
    mixture = (SourceConfig(url=f"{tmp_path}/a.txt", weight=3.0), SourceConfig(url=f"{tmp_path}/b.txt"))
    config = DataConfig(mixture=mixture, seq_len=8, cache=str(tmp_path / "cache"))
    dataset = open_dataset(config, ValidationConfig(), ByteTokenizer(), seed=0, is_writer=True)
    counts = Counter(dataset.order.at(p).source for p in range(BLOCK))
    assert counts == {0: 768, 1: 256}


class _EndsTheProgram:
    """A data set that calls `sys.exit`, as scripts do."""

    def batch(self, position: int, shape: BatchShape) -> Any:
        del position, shape
        raise SystemExit(0)


def test_data_that_end_their_thread_are_an_error() -> None:
    data: Any = _EndsTheProgram()
    loader = BatchLoader(data, repeat(BatchShape(global_batch_size=1, microbatch_size=1)), position=0)
    with pytest.raises(DataError, match=r"raised SystemExit\(0\), which ends a thread"):
        next(loader)
    loader.close()
