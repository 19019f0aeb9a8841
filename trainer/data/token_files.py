"""Pre-tokenised corpora: `tokens.bin` (little-endian ids; each document ends with the separator) and its header `tokens.json`.

Local files are mapped into memory, remote ones read by range.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from titan_ckpt.arguments import OnProgress
from titan_ckpt.errors import AlreadyExistsError, DamagedError, DataError, NotFoundError
from titan_ckpt.location import join, local_path, normalise, redact, scheme
from titan_ckpt.parsing.json_values import JsonValue, parse_json
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.data.corpus import DocumentReader, File, list_files
from titan_ckpt.trainer.data.hub import HubSplit
from titan_ckpt.trainer.data.records import read_documents
from titan_ckpt.trainer.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)
BIN, HEADER = "tokens.bin", "tokens.json"
VERSION = 1
BATCH_DOCUMENTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensHeader:
    """`digest` is the xxh3-128 of tokens.bin, so it depends on text and tokenizer but not on the location."""

    version: int
    dtype: Literal["<u2", "<u4"]
    num_tokens: int
    num_documents: int
    vocab_size: int
    separator: int
    tokenizer: str
    digest: str
    skipped_lines: int


class TokenFile:
    """The tokens of one corpus, with random access."""

    def __init__(self, store: Store, header: TokensHeader) -> None:
        self.store, self.header = store, header
        self._map: NDArray[Any] | None = None
        if scheme(store.url) == "file":
            self._map = np.memmap(os.path.join(local_path(store.url), BIN), dtype=header.dtype, mode="r")

    @property
    def digest(self) -> str:
        """Of the tokens."""
        return self.header.digest

    @property
    def separator(self) -> int:
        """The id that ends a document."""
        return self.header.separator

    def __len__(self) -> int:
        return self.header.num_tokens

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count)."""
        if self._map is not None:
            return self._map[start : start + count].astype(np.int64)
        width = np.dtype(self.header.dtype).itemsize
        data = self.store.read(BIN, start * width, count * width)
        return np.frombuffer(data, dtype=self.header.dtype).astype(np.int64)


def open_tokens(url: str) -> TokenFile:
    """Open the pre-tokenised corpus in folder `url`; DataError if there is none or its size contradicts its header."""
    store = open_store(url)
    try:
        header = _header(store)
        size = store.stat(BIN).size_bytes
    except NotFoundError as error:
        raise DataError(f"{redact(url)}: no pre-tokenised corpus here: {error}") from error
    except DamagedError as error:
        raise DataError(f"{error}: not a header of pre-tokenised data") from error
    expected = header.num_tokens * np.dtype(header.dtype).itemsize
    if size != expected:
        raise DataError(f"{store.where(BIN)}: {size} bytes, but its header promises {expected}")
    return TokenFile(store, header)


def _header(store: Store) -> TokensHeader:
    """The header of a corpus; DamagedError unless each of its values has its type."""
    found = JsonValue(parse_json(store.read(HEADER), store.where(HEADER)), store.where(HEADER))
    if found["version"].whole() != VERSION:
        raise DataError(
            f"{store.where(HEADER)}: version {found['version'].value}; this release reads version {VERSION}"
        )
    if found["dtype"].text() not in ("<u2", "<u4"):
        found["dtype"].fail('"<u2" or "<u4"')
    return TokensHeader(
        version=VERSION,
        dtype="<u2" if found["dtype"].value == "<u2" else "<u4",
        num_tokens=found["num_tokens"].whole(),
        num_documents=found["num_documents"].whole(),
        vocab_size=found["vocab_size"].whole(),
        separator=found["separator"].whole(),
        tokenizer=found["tokenizer"].text(),
        digest=found["digest"].text(),
        skipped_lines=found["skipped_lines"].whole(),
    )


def is_tokens(url: str) -> bool:
    """Whether folder `url` holds a pre-tokenised corpus."""
    return open_store(url).exists(HEADER)


def check_free(url: str) -> None:
    """AlreadyExistsError if folder `url` holds token files: none are overwritten."""
    store = open_store(url)
    if found := next((name for name in (HEADER, BIN) if store.exists(name)), None):
        raise AlreadyExistsError(f"{store.where(found)} is there already; give the token files a folder of their own")


def pretokenise(
    files: Sequence[File | HubSplit],
    tokenizer: Tokenizer,
    reader: DocumentReader,
    destination: str,
    *,
    progress: OnProgress | None = None,
) -> TokensHeader:
    """Stream the corpus to folder `destination` on any store; calls `progress(done_bytes, total_bytes)` after every file."""
    store = open_store(destination)
    dtype: Literal["<u2", "<u4"] = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    seen = _Seen()
    store.write(BIN, _encode_all(files, tokenizer, reader, dtype, seen, progress))
    if seen.tokens == 0:
        store.delete([BIN])
        raise DataError(f"data: {len(files)} files starting with {files[0].where} hold no text")
    header = TokensHeader(
        version=VERSION, dtype=dtype, num_tokens=seen.tokens, num_documents=seen.documents,
        vocab_size=tokenizer.vocab_size, separator=tokenizer.separator, tokenizer=tokenizer.digest,
        digest=seen.content.hexdigest(), skipped_lines=sum(reader.skipped_lines.values()),
    )  # fmt: skip
    store.write(HEADER, [json.dumps(asdict(header), indent=1).encode()])
    for where, count in reader.skipped_lines.items():
        log.warning("%s: skipped %d lines without JSON text", where, count)
    return header


@dataclass(slots=True)
class _Seen:
    tokens: int = 0
    documents: int = 0
    content: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


def _encode_all(
    files: Sequence[File | HubSplit],
    tokenizer: Tokenizer,
    reader: DocumentReader,
    dtype: str,
    seen: _Seen,
    progress: OnProgress | None,
) -> Iterator[bytes]:
    done, total = 0, sum(file.size_bytes for file in files)
    for file in files:
        for batch in _batched(read_documents(file, reader)):
            for ids in tokenizer.encode(batch):
                data = np.append(ids, np.uint32(tokenizer.separator)).astype(dtype).tobytes()
                seen.tokens += len(ids) + 1
                seen.documents += 1
                seen.content.update(data)
                yield data
        done += file.size_bytes
        if progress is not None:
            progress(done, total)


def _batched(documents: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for document in documents:
        batch.append(document)
        if len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch = []
    if batch:
        yield batch


def corpus_digest(files: Sequence[File | HubSplit], tokenizer: Tokenizer, reader: DocumentReader) -> str:
    """A corpus's cache key: names and versions of its files, tokenizer, reader settings."""
    rules = f"{tokenizer.digest} {reader.format} {reader.text_field} {reader.bad_line} {VERSION}"
    lines = [rules, *(f"{file.path} {file.size_bytes} {file.version}" for file in files)]
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def cached_tokens(url: str, tokenizer: Tokenizer, reader: DocumentReader, cache: str, *, is_writer: bool) -> TokenFile:
    """The tokenised corpus at `url` from the folder `cache`; if it is missing, the writer (one per machine) makes it."""
    files = list_files(url)
    folder = join(normalise(cache), corpus_digest(files, tokenizer, reader))
    if not is_tokens(folder):
        if is_writer:
            started = time.monotonic()
            header = pretokenise(files, tokenizer, reader, folder)
            log.info(
                "tokenised %s into %d tokens in %.1f s: %s",
                redact(url),
                header.num_tokens,
                time.monotonic() - started,
                folder,
            )
        else:
            raise DataError(f"{folder}: the tokenised corpus is missing; local rank 0 should have written it")
    return open_tokens(folder)
