"""Chat data as token ids with a mark on those that are learned, in a cache like that of text.

`chat.bin`: little-endian ids of 4 bytes; bit 31 is set if the token is learned. `chat_ends.bin`: for every sequence its end in
chat.bin, the number of its file, and its line, each of 8 bytes. `chat.json` is the header. A pair is two sequences, chosen first.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from titan_ckpt.errors import DamagedError, DataError
from titan_ckpt.location import join, local_path, normalise, redact, scheme
from titan_ckpt.parsing.json_values import JsonValue, parse_json
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.data.chat_template import (
    ChatTemplate,
    Rendered,
    TemplateProblem,
    check_text,
    day,
    open_template,
)
from titan_ckpt.trainer.data.conversations import (
    Chat,
    LineProblem,
    Pair,
    Plain,
    is_learned,
    parse_record,
    texts_as_arguments,
)
from titan_ckpt.trainer.data.corpus import DocumentReader, File, list_files
from titan_ckpt.trainer.data.hub import HubSplit
from titan_ckpt.trainer.data.records import read_records
from titan_ckpt.trainer.data.tokenizer import Tokenizer, tokenizer_folder

log = logging.getLogger(__name__)
BIN, ENDS, HEADER = "chat.bin", "chat_ends.bin", "chat.json"
VERSION = 3
LEARNED = np.uint32(1 << 31)
BATCH, CHUNK = 128, 1 << 16  # sequences
ChatKind: TypeAlias = Literal["chat", "pairs"]
COLUMNS = 3  # of chat_ends.bin


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRules:
    """How examples become tokens. `kind`: whether the lines are conversations or pairs."""

    kind: ChatKind
    plain: ChatTemplate
    with_tools: ChatTemplate
    last_only: bool
    today: str

    @property
    def digest(self) -> str:
        """Identifies the rules."""
        shown = [[each.source, each.names] for each in (self.plain, self.with_tools)]
        return xxhash.xxh3_128_hexdigest(
            json.dumps([VERSION, self.kind, self.last_only, self.today, shown], sort_keys=True).encode()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatHeader:
    """`digest` is the xxh3-128 of chat.bin; `files` are the names that messages show."""

    version: int
    num_sequences: int
    num_tokens: int
    num_learned: int
    digest: str
    skipped_lines: int
    files: tuple[str, ...]


class ChatFile:
    """The sequences of a tokenised set of conversations, with random access."""

    def __init__(self, store: Store, header: ChatHeader) -> None:
        self.header, self._store = header, store
        ends = np.frombuffer(store.read(ENDS), dtype="<i8").reshape(-1, COLUMNS)
        size = store.stat(BIN).size_bytes
        if len(ends) != header.num_sequences or size != 4 * header.num_tokens:
            raise DamagedError(
                f"{store.where(BIN)}: {size} bytes in {len(ends)} sequences, but its header promises "
                f"{4 * header.num_tokens} in {header.num_sequences}; remove the folder, it is made again"
            )
        self.starts: NDArray[np.int64] = np.concatenate([[0], ends[:, 0]])
        self._places = ends[:, 1:]
        self._ids: NDArray[Any]
        if scheme(store.url) == "file":
            self._ids = np.memmap(os.path.join(local_path(store.url), BIN), dtype="<u4", mode="r")
        else:
            self._ids = np.frombuffer(store.read(BIN), dtype="<u4")

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.diff(self.starts)

    def where(self, number: int) -> str:
        """File and line of a sequence."""
        file, line = self._places[number]
        return f"{self.header.files[file]}: line {line}"

    def read(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The ids of a sequence, and which of them are learned."""
        stored = self._ids[self.starts[number] : self.starts[number + 1]]
        return (stored & ~LEARNED).astype(np.int64), (stored & LEARNED) != 0

    def count_learned(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """For ascending ranges of tokens how many of each are learned."""
        found = np.zeros(len(starts), dtype=np.int64)
        for first in range(0, len(starts), CHUNK):
            chosen = slice(first, first + CHUNK)
            low, high = np.minimum(starts, ends)[chosen], ends[chosen]
            bits = np.append(self._ids[low[0] : high[-1]] >= LEARNED, False)
            bounds = np.stack([low, high], axis=1).ravel() - low[0]
            found[chosen] = np.where(high > low, np.add.reduceat(bits, bounds, dtype=np.int64)[::2], 0)
        return found


def chat_rules(kind: ChatKind, tokenizer: str, *, template: str, last_only: bool, today: str) -> ChatRules:
    """The rules for `data.tokenizer` and the settings of [chat]."""
    plain, with_tools = open_template(tokenizer_folder(tokenizer), template, today=day(today))
    return ChatRules(kind=kind, plain=plain, with_tools=with_tools, last_only=last_only, today=today)


def render(example: Chat | Plain, rules: ChatRules, end: str) -> Rendered:
    """The text of an example, and what of it is learned; TemplateProblem if its template refuses it."""
    if isinstance(example, Plain):
        text = example.prompt + example.completion
        check_text(text)
        text += "" if text.endswith(end) else end
        return Rendered(text, ((len(example.prompt), len(text)),))
    template = rules.with_tools if example.tools else rules.plain
    return template.render_answers(
        example.messages, tools=example.tools, names=example.names, first=example.first, last_only=rules.last_only,
        left_out={number for number, message in enumerate(example.messages) if not is_learned(message)},
    )  # fmt: skip


def learned(offsets: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which tokens overlap the spans; `offsets` [N, 2] are their characters.

    >>> learned(np.array([[0, 2], [2, 5], [5, 6]]), [(3, 5)]).tolist()
    [False, True, False]
    """
    starts, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    found = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        found |= (starts < end) & (ends > start)
    return found


@dataclass(slots=True)
class _Seen:
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    tokens: int = 0
    learned: int = 0
    text_arguments: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    content: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


@dataclass(frozen=True, slots=True)
class _Due:
    """A rendered sequence before it is tokenised."""

    file: int
    line: int
    rendered: Rendered


def tokenise_chat(
    files: Sequence[File | HubSplit], tokenizer: Tokenizer, rules: ChatRules, reader: DocumentReader, folder: str
) -> ChatHeader:
    """Stream the examples to `folder`; DataError names file and line of what cannot be learned from."""
    store, seen = open_store(folder), _Seen()
    store.write(BIN, _encode(files, tokenizer, rules, reader, seen))
    if not seen.ends:
        store.delete([BIN])
        raise DataError(f"data: {len(files)} files starting with {files[0].where} hold no conversation")
    store.write(ENDS, [np.asarray(seen.ends, dtype="<i8").tobytes()])
    header = ChatHeader(
        version=VERSION, num_sequences=len(seen.ends), num_tokens=seen.tokens, num_learned=seen.learned,
        digest=seen.content.hexdigest(), skipped_lines=sum(seen.skipped.values()),
        files=tuple(file.path for file in files),
    )  # fmt: skip
    store.write(HEADER, [json.dumps(asdict(header), indent=1).encode()])
    for where, count in seen.skipped.items():
        log.warning("%s: skipped %d lines that are no conversations", where, count)
    if seen.text_arguments:
        log.warning(
            "%d tool calls give their arguments as text; many templates write that with escaped quotes, so give objects",
            seen.text_arguments,
        )
    return header


def _encode(
    files: Sequence[File | HubSplit], tokenizer: Tokenizer, rules: ChatRules, reader: DocumentReader, seen: _Seen
) -> Iterator[bytes]:
    batch: list[_Due] = []
    for due in _render_all(files, tokenizer, rules, reader, seen):
        batch.append(due)
        if len(batch) == BATCH:
            yield from _encode_batch(batch, tokenizer, seen)
            batch = []
    yield from _encode_batch(batch, tokenizer, seen)


def _encode_batch(batch: Sequence[_Due], tokenizer: Tokenizer, seen: _Seen) -> Iterator[bytes]:
    encoded = tokenizer.encode_with_offsets([due.rendered.text for due in batch]) if batch else []
    for due, (ids, offsets) in zip(batch, encoded, strict=True):
        is_learned = learned(offsets, due.rendered.spans)
        data = (ids | np.where(is_learned, LEARNED, np.uint32(0))).astype("<u4").tobytes()
        seen.tokens += len(ids)
        seen.learned += int(is_learned.sum())
        seen.ends.append((seen.tokens, due.file, due.line))
        seen.content.update(data + b"|")
        yield data


def _render_all(
    files: Sequence[File | HubSplit], tokenizer: Tokenizer, rules: ChatRules, reader: DocumentReader, seen: _Seen
) -> Iterator[_Due]:
    end = tokenizer.separator_text
    for number, file in enumerate(files):
        for line, record in read_records(file, reader):
            try:
                examples = _examples(record, rules)
                rendered = [render(example, rules, end) for example in examples]
            except (LineProblem, TemplateProblem) as problem:
                if reader.bad_line == "stop":
                    raise DataError(
                        f'{file.where}: line {line}: {problem}; mend it, or set data.bad_line = "skip"'
                    ) from problem
                seen.skipped[file.where] = seen.skipped.get(file.where, 0) + 1
                log.debug("%s: line %d: %s; skipped", file.where, line, problem)
                continue
            seen.text_arguments += sum(texts_as_arguments(each) for each in examples if isinstance(each, Chat))
            yield from (_Due(number, line, each) for each in rendered)


def _examples(record: Any, rules: ChatRules) -> list[Chat | Plain]:
    if isinstance(record, Exception):
        raise LineProblem(str(record)) from record
    example = parse_record(record)
    if isinstance(example, Pair):
        if rules.kind == "chat":
            raise LineProblem("a pair of chosen and rejected answers, which the loss of next tokens cannot compare")
        return [example.chosen, example.rejected]
    if rules.kind == "pairs":
        raise LineProblem("expected chosen and rejected answers, found a conversation")
    return [example]


def cached_chat(
    url: str, tokenizer: Tokenizer, rules: ChatRules, reader: DocumentReader, cache: str, *, is_writer: bool
) -> ChatFile:
    """The tokenised conversations at `url` from the folder `cache`; if they are missing, the writer makes them."""
    files = list_files(url)
    lines = [f"{file.path} {file.size_bytes} {file.version}" for file in files]
    key = "\n".join([rules.digest, tokenizer.digest, reader.bad_line, *lines])
    folder = join(normalise(cache), f"chat-{xxhash.xxh3_128_hexdigest(key.encode())}")
    store = open_store(folder)
    if not store.exists(HEADER):
        if not is_writer:
            raise DataError(f"{folder}: the tokenised conversations are missing; local rank 0 should have written them")
        made = tokenise_chat(files, tokenizer, rules, reader, folder)
        log.info(
            "tokenised %s: %d sequences, %d tokens, %d of them learned: %s",
            redact(url), made.num_sequences, made.num_tokens, made.num_learned, folder,
        )  # fmt: skip
    return ChatFile(store, _header(store))


def _header(store: Store) -> ChatHeader:
    found = JsonValue(parse_json(store.read(HEADER), store.where(HEADER)), store.where(HEADER))
    if found["version"].whole() != VERSION:
        found["version"].fail(str(VERSION))
    return ChatHeader(
        version=VERSION,
        num_sequences=found["num_sequences"].whole(),
        num_tokens=found["num_tokens"].whole(),
        num_learned=found["num_learned"].whole(),
        digest=found["digest"].text(),
        skipped_lines=found["skipped_lines"].whole(),
        files=tuple(item.text() for item in found["files"].entries()),
    )
