"""Lines of chat data: conversations, prompts with completions, and pairs of a chosen and a rejected answer.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}
    {"prompt": "...", "completion": "..."}              or both as lists of messages
    {"prompt": [...], "chosen": [...], "rejected": [...]}          `prompt` may also be the common start of the two
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}

These are the formats of TRL and the Hugging Face hub (the last is ShareGPT's). Beside them, `system` is the first message of a
conversation, and an answer with `weight` 0 (OpenAI) or `train` false (Axolotl) is part of the prompt. What else would change the
meaning of a line, and is not done, is refused: images, the unwanted answers of unpaired preferences, `functions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from titan_ckpt.parsing.json_values import parse_json_line, show
from titan_ckpt.trainer.data.chat_template import Message

SHARE_GPT_ROLES = {
    "human": "user", "gpt": "assistant", "system": "system", "tool": "tool", "function_call": "assistant", "user": "user",
    "assistant": "assistant", "chatgpt": "assistant", "observation": "tool",
}  # fmt: skip
WEIGHTS = ("weight", "train", "training")  # of a message: whether it is learned
MEDIA = ("image", "images", "video", "videos", "audio", "audios")


class LineProblem(ValueError):  # noqa: N818 - a line's, which becomes an error or is skipped
    """Why a line is no example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation. `first` is the number of messages that are the prompt: answers among them are not learned."""

    messages: tuple[Message, ...]
    first: int = 0
    tools: tuple[Any, ...] | None = None
    names: Mapping[str, Any] = field(default_factory=dict)  # further values for the template


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Text of which `completion` is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one prompt."""

    chosen: Chat | Plain
    rejected: Chat | Plain


def parse_record(record: Any) -> Chat | Plain | Pair:
    """The example that a line or row holds; LineProblem says what is wrong with it."""
    if not isinstance(record, dict):
        raise LineProblem(f"expected an object, found {type(record).__name__}")
    _check_others(record)
    _check_one_form(record)
    if "chosen" in record or "rejected" in record:
        return _pair(_answered(record, "chosen"), _answered(record, "rejected"))
    if "completion" in record:
        return _answered(record, "completion")
    if "messages" in record:
        return _with_answer(_chat(record, _messages(record["messages"], "messages"), 0))
    if "conversations" in record:
        return _with_answer(_chat(record, _messages(_from_share_gpt(record["conversations"]), "conversations"), 0))
    raise LineProblem(
        f"expected messages, conversations, prompt and completion, or chosen and rejected; found {show(list(record))}"
    )


def _check_others(record: Mapping[str, Any]) -> None:
    """Refuse keys that would change what the line means, if they were left out."""
    if media := [key for key in MEDIA if record.get(key)]:
        raise LineProblem(f"{media[0]}: found {show(record[media[0]])}, but only text can be learned from")
    if record.get("label") is False:
        raise LineProblem(
            "label is false: an answer that is not wanted (an unpaired preference), which would be learned"
        )
    if record.get("functions") and not record.get("tools"):
        raise LineProblem("functions: the older name of tools; write them as tools, which templates know")
    for key in WEIGHTS:
        if record.get(key) not in (None, 1):
            raise LineProblem(f"{key} {show(record[key])}: a line has none; give it to answers, as 0 or 1")


def _check_one_form(record: Mapping[str, Any]) -> None:
    """Refuse a line of two forms, unless one says again what the other does."""
    forms = {
        "messages": record.get("messages"), "conversations": _from_share_gpt(record.get("conversations")),
        "completion": record.get("completion"), "chosen": record.get("chosen") or record.get("rejected"),
    }  # fmt: skip
    given = [name for name, value in forms.items() if value]
    whole, before = forms["messages"], record.get("prompt")
    repeats = (
        forms["conversations"],
        forms["chosen"],
        *(before + x for x in (forms["chosen"],) if _are_lists(before, x)),
    )
    is_again = len(given) == 2 and "completion" not in given and whole in repeats
    if len(given) > 1 and not is_again:
        raise LineProblem(f"has both {given[0]} and {given[1]}, which are two examples; leave one of them out")


def _are_lists(*values: Any) -> bool:
    return all(isinstance(value, list) for value in values)


def _answered(record: Mapping[str, Any], key: str) -> Chat | Plain:
    """`prompt` with the answer in `key`."""
    prompt, answer = record.get("prompt"), record.get(key)
    if isinstance(answer, str) and isinstance(prompt, str):
        if not answer:
            raise LineProblem(f"{key} is empty, so there is nothing to learn")
        if record.get("system"):
            raise LineProblem("system: beside a prompt of text there is no template for it; write it into the prompt")
        return Plain(prompt=prompt, completion=answer)
    if not isinstance(answer, list):
        raise LineProblem(f"{key}: expected a list of messages, or text after a prompt of text; found {show(answer)}")
    if isinstance(prompt, str) and _begins_with(answer, prompt):
        prompt = None  # said twice
    if prompt is not None and not isinstance(prompt, list):
        raise LineProblem(
            f"prompt: expected a list of messages, as {key} is, or the text of the first of them; found {show(prompt)}"
        )
    before = _messages(prompt, "prompt") if prompt else ()
    messages = before + _messages(answer, key)
    return _with_answer(_chat(record, messages, len(before)))


def _begins_with(messages: list[Any], prompt: str) -> bool:
    """Whether a list of messages begins with this text of the user, after a system message or not."""
    first = next((m for m in messages if isinstance(m, dict) and m.get("role") != "system"), {})
    return first.get("role") == "user" and first.get("content") == prompt


