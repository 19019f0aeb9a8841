"""The small files beside tokenizer.json that `AutoTokenizer` and `generate` want and a training run does not save."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from titan_ckpt.converters.models.spec import ModelSpec
from titan_ckpt.errors import DamagedError

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>")


def complete(assets: Mapping[str, bytes], spec: ModelSpec, where: str) -> dict[str, bytes]:
    """`assets` with what is missing made up from tokenizer.json: its class, its end token, and a plain way to generate."""
    if TOKENIZER not in assets or SETTINGS in assets:
        return dict(assets)
    end = _end_token(assets[TOKENIZER], where)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    generation: dict[str, Any] = {"do_sample": False}
    if end is not None:
        token, number = end
        settings |= {"eos_token": token, "pad_token": token}
        generation |= {"eos_token_id": number, "pad_token_id": number}
    return {SETTINGS: _encode(settings), GENERATION: _encode(generation)} | dict(assets)


def _end_token(tokenizer: bytes, where: str) -> tuple[str, int] | None:
    """The usual end-of-text token and its id, None if the tokenizer has none of the usual ones."""
    try:
        content = json.loads(tokenizer)
        added = {str(entry["content"]): int(entry["id"]) for entry in content.get("added_tokens") or []}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{where}: {TOKENIZER} is not a tokenizer: {type(error).__name__}: {error}") from error
    return next(((token, added[token]) for token in END_TOKENS if token in added), None)


def _encode(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
