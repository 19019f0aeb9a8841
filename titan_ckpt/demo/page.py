"""What the demo's model learns by heart: a page of Python's own manual, which is part of every Python, and a tokenizer for it."""

from __future__ import annotations

import json
import pydoc_data.topics
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from titan_ckpt.trainer.config.recipes import find_config

TOPIC, CHARACTERS = "objects", 2600
VOCABULARY = 512
PROMPT_WORDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The text and the config of a training on it; `prompt` is how the text begins."""

    text: str
    prompt: str
    file: Path
    config: Path


def write_page(folder: Path) -> Page:
    """Write `page.txt`, its `tokenizer.json` and `demo.toml`, the recipe `tiny` with these, into `folder`."""
    text = _text()
    file = folder / "page.txt"
    file.write_text(text, encoding="utf-8")
    _train_tokenizer(text).save(str(folder / "tokenizer.json"))
    config = folder / "demo.toml"
    config.write_text(
        f"""# The recipe `tiny`, on a page of text.
base = {json.dumps(find_config("tiny"))}

[model]
vocab_size = {VOCABULARY}

[data]
source = {json.dumps(str(file))}
tokenizer = {json.dumps(str(folder / "tokenizer.json"))}
cache = {json.dumps(str(folder / "tokens"))}
seq_len = 64
""",
        encoding="utf-8",
    )
    return Page(text=text, prompt=" ".join(text.split()[:PROMPT_WORDS]), file=file, config=config)


def _text() -> str:
    """The first paragraphs of prose on TOPIC, without the markup."""
    found = ""
    for paragraph in re.split(r"\n\s*\n", pydoc_data.topics.topics[TOPIC]):
        line = " ".join(re.sub(r"[*\"`]", "", paragraph).split())
        if line[-1:] in (".", ")") and len(found) + len(line) <= CHARACTERS:
            found += f"{line}\n"
    return found


def _train_tokenizer(text: str) -> Tokenizer:
    """Byte-pair encoding of the words of `text`; any other text falls into bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer
