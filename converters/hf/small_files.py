"""Small files of an exported model: README.md, and the tokenizer and generation settings that training does not save.

None contains a time, so two exports of one checkpoint are equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from titan_ckpt.console.units import format_size
from titan_ckpt.converters.models.spec import ModelSpec
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.parsing.json_values import JsonValue, parse_json

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
_BEGIN, _END = "<!-- titan-ckpt: begin -->", "<!-- titan-ckpt: end -->"
_SECTION = re.compile(f"{_BEGIN}.*?{_END}\n?".encode(), re.DOTALL)
_HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
---
# A {family} model, exported by titan-ckpt

"""
_USAGE = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
print(tokenizer.decode(model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=20)[0]))
```
"""
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>")


def model_card(
    theirs: bytes | None,
    *,
    source: str,
    manifest: Manifest,
    spec: ModelSpec,
    dtype: str,
    num_parameters: int,
    size_bytes: int,
) -> bytes:
    """The README.md. `theirs` is the card that the model was imported with: it stays, and training since adds a section.

    `source` names the checkpoint without a path of this machine. A section of an earlier export is replaced.
    """
    if theirs is not None and not manifest.training:
        return theirs
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
    section = f"{_BEGIN}\n\n| | |\n|---|---|\n{table}\n\n{_END}\n".encode()
    if theirs is None:
        return _HEAD.format(family=spec.family).encode() + section + _USAGE.encode()
    if _SECTION.search(theirs):
        return _SECTION.sub(lambda _: section, theirs, count=1)
    return theirs.rstrip() + b"\n\n## Trained further, and exported by titan-ckpt\n\n" + section


def source_name(url: str, step: int) -> str:
    """A name for a run: the last part of its URL, or a hub cache's repository; no path, host, bucket or password.

    >>> source_name("/home/me/runs/demo", 60), source_name("s3://key:secret@bucket/demo?token=1", 6), source_name("s3://b", 1)
    ('demo@60', 'demo@6', 'checkpoint@1')
    >>> source_name("/cache/hub/models--org--name/snapshots/0123abc", 0)
    'org/name@0123abc'
    """
    _, separator, rest = url.rpartition("://")
    parts = [part for part in rest.partition("?")[0].split("/") if part]
    parts = parts[1:] if separator else parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        repository = parts[-3].removeprefix("models--").replace("--", "/")
        return f"{_plain(repository)}@{_plain(parts[-1])}"
    return f"{_plain(parts[-1]) if parts else 'checkpoint'}@{step}"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_./-]", "_", name)


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
    tokens = JsonValue(parse_json(tokenizer, f"{where}: {TOKENIZER}"), f"{where}: {TOKENIZER}").find("added_tokens")
    added = {} if tokens is None else {entry["content"].text(): entry["id"].whole() for entry in tokens.entries()}
    return next(((token, added[token]) for token in END_TOKENS if token in added), None)


def _encode(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
