"""Compare the trainer's logits with transformers', as JSON: `python -m titan_ckpt.demo.exported RUN HF_FOLDER TEXT PROMPT`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.console.output import write_json
from titan_ckpt.loading.load import load
from titan_ckpt.trainer.config.toml_records import build_record
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.model.decoder import Decoder

NUM_TOKENS, NUM_WRITTEN = 512, 48


def compare(url: str, folder: str, text: str, prompt: str) -> dict[str, Any]:
    """Largest difference of float32 logits over `text`, and what transformers' model writes after `prompt`."""
    checkpoint = open_checkpoint(url)
    ours = Decoder(build_record(TrainConfig, checkpoint.manifest.config, {}).model)
    ours.eval()
    load(checkpoint, {"model": ours.state_dict()})
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ids_BS = tokenizer(text, return_tensors="pt")["input_ids"][:, :NUM_TOKENS]
    start_BS = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        largest = float((ours(ids_BS) - theirs(ids_BS).logits).abs().max())
        written = theirs.generate(start_BS, max_new_tokens=NUM_WRITTEN, do_sample=False, pad_token_id=0)
    return {
        "tokens": ids_BS.shape[1],
        "max_logit_difference": largest,
        "prompt": prompt,
        "text": _whole_sentences(tokenizer.decode(written[0, start_BS.shape[1] :])),
    }


def _whole_sentences(text: str) -> str:
    """Without a last sentence that was cut; the text as it is if it has no end of a sentence."""
    return text[: text.rfind(".") + 1] or text


if __name__ == "__main__":
    write_json(compare(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_text(encoding="utf-8"), sys.argv[4]))
