"""The README.md of an exported model: where it came from, what it is, how to load it. No clock, so that exports repeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_ckpt.console.units import format_size
from titan_ckpt.converters.models.spec import ModelSpec
from titan_ckpt.format.manifest import Manifest


def model_card(
    *, source: str, manifest: Manifest, spec: ModelSpec, dtype: str, num_parameters: int, size_bytes: int
) -> bytes:
    """The card; `source` is the checkpoint's URL without secrets."""
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
