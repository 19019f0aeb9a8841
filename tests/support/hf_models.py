"""Small Hugging Face models for tests, written by hand: no transformers, any dtype, any defect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_ckpt.converters.hf.config import spec_from_hf
from titan_ckpt.converters.hf.safetensors_header import encode_header
from titan_ckpt.converters.models.families import FAMILIES, expected_tensors

TEXT_BYTES = 4096
DENSE = [name for name, family in FAMILIES.items() if not family.router]
MIXTURES = [name for name, family in FAMILIES.items() if family.router]
STACKED = [name for name in MIXTURES if FAMILIES[name].experts[0]]  # files with a tensor for each expert
LATENT = [name for name in MIXTURES if name.startswith("deepseek")]


def config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json of a two-layer model; a change to None removes the key."""
    base = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "a_key_of_the_future": {"kept": True},
    }
    if family == "mistral":
        base["sliding_window"] = 64
    if FAMILIES[family].router:
        number, per_token, width = FAMILIES[family].expert_keys
        base |= {number: 4, per_token: 2, width: 24, "norm_topk_prob": family != "deepseek_v2"}
    if family in LATENT:
        base |= {
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
        }
        base |= {"v_head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
        del base["head_dim"]
    if family == "gpt_oss":
        base |= {"sliding_window": 64, "rope_scaling": {"rope_type": "default"}}
    changed = base | changes
    return {key: value for key, value in changed.items() if value is not None}


def tensors(of: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights of the model that a config describes."""
    generator = torch.Generator().manual_seed(seed)
    spec = spec_from_hf(of, "test")
    return {
        name: (torch.randn(shape, generator=generator) / 4 + (1.0 if name.endswith("norm.weight") else 0.0)).to(dtype)
        for name, shape in expected_tensors(spec).items()
    }


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor, whatever its dtype."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_safetensors(path: Path, content: Mapping[str, Tensor]) -> None:
    """A safetensors file of `content`, in the reference library's order."""
    ordered = dict(sorted(content.items(), key=lambda item: (-item[1].itemsize, item[0])))
    rows = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in ordered.items()]
    path.write_bytes(encode_header(rows, {"format": "pt"}) + b"".join(raw(tensor) for tensor in ordered.values()))


def write_model(
    folder: Path,
    of: Mapping[str, Any],
    content: Mapping[str, Tensor],
    *,
    num_files: int = 1,
    extra: Mapping[str, str] | None = None,
) -> Path:
    """A model folder; more than one file adds an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(of, indent=2))
    for name, text in (extra or {}).items():
        (folder / name).write_text(text)
    if num_files == 1:
        write_safetensors(folder / "model.safetensors", content)
        return folder
    names = list(content)
    weight_map: dict[str, str] = {}
    for n in range(num_files):
        file = f"model-{n + 1:05d}-of-{num_files:05d}.safetensors"
        share = names[n::num_files]
        write_safetensors(folder / file, {name: content[name] for name in share})
        weight_map |= dict.fromkeys(share, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
