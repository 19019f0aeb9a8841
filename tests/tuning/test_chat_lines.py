"""Lines of chat data as other tools write them."""

from __future__ import annotations

import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.trainer.config.chat import ChatConfig
from titan_ckpt.trainer.config.train_config import DataConfig
from titan_ckpt.trainer.config.validation import ValidationConfig
from titan_ckpt.trainer.data.batches import open_dataset
from titan_ckpt.trainer.data.chat_source import ChatSource
from titan_ckpt.trainer.data.chat_template import ChatTemplate
from titan_ckpt.trainer.data.conversations import Chat, LineProblem, parse_record
from titan_ckpt.trainer.data.tokenizer import open_tokenizer

USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


def test_a_prompt_of_text_may_repeat_the_first_message() -> None:
    """As in HuggingFaceH4/ultrafeedback_binarized; TRL leaves it out too."""
    system = {"role": "system", "content": "s"}
    for before in ([USER], [system, USER]):
        implicit = {"chosen": [*before, ANSWER], "rejected": [*before, {**ANSWER, "content": "no"}]}
        assert parse_record(implicit | {"prompt": USER["content"]}) == parse_record(implicit)
    with pytest.raises(LineProblem, match="or the text of the first of them; found 'another'"):
        parse_record({"chosen": [USER, ANSWER], "rejected": [USER], "prompt": "another"})


def test_keys_that_are_null_are_left_out_as_in_transformers() -> None:
    """Else templates write "None", or fail on what they look for with `is defined`."""
    source = (
        "{% for m in messages %}[{{ m.content }}{% if m.name is defined %}!{% endif %}{{ m.thinking }}]{% endfor %}"
    )
    template = ChatTemplate(source, {}, where="t.jinja", today=date(2024, 7, 26))
    lines: list[dict[str, Any]] = [
        USER | {"name": None, "thinking": None, "reasoning": "so"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": None}, ANSWER | {"tool_calls": None},
    ]  # fmt: skip
    example = parse_record({"messages": lines})
    assert isinstance(example, Chat)
    assert template.render(example.messages) == "[1+1?so][][][2]"


PROMPTED = {"prompt": "1+1?", "completion": "2"}
PAIR = {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "no"}]}
TURNS = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"messages": [USER, ANSWER], **PROMPTED}, "has both messages and completion, which are two examples"),
        ({"conversations": TURNS, **PROMPTED}, "has both conversations and completion"),
        ({**PAIR, "completion": "2"}, "has both completion and chosen"),
        ({**PAIR, "messages": [USER]}, "has both messages and chosen"),
        ({"messages": [USER, {**ANSWER, "content": "3"}], "conversations": TURNS}, "has both messages and conversations"),
        ({"messages": [USER, ANSWER], "weight": math.nan}, "weight nan: a line has none; give it to answers, as 0 or 1"),
        ({**PROMPTED, "weight": 0.5}, "weight 0.5: a line has none"),
        ({"messages": [USER, ANSWER], "train": False}, "train False: a line has none"),
    ],
)  # fmt: skip
def test_a_line_that_says_two_things_is_refused(line: dict[str, Any], problem: str) -> None:
    with pytest.raises(LineProblem, match=problem):
        parse_record(line)


def test_a_line_may_say_the_same_again() -> None:
    """As ultrafeedback_binarized, whose `messages` are the chosen ones; columns that are null say nothing."""
    for more in ({"messages": PAIR["chosen"]}, {"messages": None}, {"completion": None, "weight": None}):
        line = {**PAIR, **more}
        assert parse_record(line) == parse_record(PAIR)
    once = {"messages": [USER, ANSWER]}
    assert parse_record({**once, "conversations": TURNS, "weight": 1}) == parse_record(once)
    prompted = {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "no"}]}
    assert parse_record({**prompted, "messages": [USER, ANSWER]}) == parse_record(prompted)


@pytest.mark.parametrize(("too_long", "learned", "tokens"), [("skip", 2, 5), ("cut_right", 6, 13), ("cut_left", 9, 13)])
def test_counts_are_of_what_is_learned_from(too_long: Any, learned: int, tokens: int, tmp_path: Path) -> None:
    """Two of five bytes; of the long line eight are left, of which the prompt and the first have no label."""
    lines = [{"prompt": "a?x", "completion": "bc"}, {"prompt": "long", "completion": "b" * 20}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "any.jinja").write_text("{{ messages }}")
    data = DataConfig(source=str(tmp_path / "chat.jsonl"), format="chat", seq_len=8, cache=str(tmp_path / "cache"))
    chat = ChatConfig(too_long=too_long, template=str(tmp_path / "any.jinja"))
    found = open_dataset(data, ValidationConfig(), open_tokenizer("bytes"), seed=0, is_writer=True, chat=chat)
    source = found.sources[0]
    assert isinstance(source, ChatSource)
    labels = sum(int((source.sample(i)["labels"] != -100).sum()) for i in range(len(source)))
    assert labels == learned
    assert f"; {learned} of {tokens} tokens are learned" in source.describe()
