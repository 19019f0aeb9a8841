"""The small files of a model: which are carried, and those that an export adds. Everything else is left out, and said.

An allow-list: tokenizer, generation settings, chat templates, licence and model card. Code is never carried, nor are settings
that make a loader run code (`auto_map`), that tell where on a machine the model lay, or that hold a password or token. An export
adds README.md and the tokenizer and generation settings that training does not save; none contains a time, so two exports of one
checkpoint are equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt.console.units import format_size
from titan_ckpt.converters.models.spec import ModelSpec
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.location import is_credential
from titan_ckpt.parsing.json_values import JsonValue, parse_json

CONFIG = "config.json"
README = "README.md"
_SETTINGS = (CONFIG, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_CARRIED = re.compile(
    r"(?:config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|(?:tokenizer|spiece|sentencepiece\.bpe)\.model|tokenizer\.model\.v\d+|tekken\.json|[A-Za-z0-9_][A-Za-z0-9_-]*\.tiktoken"
    r"|merges\.txt|vocab\.txt|chat_template\.jinja|additional_chat_templates/[A-Za-z0-9_][A-Za-z0-9_.-]*\.jinja"
    r"|README\.md|(?i:LICEN[CS]E|NOTICE|USE_POLICY|COPYING|THIRD_PARTY_NOTICES)"
    r"(?:[-_][A-Za-z0-9]+)*(?:\.[0-9]+)*(?:\.(?:md|txt|rst|pdf))?"
)
_RESERVED = re.compile(r"(?i:con|prn|aux|nul|com\d|lpt\d)")  # names of devices on Windows, whatever the suffix
_KINDS = (
    (re.compile(r"(?i).*\.(?:py|pyc|pyd|pyi|so|dll|dylib|sh|ipynb|js|exe|bat|ps1)"), "code"),
    (re.compile(r"(?i).*\.(?:bin|pt|pth|ckpt|pkl|pickle|joblib|dill|npy|npz)"), "a torch file or pickle"),
    (re.compile(r"(?i).*\.(?:safetensors|safetensors\.index\.json|gguf|h5|msgpack|onnx|tflite)"), "other weights"),
)
# Keys that make a loader run a repository's code when it is trusted.
_CODE_KEYS = frozenset({"auto_map", "custom_pipelines", "trust_remote_code", "custom_generate"})
# Keys in which loaders record where a file lay.
_PATH_KEYS = frozenset(
    {"_name_or_path", "name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"}
)
# Keys under which old releases of transformers kept the Hub token of whoever downloaded the model, and others' names for one.
_TOKEN_KEY = re.compile(
    r"token|(?:use_|hub_|hf_|huggingface_|hugging_face_|hugging_face_hub_)?(?:auth|api|access|hub|hf|huggingface|bearer)_?(?:token|key)"
    r"|password|passwd|(?:client_|aws_)?secret(?:_access)?(?:_key)?|aws_session_token",
    re.IGNORECASE,
)
_SECRET = "a password or token"
_LOCAL = re.compile(r"[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[/\\]|[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Files that are carried, and why the others are not: name, or `NAME: KEY` for a key of a file -> reason."""

    files: Mapping[str, bytes]
    left_out: Mapping[str, str]


def is_carried(name: str) -> bool:
    """Whether a file of this name is carried with a model.

    >>> is_carried("LICENSE.txt"), is_carried("model.safetensors"), is_carried("modeling_llama.py"), is_carried("../LICENSE")
    (True, False, False, False)
    """
    base = name.rpartition("/")[2]
    return _CARRIED.fullmatch(name) is not None and _RESERVED.fullmatch(base.partition(".")[0]) is None


def why_left_out(name: str) -> str:
    """Why a file of this name is not carried."""
    return next((kind for pattern, kind in _KINDS if pattern.fullmatch(name)), "not a file that models are loaded with")


def carry(files: Mapping[str, bytes], where: str) -> Carried:
    """Choose among files, and remove the keys that name code or paths. DamagedError for settings that are not JSON."""
    chosen, left_out = _without_twins(files)
    result: dict[str, bytes] = {}
    for name in chosen:
        result[name], removed = _clean(name, files[name], where)
        left_out |= {f"{name}: {key}": reason for key, reason in removed.items()}
    return Carried(files=result, left_out=left_out)


def _without_twins(names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """The carried names, without those that are one file on a disk that ignores case; the others with the reason."""
    chosen: dict[str, str] = {}
    left_out = {}
    for name in sorted(names):
        if not is_carried(name):
            left_out[name] = why_left_out(name)
        elif name.lower() in chosen:
            left_out[name] = f"differs from {chosen[name.lower()]} in upper and lower case only"
        else:
            chosen[name.lower()] = name
    return list(chosen.values()), left_out


def _clean(name: str, data: bytes, where: str) -> tuple[bytes, dict[str, str]]:
    """A file without keys that name code or paths; the same bytes if it has none."""
    if name not in _SETTINGS:
        return data, {}
    cleaned, removed = clean_settings(JsonValue(parse_json(data, f"{where}/{name}"), f"{where}/{name}").free())
    if not removed:
        return data, {}
    text = json.dumps(cleaned, indent=2, sort_keys=name == CONFIG, ensure_ascii=False)
    return (text + "\n").encode(), removed


def clean_settings(content: Any) -> tuple[Any, dict[str, str]]:
    """Settings without keys that name code, a path of some machine or a password, at any depth; and what was removed.

    >>> clean_settings({"auto_map": {"AutoModel": "evil.Evil"}, "_name_or_path": "/home/me/model", "vocab_size": 7})
    ({'vocab_size': 7}, {'auto_map': 'names code', '_name_or_path': 'a path of another machine'})
    """
    removed: dict[str, str] = {}

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            kept_items = [item for item in value if not (isinstance(item, str) and is_credential(item))]
            if len(kept_items) < len(value):
                removed["an item of a list"] = _SECRET
            return [clean(item) for item in kept_items]
        if not isinstance(value, dict):
            return value
        kept = {}
        for key, inner in value.items():
            if key in _CODE_KEYS and inner:
                removed[key] = "names code"
            elif key in _PATH_KEYS and isinstance(inner, str) and _LOCAL.match(inner):
                removed[key] = "a path of another machine"
            elif isinstance(inner, str) and inner and (_TOKEN_KEY.fullmatch(key) or is_credential(inner)):
                removed[repr(key)] = _SECRET  # quoted: else the reason would be hidden as the value of a secret's name
            else:
                kept[key] = clean(inner)
        return kept

    return clean(content), removed


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
