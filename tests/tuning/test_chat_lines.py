"""Lines of chat data as other tools write them."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from titan_ckpt.trainer.data.chat_template import ChatTemplate
from titan_ckpt.trainer.data.conversations import Chat, LineProblem, parse_record

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
