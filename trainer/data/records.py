"""Documents and records of a corpus's files: text, JSONL, Parquet, tar shards (WebDataset) and Hugging Face datasets.

A tar shard has the files of one sample next to each other under one name with different endings (WebDataset's layout,
https://github.com/webdataset/webdataset): `0001.json` is a record, `0001.txt` a record with only the text.
"""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Iterator
from typing import IO, Any

from titan_ckpt.errors import DataError, MissingExtraError
from titan_ckpt.parsing.json_values import parse_json_line, show
from titan_ckpt.trainer.data.corpus import (
    DAMAGED,
    SNIFF_BYTES,
    DocumentReader,
    File,
    StoreStream,
    kind_of,
    open_unpacked,
)
from titan_ckpt.trainer.data.hub import HubSplit

log = logging.getLogger(__name__)
BOM = b"\xef\xbb\xbf"
ROWS = 256  # of a Parquet file, read at a time


def read_documents(file: File | HubSplit, reader: DocumentReader) -> Iterator[bytes]:
    """The texts of a file: lines of JSONL, rows, members of a shard, or the whole. DataError for binary content."""
    if isinstance(file, HubSplit):
        yield from file.documents(reader.text_field)
        return
    if kind_of(file, reader) == "text":
        yield from _whole(file)
        return
    for number, record in read_records(file, reader):
        text, problem = _text_of(record, reader.text_field)
        if text is not None:
            yield text
        elif reader.bad_line == "stop":
            raise DataError(
                f'{file.where}: {unit_of(file, reader)} {number}: {problem}; mend it, or set data.bad_line = "skip"'
            )
        else:
            reader.skipped_lines[file.where] = reader.skipped_lines.get(file.where, 0) + 1
            log.debug("%s: %s %d: %s; skipped", file.where, unit_of(file, reader), number, problem)


def unit_of(file: File | HubSplit, reader: DocumentReader) -> str:
    """What the numbers of `read_records` count."""
    if isinstance(file, HubSplit):
        return "row"
    return {"parquet": "row", "tar": "member"}.get(_kind(file, reader), "line")


def read_records(file: File | HubSplit, reader: DocumentReader) -> Iterator[tuple[int, Any]]:
    """Number and value of each line, row or member of a file; a ValueError as the value if it is not JSON.

    Lines and members count from 1, rows from 0. DataError for a file that cannot be read to its end.
    """
    if isinstance(file, HubSplit):
        yield from ((number, without_fillers(row)) for number, row in enumerate(file.records()))
        return
    kind = _kind(file, reader)
    if kind == "parquet":
        yield from _rows(file)
        return
    try:
        with open_unpacked(file) as stream:
            yield from _members(file, stream, reader.text_field) if kind == "tar" else _lines(stream)
    except DAMAGED as error:
        raise DataError(f"{file.where}: cannot be unpacked: {error}") from error


def _kind(file: File, reader: DocumentReader) -> str:
    kind = kind_of(file, reader)
    return "jsonl" if kind == "text" else kind


def _whole(file: File) -> Iterator[bytes]:
    try:
        with open_unpacked(file) as stream:
            text = stream.read()
    except DAMAGED as error:
        raise DataError(f"{file.where}: cannot be unpacked: {error}") from error
    if b"\0" in text[:SNIFF_BYTES]:
        raise DataError(
            f"{file.where}: binary data (a NUL byte near the start); expected text or JSONL, plain, .gz or .zst, "
            "Parquet (.parquet) or tar shards (.tar)"
        )
    if text:
        yield text


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(stream, start=1):
        content = line.removeprefix(BOM) if number == 1 else line
        if content.strip():
            yield number, _parsed(content)


def _parsed(text: bytes) -> Any:
    try:
        return parse_json_line(text)
    except ValueError as error:
        return ValueError(f"not JSON ({error})")


def _rows(file: File) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet  # an extra
    except ImportError as error:
        raise MissingExtraError("pyarrow", "datasets", f"the Parquet file {file.where}") from error
    number = 0
    try:
        with parquet.ParquetFile(StoreStream(file), pre_buffer=False) as table:
            for batch in table.iter_batches(batch_size=ROWS):
                for row in batch.to_pylist():
                    yield number, without_fillers(row)
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file.where}: cannot be read as Parquet, at row {number}: {error}") from error


def without_fillers(value: Any) -> Any:
    """A row without the nulls with which Arrow fills up objects that have different keys; a message's `content` may be null.

    >>> without_fillers({"role": "assistant", "content": None, "calls": [{"x": 1, "y": None}]})
    {'role': 'assistant', 'content': None, 'calls': [{'x': 1}]}
    """
    if isinstance(value, list):
        return [without_fillers(item) for item in value]
    if isinstance(value, dict):
        return {key: without_fillers(item) for key, item in value.items() if item is not None or key == "content"}
    return value


def _members(file: File, stream: IO[bytes], text_field: str) -> Iterator[tuple[int, Any]]:
    number, counted = 0, _Counted(stream)
    try:
        with tarfile.open(fileobj=counted, mode="r|") as shard:
            for member in shard:
                name = member.name.rpartition("/")[2]
                ending = name.partition(".")[2].lower()
                if not member.isfile() or name.startswith(".") or ending not in ("txt", "json"):
                    continue
                number += 1
                opened = shard.extractfile(member)
                assert opened is not None
                content = opened.read()
                yield number, {text_field: content.decode(errors="replace")} if ending == "txt" else _parsed(content)
            if counted.total() - shard.offset < tarfile.BLOCKSIZE:  # tarfile is silent about that
                raise tarfile.ReadError("it ends without the mark of a tar's end: is it cut off?")
    except tarfile.TarError as error:
        raise DataError(f"{file.where}: cannot be read as a tar shard, after {number} members: {error}") from error


class _Counted(io.RawIOBase):
    """A stream that counts the bytes read from it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._count = stream, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._count += len(data)
        return data

    def total(self) -> int:
        """Read to the end; all bytes of the stream."""
        while self.read(1 << 20):
            continue
        return self._count


def _text_of(record: Any, text_field: str) -> tuple[bytes | None, str]:
    """The text of a record, or None and the problem."""
    if isinstance(record, Exception):
        return None, str(record)
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        found = show(list(record)) if isinstance(record, dict) else type(record).__name__
        return None, f"no string {text_field!r} (data.text_field); found {found}"
    return text.encode(errors="replace"), ""
