"""The small files that are carried with a model. Everything else in a folder is left out, and said.

An allow-list: tokenizer, generation settings, chat templates, licence and model card. Code is never carried, nor are settings
that make a loader run code (`auto_map`) or that tell where on a machine the model lay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt.errors import DamagedError

CONFIG = "config.json"
README = "README.md"
_SETTINGS = (CONFIG, "generation_config.json", "tokenizer_config.json")
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
    try:
        content = json.loads(data)
        cleaned, removed = clean_settings(content)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where}/{name}: not JSON: {error}") from error
    if not removed:
        return data, {}
    text = json.dumps(cleaned, indent=2, sort_keys=name == CONFIG, ensure_ascii=False)
    return (text + "\n").encode(errors="surrogatepass"), removed


def clean_settings(content: Any) -> tuple[Any, dict[str, str]]:
    """Settings without keys that name code, at any depth, or a path of some machine; and what was removed.

    >>> clean_settings({"auto_map": {"AutoModel": "evil.Evil"}, "_name_or_path": "/home/me/model", "vocab_size": 7})
    ({'vocab_size': 7}, {'auto_map': 'names code', '_name_or_path': 'a path of another machine'})
    """
    removed: dict[str, str] = {}

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(item) for item in value]
        if not isinstance(value, dict):
            return value
        kept = {}
        for key, inner in value.items():
            if key in _CODE_KEYS and inner:
                removed[key] = "names code"
            elif key in _PATH_KEYS and isinstance(inner, str) and _LOCAL.match(inner):
                removed[key] = "a path of another machine"
            else:
                kept[key] = clean(inner)
        return kept

    return clean(content), removed
