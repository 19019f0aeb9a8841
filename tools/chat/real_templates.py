"""Compare ids and masks for the chat templates of real models, which TRL brings with it, with those of transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from titan_ckpt.trainer.data.chat_template import ChatTemplate, TemplateProblem, open_template
from titan_ckpt.trainer.data.tokenizer import Tokenizer, open_tokenizer
from tools.chat.compare import ours, write_tokenizer
from tools.chat.conversations import conversation, text, with_tools

UNTOLD = "differently once there are more"  # in the reason for which the trainer alone may refuse a conversation
Row = tuple[list[int], list[int]]  # ids and mask


@dataclass(slots=True)
class Outcome:
    """Conversations of all templates: compared token by token, refused by both, or by ours, which cannot tell the answers."""

    templates: int = 0
    compared: int = 0
    tokens: int = 0
    different: int = 0
    refused: int = 0
    untold: int = 0

    def __str__(self) -> str:
        return (
            f"{self.templates} templates of models: {self.compared:,} conversations, {self.tokens:,} tokens, "
            f"{self.different} differ; {self.refused} refused by both, {self.untold} by ours, as earlier messages change"
        )


def compare_real(count: int, seed: int) -> Outcome:
    """`count` conversations per template. One that a single side refuses for another reason counts as a difference."""
    import trl
    from transformers import PreTrainedTokenizerFast

    outcome = Outcome()
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        with TemporaryDirectory() as folder:
            write_tokenizer(Path(folder), path.read_text())
            reference: Any = PreTrainedTokenizerFast.from_pretrained(folder)
            template, _ = open_template(folder, today=date.today())  # the day that transformers tells templates
            tokenizer = open_tokenizer(folder)
            for record in conversations(random.Random(f"{path.stem} {seed}"), count):
                add(outcome, _theirs(record, reference, template), _ours(record, template, tokenizer), template)
        outcome.templates += 1
    return outcome


def conversations(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """With and without a system message, tools and reasoning, in turn."""
    for number in range(count):
        match number % 4:
            case 0:
                yield conversation(draw, "mistral")
            case 1:
                yield with_tools(draw)
            case 2:
                record = conversation(draw, "gemma")
                for message in record["messages"]:
                    message["reasoning_content"] = text(draw) if message["role"] == "assistant" else None
                yield record
            case _:
                yield conversation(draw, "qwen")


def add(outcome: Outcome, theirs: Row | Exception, mine: Row | Exception, template: ChatTemplate) -> None:
    """Count one conversation."""
    if isinstance(theirs, Exception) and isinstance(mine, Exception):
        outcome.refused += 1
    elif isinstance(mine, Exception) and UNTOLD in str(mine):
        outcome.untold += 1
    elif isinstance(theirs, Exception) or isinstance(mine, Exception):
        outcome.different += 1
    else:
        masks = (theirs[1], mine[1]) if template.has_generation else (theirs[0], mine[0])
        outcome.compared += 1
        outcome.tokens += len(mine[0])
        outcome.different += abs(len(theirs[0]) - len(mine[0]))
        pairs = zip(zip(theirs[0], masks[0], strict=True), zip(mine[0], masks[1], strict=True), strict=False)
        outcome.different += sum(a != b for a, b in pairs)


def _theirs(record: dict[str, Any], reference: Any, template: ChatTemplate) -> Row | Exception:
    try:
        found = reference.apply_chat_template(
            record["messages"], tools=record.get("tools"), return_dict=True,
            return_assistant_tokens_mask=template.has_generation,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - whatever a template raises
        return error
    return list(found["input_ids"]), list(found["assistant_masks"]) if template.has_generation else []


def _ours(record: dict[str, Any], template: ChatTemplate, tokenizer: Tokenizer) -> Row | Exception:
    try:
        return ours(record, template, tokenizer)
    except TemplateProblem as problem:
        return problem
