"""Families of models that others wrote: safetensors headers, files of `torch.save`, Hugging Face JSON, tokenizers, chat data."""

from __future__ import annotations

import io
import json
import random
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.converters.hf.assets import complete
from titan_ckpt.converters.hf.config import hf_config, parse_config, spec_from_hf
from titan_ckpt.converters.hf.folder import open_hf
from titan_ckpt.converters.hf.peft_adapter import open_adapter
from titan_ckpt.converters.hf.safetensors_header import LENGTH_BYTES, encode_header, read_header
from titan_ckpt.converters.models.families import FAMILIES as MODELS
from titan_ckpt.converters.models.families import expected_tensors
from titan_ckpt.converters.torch_file import _read as read_torch_file
from titan_ckpt.errors import DataError, TitanError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.parsing.values import decode_value
from titan_ckpt.sharding.placement import Box
from titan_ckpt.trainer.data.chat_template import ChatTemplate
from titan_ckpt.trainer.data.chat_tokens import ChatRules, _encode, _Seen
from titan_ckpt.trainer.data.corpus import DocumentReader, File
from titan_ckpt.trainer.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from tools.chat.conversations import with_tools
from tools.chat.templates import CHATML, QWEN, without_generation
from tools.fuzz.checkpoints import mutate_archive
from tools.fuzz.family import Family
from tools.fuzz.memory_store import MemoryStore
from tools.fuzz.mutate import mutate_bytes, mutate_json, mutate_pickle
from tools.zoo.animals import Settings
from tools.zoo.kinds import LEAVES

SPEC = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32", "another_key": {"kept": True},
}  # fmt: skip


def _headers() -> list[bytes]:
    rows = [("a.weight", "float32", (2, 3)), ("b", "bfloat16", (4,)), ("c", "int64", ())]
    size = sum(Box.whole(shape).num_elements * ELEMENT_SIZE[dtype] for _, dtype, shape in rows)
    return [encode_header(rows, {"format": "pt"}) + bytes(size), encode_header([], {})]


