"""Small files of an exported model: README.md, and the tokenizer and generation settings that training does not save.

None contains a time, so two exports of one checkpoint are equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from titan_ckpt.console.units import format_size
from titan_ckpt.converters.models.spec import ModelSpec
from titan_ckpt.errors import DamagedError
from titan_ckpt.format.manifest import Manifest

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>")


def model_card(
    *, source: str, manifest: Manifest, spec: ModelSpec, dtype: str, num_parameters: int, size_bytes: int
) -> bytes:
    """The README.md; `source` is the checkpoint's URL without secrets."""
    rows = {
        "Source": f"`{source}`",
        "Step": manifest.step,
        "Trained on mesh": "not recorded" if manifest.mesh is None else f"`{manifest.mesh}`",
        "Tokens seen": _tokens(manifest.training),
        "Parameters": f"{num_parameters:,}",
        "Weights": f"{dtype}, {format_size(size_bytes)}",
        "Layers / width / heads": f"{spec.n_layers} / {spec.dim} / {spec.n_heads} ({spec.n_kv_heads} key-value)",
        "Vocabulary": f"{spec.vocab_size:,}",
        "Longest sequence": f"{spec.max_seq_len:,}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
---
# A {spec.family} model, exported by titan-ckpt

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
print(tokenizer.decode(model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=20)[0]))
```
""".encode()


def _tokens(training: Mapping[str, Any]) -> str:
    tokens = training.get("tokens_seen")
    return f"{tokens:,}" if isinstance(tokens, int) else "not recorded"


def complete(assets: Mapping[str, bytes], spec: ModelSpec, where: str) -> dict[str, bytes]:
    """Add tokenizer_config.json and generation_config.json to `assets` if only tokenizer.json is there.

    They name the generic tokenizer class and the usual end token, and make generation greedy.
    """
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
    """The end-of-text token and its id; None if the tokenizer has none of END_TOKENS."""
    try:
        content = json.loads(tokenizer)
        added = {str(entry["content"]): int(entry["id"]) for entry in content.get("added_tokens") or []}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{where}: {TOKENIZER} is not a tokenizer: {type(error).__name__}: {error}") from error
    return next(((token, added[token]) for token in END_TOKENS if token in added), None)


def _encode(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
