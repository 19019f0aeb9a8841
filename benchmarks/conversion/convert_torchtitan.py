"""Compare our conversion, byte for byte in both directions, with torchtitan's own Hugging Face adapter.

pip install torchtitan==0.3.0 'titan-ckpt[hf]'      # no accelerator needed: tensors are only stored and renamed
python -m benchmarks.conversion.convert_torchtitan

For each model: torchtitan builds and initialises it, plain DCP saves it, we export it; the file must equal the output
of torchtitan's adapter for that state dict. Then we import the file for torchtitan, and plain DCP loads it back into
the model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.report import Measurement, write_section

MODELS = (("llama3", "debugmodel"), ("qwen3", "debugmodel"), ("qwen3", "debugmodel_non_fused_qkv"))
FAMILY = {"llama3": "llama", "qwen3": "qwen3"}


def build(name: str, flavor: str) -> tuple[Any, Any, Any]:
    """torchtitan's model with random weights, its config, and its adapter."""
    import torch

    spec = import_module(f"torchtitan.models.{name}").model_registry(flavor)
    torch.manual_seed(0)
    model = spec.model.build()
    model.init_states(buffer_device=None)
    return model, spec.model, spec.state_dict_adapter(spec.model, None)


def config_of(name: str, model_config: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The config.json that comes with the initial weights."""
    from titan_ckpt.converters.models.families import FAMILIES

    attention = model_config.layers[0].attention
    head_dim = attention.head_dim or model_config.dim // attention.n_heads
    return {
        "architectures": [FAMILIES[FAMILY[name]].architecture],
        "model_type": FAMILY[name],
        "vocab_size": model_config.vocab_size,
        "hidden_size": model_config.dim,
        "intermediate_size": state["layers.0.feed_forward.w1.weight"].shape[0],
        "num_hidden_layers": len(model_config.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": model_config.enable_weight_tying,
    }


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Names that are on one side only, or whose bytes, shape or dtype differ."""
    import torch

    names = sorted({*expected, *found})
    return [n for n in names if n not in expected or n not in found or not torch.equal(expected[n], found[n])]


def check(folder: Path, name: str, flavor: str) -> list[Measurement]:
    """Export and re-import one model."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    from titan_ckpt.converters import export_hf, import_hf

    model, model_config, adapter = build(name, flavor)
    state = model.state_dict()
    dcp.save(state, checkpoint_id=str(folder / "titan" / "step-10"))
    config = config_of(name, model_config, state)
    export_hf(str(folder / "titan" / "step-10"), str(folder / "hf"), config=config)
    theirs = adapter.to_hf(dict(state))
    out = differences(theirs, load_file(folder / "hf" / "model.safetensors"))
    import_hf(str(folder / "hf"), str(folder / "back"), layout="torchtitan-qkv")
    loaded = {fqn: torch.full_like(tensor, -1) for fqn, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=str(folder / "back" / "step-00000000"))
    back = differences(state, loaded)
    model.load_state_dict(loaded)
    kind = type(model.layers["0"].attention.qkv_linear).__name__
    return [
        Measurement(
            what=f"{name} {flavor} ({kind}): export differs from torchtitan's adapter",
            figure=f"{len(out)} of {len(theirs)} tensors",
            bar="0",
            holds=not out,
        ),
        Measurement(
            what=f"{name} {flavor}: differs after the import, read by plain dcp.load",
            figure=f"{len(back)} of {len(state)} tensors",
            bar="0",
            holds=not back,
        ),
    ]


def main() -> None:
    """Check every model and write the section."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if importlib.util.find_spec("torchtitan") is None:
        sys.exit("torchtitan is not installed: pip install torchtitan==0.3.0")
    bars: list[Measurement] = []
    with tempfile.TemporaryDirectory() as name:
        for number, (model, flavor) in enumerate(MODELS):
            bars += check(Path(name) / str(number), model, flavor)
    version = importlib.metadata.version("torchtitan")
    write_section("convert torchtitan", f"torchtitan {version}'s own checkpoints, there and back", bars)


if __name__ == "__main__":
    main()
