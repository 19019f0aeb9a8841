"""Compare the trainer's logits with transformers', as JSON: `python -m scripts.demo_logits RUN HF_FOLDER NUM_TOKENS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import titan_ckpt
from titan_ckpt.trainer.config.toml_records import build_record
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.model.decoder import Decoder

PROMPT = "def __init__(self"


def compare(url: str, folder: str, num_tokens: int) -> dict[str, Any]:
    """Largest difference of float32 logits, and what transformers' model writes after PROMPT."""
    checkpoint = titan_ckpt.open_checkpoint(url)
    ours = Decoder(build_record(TrainConfig, checkpoint.manifest.config, {}).model)
    ours.eval()
    titan_ckpt.load(checkpoint, {"model": ours.state_dict()})
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    text = Path(json.__file__).read_text()
    ids_BS = tokenizer(text, return_tensors="pt")["input_ids"][:, :num_tokens]
    start_BS = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        largest = float((ours(ids_BS) - theirs(ids_BS).logits).abs().max())
        written = theirs.generate(start_BS, max_new_tokens=48, do_sample=False, pad_token_id=0)
    return {
        "tokens": ids_BS.shape[1],
        "max_logit_difference": largest,
        "text": tokenizer.decode(written[0, start_BS.shape[1] :]),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compare(sys.argv[1], sys.argv[2], int(sys.argv[3]))) + "\n")
