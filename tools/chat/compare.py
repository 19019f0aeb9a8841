"""Compare ids and masks of chat data with transformers' `apply_chat_template`: python -m tools.chat.compare [COUNT] [SEED].

The reference renders the template with `{% generation %}`; ours is given that, and the same template without it.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from titan_ckpt.console.output import write_text
from titan_ckpt.trainer.data.chat_template import CONFIG_FILE, TEMPLATE_FILE, ChatTemplate, open_template
from titan_ckpt.trainer.data.chat_tokens import ChatRules, learned, render
from titan_ckpt.trainer.data.conversations import Chat, parse_record
from titan_ckpt.trainer.data.tokenizer import Tokenizer, open_tokenizer
from tools.chat.conversations import conversation, text
from tools.chat.templates import SPECIAL, TEMPLATES, without_generation

DAY = date(2024, 7, 26)


def write_tokenizer(folder: Path, template: str, *, vocab_size: int = 600) -> None:
    """A byte-level BPE trained on made-up text, with a chat template, as Hugging Face lays them out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    draw = random.Random(0)
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator((text(draw, 30) for _ in range(300)), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"}, "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    (folder / TEMPLATE_FILE).write_text(template)


def ours(record: dict[str, Any], template: ChatTemplate, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids and mask as the trainer makes them."""
    example = parse_record(record)
    assert isinstance(example, Chat)
    rules = ChatRules(kind="chat", plain=template, with_tools=template, last_only=False, today=str(DAY))
    rendered = render(example, rules, tokenizer.separator_text)
    ((ids, offsets),) = tokenizer.encode_with_offsets([rendered.text])
    return ids.tolist(), learned(offsets, rendered.spans).astype(int).tolist()


def count_differences(shape: str, count: int, seed: int, folder: Path) -> tuple[int, int]:
    """Tokens compared, and tokens that differ in id or mask, over `count` conversations."""
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(folder, TEMPLATES[shape])
    reference: Any = PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokenizer, (marked, _) = open_tokenizer(str(folder)), open_template(str(folder), today=DAY)
    plain = ChatTemplate(without_generation(TEMPLATES[shape]), marked.names, where=shape, today=DAY)
    compared = different = 0
    draw = random.Random(f"{shape} {seed}")
    for _ in range(count):
        record = conversation(draw, shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = reference.apply_chat_template(
                record["messages"], tools=record.get("tools"), return_dict=True, return_assistant_tokens_mask=True
            )
        theirs = (list(found["input_ids"]), list(found["assistant_masks"]))
        for template in (marked, plain):
            ids, mask = ours(record, template, tokenizer)
            compared += len(ids)
            different += abs(len(ids) - len(theirs[0]))
            pairs = zip(zip(ids, mask, strict=True), zip(*theirs, strict=True), strict=False)
            different += sum(a != b for a, b in pairs)
    return compared, different


def main() -> int:
    """All shapes; exit code 1 if a token differs."""
    count, seed = (int(value) for value in (*sys.argv[1:], "1000", "1")[:2]) if sys.argv[1:] else (1000, 1)
    total = 0
    for shape in TEMPLATES:
        with TemporaryDirectory() as folder:
            compared, different = count_differences(shape, count, seed, Path(folder))
        write_text(f"{shape:8}  {count} conversations, {compared:,} tokens compared, {different} differ")
        total += different
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