def mutate_header(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change the JSON of a safetensors file, its length mostly made to fit."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, data, others)
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    text = mutate_json(rng, data[LENGTH_BYTES:][:length], [other[LENGTH_BYTES:].rstrip(b"\0") for other in others])
    if rng.random() < 0.05:
        text = b'{"a":' + b'{"x":1},"a":' * 20_000 + b"1}"
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + data[LENGTH_BYTES + length :]


def _read_header(data: bytes) -> None:
    read_header(MemoryStore({"model.safetensors": data}), "model.safetensors")


def _torch_files() -> list[bytes]:
    weight = torch.arange(12.0).reshape(3, 4)
    states = [
        {"w": weight, "half": weight[0], "n": 3, "nested": {"list": [1, 2.5, "x"], "t": weight.to(torch.bfloat16)}},
        {"stride": torch.zeros(1).expand(1 << 20), "tied": weight, "again": weight},
        {"param": torch.nn.Parameter(weight), "step": torch.tensor(3), "b": torch.zeros(4, dtype=torch.bool)},
    ]
    found = []
    for state in states:
        for is_zip in (True, False):
            out = io.BytesIO()
            torch.save(state, out, _use_new_zipfile_serialization=is_zip)
            found.append(out.getvalue())
    return found


def mutate_torch(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change an archive, or the pickles of the format before it."""
    return (mutate_archive if data.startswith(b"PK") else mutate_pickle)(rng, data, others)


_SCRATCH = Path(tempfile.mkdtemp(prefix="fuzz-torch-"))


def _read_torch(data: bytes) -> None:
    path = _SCRATCH / "state.pt"
    path.write_bytes(data)
    read_torch_file(str(path))


def _values() -> list[bytes]:
    """What DCP writes for each leaf of the zoo that torch can pickle, all of them in one list, and one that shares its parts."""
    leaves = [leaf for name, leaf in LEAVES.items() if name not in ("lambda", "class")]
    return [_saved(value) for value in (*leaves, [leaves, (leaves,)], {"a": leaves[:9], ("b", 1): [leaves[:9]] * 2})]


def _saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _read_value(data: bytes) -> None:
    decode_value(data, where="memory://fuzz/value", allowed={"tools.zoo.animals.Settings": Settings})


def _models() -> list[bytes]:
    """One document per case: the JSON files of a folder by name."""
    found = []
    for name, family in MODELS.items():
        config = SPEC | {"architectures": [family.architecture], "model_type": name}
        if family.router:
            config |= dict(zip(family.expert_keys, (4, 2, 24), strict=True)) | {"norm_topk_prob": True}
        found.append({"config.json": config})
    llama = found[0]["config.json"]
    names = list(expected_tensors(spec_from_hf(llama, "")))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    adapter = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "bias": "none",
        "use_rslora": True,
    }
    scaled = llama | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                       "original_max_position_embeddings": 64}}  # fmt: skip
    found += [{"config.json": llama, "model.safetensors.index.json": index}, {"config.json": scaled}]
    found += [
        {"config.json": llama, "adapter_config.json": adapter},
        {"config.json": llama, "generation_config.json": {"eos_token_id": 2, "temperature": 0.5, "do_sample": True}},
        {"config.json": llama, "tokenizer_config.json": {"eos_token": "</s>", "auto_map": {"AutoTokenizer": "x.y"}}},
    ]
    return [json.dumps(case).encode() for case in found]


def _weights() -> bytes:
    rows = [(name, "float32", shape) for name, shape in _EXPECTED.items()]
    return encode_header(rows, {}) + bytes(sum(4 * Box.whole(shape).num_elements for _, _, shape in rows))


_EXPECTED = expected_tensors(
    spec_from_hf(SPEC | {"architectures": [MODELS["llama"].architecture], "model_type": "llama"}, "")
)
_WEIGHTS = _weights()
_ADAPTER = encode_header(
    [("base_model.model.x.lora_A.weight", "float32", (2, 4)), ("base_model.model.x.lora_B.weight", "float32", (4, 2))],
    {},
) + bytes(64)


def _read_model(data: bytes) -> None:
    try:
        case = json.loads(data)
        files = {str(name): json.dumps(content).encode() for name, content in case.items()}
    except (ValueError, AttributeError, RecursionError):
        files = {"config.json": data}
    with suppress(TitanError):
        config = parse_config(files.get("config.json", b""), "config.json")
        hf_config(spec_from_hf(config, "config.json"), base=config, dtype="bfloat16")
    weights = "model-00001-of-00001.safetensors" if "model.safetensors.index.json" in files else "model.safetensors"
    store = MemoryStore({**files, weights: _WEIGHTS, "adapter_model.safetensors": _ADAPTER})
    with suppress(TitanError):
        model = open_hf("memory://fuzz", store=store)
        complete(model.assets, model.spec, "memory://fuzz")
    if "adapter_config.json" in files:
        with tempfile.TemporaryDirectory(dir=_SCRATCH) as folder:
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                (Path(folder) / name).write_bytes(store.read(name))
            open_adapter(folder)


def _tokenizers() -> list[bytes]:
    small = json.loads(ByteTokenizer().to_json())
    kept = {letter: number for letter, number in small["model"]["vocab"].items() if number < 8 or number == 256}
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2, "</s>": 3}, "unk_token": "[UNK]"}
    bpe = small["model"] | {"vocab": kept | {"ab": 9, "a": 10, "b": 11}, "merges": [["a", "b"]]}
    return [json.dumps(small | {"model": model}).encode() for model in (bpe, words, bpe | {"merges": ["a b"]})]


def _read_tokenizer(data: bytes) -> None:
    spec = spec_from_hf(SPEC | {"architectures": [MODELS["llama"].architecture], "model_type": "llama"}, "")
    with suppress(TitanError):
        complete({"tokenizer.json": data}, spec, "memory://fuzz")
    tokenizer = HuggingFaceTokenizer(data, where="memory://fuzz/tokenizer.json")
    tokenizer.encode([b"a b ab \xff"])
    tokenizer.decode([0, 1])


_DAY = date(2024, 7, 26)
_TEMPLATES = [ChatTemplate(source, {}, where="t", today=_DAY) for source in (QWEN, without_generation(CHATML), CHATML)]


def _chat_lines() -> list[bytes]:
    draw = random.Random(1)
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
    other = {"role": "assistant", "content": [{"type": "text", "text": "no"}], "weight": 1, "reasoning": "so"}
    records: list[Any] = [
        min((with_tools(draw) for _ in range(20)), key=lambda made: len(str(made))),
        {"messages": [user, {**answer, "tool_calls": []}]},
        {"messages": [user, {**answer, "weight": 0}, user, answer], "system": "s"},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo", "train": 1}]},
        {"prompt": "hi", "completion": "yo"}, {"prompt": [user], "completion": [answer], "tools": "[]", "label": True},
        {"prompt": [user], "chosen": [answer], "rejected": [other], "chat_template_kwargs": {"a": 1}},
        {"prompt": "hi", "chosen": [user, answer], "rejected": [user, other]}, {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]  # fmt: skip
    return [json.dumps(record).encode() for record in records]


def _read_chat(data: bytes) -> None:
    file = File(store=MemoryStore({"a.jsonl": data}), path="a.jsonl", size_bytes=len(data), version="")
    for number, template in enumerate(_TEMPLATES):
        rules = ChatRules(
            kind="pairs" if number == 2 else "chat",
            plain=template,
            with_tools=template,
            last_only=False,
            today=str(_DAY),
        )
        with suppress(DataError):
            deque(_encode([file], ByteTokenizer(), rules, DocumentReader(bad_line="stop"), _Seen()), maxlen=0)


FAMILIES: dict[str, Family] = {
    found.name: found
    for found in (
        Family(name="safetensors", seeds=_headers, mutate=mutate_header, read=_read_header),
        Family(
            name="torch_file",
            seeds=_torch_files,
            mutate=mutate_torch,
            read=_read_torch,
            bound=lambda n: (64 << 20) + 64 * n,
        ),
        Family(name="value", seeds=_values, mutate=mutate_torch, read=_read_value, bound=lambda n: (64 << 20) + 64 * n),
        Family(name="hugging_face", seeds=_models, mutate=mutate_json, read=_read_model),
        Family(name="tokenizer", seeds=_tokenizers, mutate=mutate_json, read=_read_tokenizer),
        Family(name="chat", seeds=_chat_lines, mutate=mutate_json, read=_read_chat),
    )
}
