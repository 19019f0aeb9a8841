"""Text to token ids: bytes by default, a Hugging Face `tokenizer.json` by path or URL."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_ckpt.errors import ConfigError, MissingExtraError, StoreError
from titan_ckpt.store.open import open_store

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
USUAL_SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>")


class Tokenizer(ABC):
    """`vocab_size` is the largest id plus one, `separator` the id between documents, `digest` identifies the mapping.

    `separator_text` is the separator as text, "" if no text becomes it.
    """

    vocab_size: int
    separator: int
    separator_text: str
    digest: str

    @abstractmethod
    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        """Ids of each text, without special tokens."""

    @abstractmethod
    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        """Ids of each text, whose special tokens become theirs, and the characters [start, end) of each id."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def to_json(self) -> bytes:
        """The equivalent `tokenizer.json`, saved with every checkpoint."""


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes, 256 separates documents."""

    def __init__(self) -> None:
        self.vocab_size, self.separator, self.separator_text = 257, 256, ""
        self.digest = "bytes-1"

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint32) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        found = []
        for ids in self.encode([text.encode() for text in texts]):
            starts = np.cumsum((ids & 0xC0) != 0x80) - 1  # a byte that begins with the bits 10 goes on with a character
            found.append((ids, np.stack([starts, starts + 1], axis=1)))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def to_json(self) -> bytes:
        """Byte-level BPE without merges, hence one token per byte."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        end = {"id": 256, "content": END_OF_TEXT, "special": True, "normalized": False}
        content: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                "vocab": {**{letter: byte for byte, letter in enumerate(byte_letters())}, END_OF_TEXT: 256}, "merges": [],
            },
        }  # fmt: skip
        return json.dumps(content, ensure_ascii=False, indent=1).encode()


def byte_letters() -> list[str]:
    """Byte-level BPE's character for each byte: the byte itself if printable, else the next free one from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]


@contextmanager
def _library(what: str) -> Iterator[None]:
    """ConfigError for whatever the tokenizers library raises; where its code panics that is no Exception, but a BaseException."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ConfigError(f"{what}: {error}") from error
        raise


class HuggingFaceTokenizer(Tokenizer):
    """Any fast tokenizer, from the content of its `tokenizer.json`."""

    def __init__(self, content: bytes, *, where: str, separator: str = "") -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise MissingExtraError("tokenizers", "train", f"the tokenizer {where}") from error
        self._content, self._where = content, where
        with _library(f"data.tokenizer = {where}: not a tokenizer.json"):
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode())
            self._tokenizer.no_truncation()  # a file may ask for both, which would cut every document
            self._tokenizer.no_padding()
            self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.separator = self._find_separator(where, separator)
        self.separator_text = str(self._tokenizer.id_to_token(self.separator))
        self.digest = hashlib.sha256(content).hexdigest()[:32] + f"-{self.separator}"

    def _find_separator(self, where: str, asked: str) -> int:
        for token in (asked,) if asked else USUAL_SEPARATORS:
            found = self._tokenizer.token_to_id(token)
            if found is not None:
                return int(found)
        tried = asked or ", ".join(USUAL_SEPARATORS)
        raise ConfigError(f"data.tokenizer = {where} has no token {tried}; name one with data.separator")

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        decoded = [text.decode(errors="replace") for text in texts]
        with _library(f"data.tokenizer = {self._where}: cannot encode the data with it"):
            encodings = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        with _library(f"data.tokenizer = {self._where}: cannot encode the data with it"):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.asarray(each.ids, dtype=np.uint32), np.asarray(each.offsets, dtype=np.int64).reshape(-1, 2))
            for each in encodings
        ]

    def decode(self, ids: Sequence[int]) -> str:
        with _library(f"data.tokenizer = {self._where}: cannot decode with it"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def to_json(self) -> bytes:
        return self._content


def open_tokenizer(name: str, *, separator: str = "") -> Tokenizer:
    """`bytes`, or the tokenizer.json at a path or URL, which may be its folder's."""
    if name == BYTES:
        return ByteTokenizer()
    folder, _, file = name.rpartition("/")
    try:
        if not name.endswith(".json"):
            folder, file = name, "tokenizer.json"
        content = open_store(folder or ".").read(file)
    except StoreError as error:
        raise ConfigError(f'data.tokenizer = {name}: {error}; give "bytes" or a Hugging Face tokenizer.json') from error
    return HuggingFaceTokenizer(content, where=name, separator=separator)


def tokenizer_folder(name: str) -> str:
    """The folder of the tokenizer `data.tokenizer`; "" for bytes."""
    if name == BYTES:
        return ""
    return (name.rpartition("/")[0] or ".") if name.endswith(".json") else name


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer whose ids exceed the model's vocabulary."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, but model.vocab_size = {vocab_size}; "
            f"set model.vocab_size to at least {tokenizer.vocab_size}"
        )