def _pair(chosen: Chat | Plain, rejected: Chat | Plain) -> Pair:
    """The pair; the prompt of conversations without one is what they begin with in common."""
    if chosen == rejected:
        raise LineProblem("chosen and rejected are the same")
    if isinstance(chosen, Plain) or isinstance(rejected, Plain):
        if type(chosen) is not type(rejected):
            raise LineProblem("one of chosen and rejected is text, the other a list of messages")
        return Pair(chosen=chosen, rejected=rejected)
    pairs = list(zip(chosen.messages, rejected.messages, strict=False))
    common = next((number for number, (a, b) in enumerate(pairs) if a != b), len(pairs))
    first = max(common, chosen.first)
    return Pair(
        chosen=_with_answer(replace(chosen, first=first)), rejected=_with_answer(replace(rejected, first=first))
    )


def _chat(record: Mapping[str, Any], messages: tuple[Message, ...], first: int) -> Chat:
    tools, names = record.get("tools"), record.get("chat_template_kwargs") or {}
    if isinstance(
        tools, str
    ):  # a column of a data set has one type, so lists of different objects are often text there
        try:
            tools = parse_json_line(tools) if tools.strip() else None
        except ValueError as error:
            raise LineProblem(f"tools: not JSON ({error})") from error
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise LineProblem(f"tools: expected a list of objects, found {show(tools)}")
    if not isinstance(names, dict):
        raise LineProblem(f"chat_template_kwargs: expected an object, found {show(names)}")
    if system := _system(record, messages):
        messages, first = (system, *messages), first + 1 if first else 0
    return Chat(messages=messages, first=first, tools=tuple(tools) if tools else None, names=names)


def _system(record: Mapping[str, Any], messages: tuple[Message, ...]) -> Message | None:
    """The message that the key `system` of a line is, unless it is there already."""
    text = record.get("system")
    if not text:
        return None
    if not isinstance(text, str):
        raise LineProblem(f"system: expected text, found {show(text)}")
    if messages[0]["role"] != "system":
        return {"role": "system", "content": text}
    if messages[0].get("content") != text:
        raise LineProblem("system: the first message is another system message; leave out one of them")
    return None


def _with_answer(chat: Chat) -> Chat:
    answers = [message for message in chat.messages[chat.first :] if message["role"] == "assistant"]
    if not any(map(is_learned, answers)):
        what = ", all of which have weight 0" if answers else ""
        raise LineProblem(f"no message of the assistant{what}, so there is nothing to learn")
    return chat


def is_learned(message: Message) -> bool:
    """Whether a message is an answer that its line does not leave out."""
    return message.get("role") == "assistant" and all(message.get(key) in (None, 1) for key in WEIGHTS)


def _check_weight(message: Mapping[str, Any], where: str) -> None:
    for key in WEIGHTS:
        value = message.get(key)
        if value not in (None, 0, 1):
            raise LineProblem(f"{where}: {key} {show(value)}: expected 0 or 1")
        if value and message["role"] != "assistant":
            raise LineProblem(f"{where}: {key} {show(value)} of role {message['role']}: answers alone are learned")


def _messages(found: Any, key: str) -> tuple[Message, ...]:
    if not isinstance(found, list) or not found:
        raise LineProblem(f"{key}: expected a list of messages, found {show(found)}")
    for number, message in enumerate(found):
        where = f"{key}[{number}]"
        if not isinstance(message, dict):
            raise LineProblem(f"{where}: expected an object, found {show(message)}")
        if not isinstance(message.get("role"), str):
            raise LineProblem(f"{where}: expected a role of text, found {show(message.get('role'))}")
        _check_content(message, where)
        _check_weight(message, where)
    return tuple(found)


def _check_content(message: Mapping[str, Any], where: str) -> None:
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise LineProblem(f"{where}: tool_calls: expected a list of objects, found {show(calls)}")
    if content is None and not calls and message["role"] != "tool":
        what = (
            "answer has neither content nor tool_calls" if message["role"] == "assistant" else "message has no content"
        )
        raise LineProblem(f"{where}: the {what}")
    if isinstance(content, list):
        wrong = [part for part in content if not isinstance(part, dict) or not isinstance(part.get("text", ""), str)]
        others = [part.get("type") for part in content if isinstance(part, dict) and part.get("type") != "text"]
        if wrong or others:
            raise LineProblem(f"{where}: content has parts that are no text: {show(wrong or others)}")
    elif content is not None and not isinstance(content, str):
        raise LineProblem(f"{where}: expected content of text, found {show(content)}")


def _from_share_gpt(found: Any) -> Any:
    if not isinstance(found, list) or not all(isinstance(turn, dict) for turn in found):
        return found
    if all("role" in turn for turn in found):
        return found
    unknown = sorted({show(turn.get("from")) for turn in found if turn.get("from") not in list(SHARE_GPT_ROLES)})
    if unknown:
        raise LineProblem(f"conversations: unknown `from` {', '.join(unknown)}; known are {', '.join(SHARE_GPT_ROLES)}")
    return [
        {"role": SHARE_GPT_ROLES[turn["from"]], "content": turn.get("value")}
        | {k: turn[k] for k in WEIGHTS if k in turn}
        for turn in found
    ]


def texts_as_arguments(chat: Chat) -> int:
    """Tool calls whose arguments are text. Many templates write them as JSON once more, with escaped quotes."""
    calls = [call for message in chat.messages for call in message.get("tool_calls") or () if isinstance(call, dict)]
    functions = [call.get("function", call) for call in calls]
    return sum(isinstance(each, dict) and isinstance(each.get("arguments"), str) for each in functions)
