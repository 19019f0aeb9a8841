"""Conversations from a seed: unicode, emoji, empty and long messages, tools, text that looks like special tokens."""

from __future__ import annotations

import random
from typing import Any

WORDS = (
    "hello", "world", "the", "a", "of", "naïve", "Größe", "日本語", "Привет", "مرحبا", "🙂", "🇩🇪", "e\u0301", "\u200b",
    "👩\u200d👩\u200d👧", "x = [1, 2]", "{'a': 1}", "{{ user }}", "{% if %}", "<b>", "&amp;", '"quoted"', "back\\slash", "\t",
    "\n", "\r\n", "\u2028", "<|im_end|>", "[INST]", "</s>", "1234567890", "don't", "𝔘𝔫𝔦", "\x00", "\ufeff",
)  # fmt: skip


def text(draw: random.Random, most: int = 12) -> str:
    """Words and others; sometimes nothing, sometimes with space around."""
    kind = draw.random()
    if kind < 0.05:
        return ""
    joined = draw.choice((" ", " ", " ", "", "\n")).join(draw.choices(WORDS, k=draw.randint(1, most)))
    return f"  {joined}\n " if kind < 0.15 else joined


def conversation(draw: random.Random, shape: str) -> dict[str, Any]:
    """A line of chat data that the template of this shape accepts."""
    if shape == "qwen" and draw.random() < 0.7:
        return with_tools(draw)
    messages: list[dict[str, Any]] = []
    if shape != "gemma" and draw.random() < 0.5:
        messages.append({"role": "system", "content": text(draw)})
    most = 200 if draw.random() < 0.03 else 12
    for _ in range(draw.randint(1, 5)):
        messages.append({"role": "user", "content": text(draw, most)})
        if shape in ("chatml", "llama3", "qwen") and draw.random() < 0.1:
            messages.append({"role": "system", "content": text(draw)})
        messages.append({"role": "assistant", "content": text(draw, most)})
    if draw.random() < 0.1:
        messages.append({"role": "user", "content": text(draw)})
    return {"id": draw.randint(0, 9), "messages": messages}


def with_tools(draw: random.Random) -> dict[str, Any]:
    names = [f"tool_{number}" for number in range(draw.randint(1, 3))]
    messages: list[dict[str, Any]] = [{"role": "user", "content": text(draw)}]
    for _ in range(draw.randint(1, 3)):
        calls = [
            {"id": str(number), "type": "function", "function": {"name": draw.choice(names), "arguments": _arguments(draw, 2)}}
            for number in range(draw.randint(1, 2))
        ]  # fmt: skip
        content = None if draw.random() < 0.5 else text(draw)
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": text(draw)} for call in calls]
    messages.append({"role": "assistant", "content": text(draw)})
    tools = [
        {"type": "function", "function": {"name": name, "description": text(draw), "parameters": _arguments(draw, 3)}}
        for name in names
    ]
    return {"messages": messages, "tools": tools}


def _arguments(draw: random.Random, depth: int) -> dict[str, Any]:
    values = [1, -2.5, True, None, [1, [2]], text(draw, 3)]
    found = {f"key {number} ü": draw.choice(values) for number in range(draw.randint(0, 3))}
    return found | ({"inner": _arguments(draw, depth - 1)} if depth else {})
