"""A tokenizer.json for models trained on plain bytes: byte b is token b, the end of a text is token 256.

transformers' byte-level models spell bytes as printable characters (the table that GPT-2 introduced): those that print stand for
themselves, the others get the characters from U+0100 on, in order.
"""

from __future__ import annotations

import json
from typing import Any

from titan_ckpt.converters.model_spec import ModelSpec

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256


def byte_tokenizer(spec: ModelSpec) -> dict[str, bytes]:
    """The files that make `AutoTokenizer` work, and generation_config.json; nothing if the vocabulary cannot hold 256 bytes."""
    if spec.vocab_size < NUM_BYTES:
        return {}
    has_end = spec.vocab_size > NUM_BYTES
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    generation: dict[str, Any] = {"do_sample": False}
    if has_end:
        settings |= {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
        generation |= {"eos_token_id": NUM_BYTES, "pad_token_id": NUM_BYTES}
    return {
        "tokenizer.json": _encode(_tokenizer(has_end)),
        "tokenizer_config.json": _encode(settings),
        "generation_config.json": _encode(generation),
    }


def byte_characters() -> list[str]:
    """The character that stands for each byte.

    >>> byte_characters()[65], byte_characters()[32], byte_characters()[0]
    ('A', 'Ġ', 'Ā')
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]


def _tokenizer(has_end: bool) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {
        "id": NUM_BYTES, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }  # fmt: skip
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end] if has_end else [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _encode(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
