"""Chat templates: a conversation as the text that the model was trained on, and which characters of it the model answers.

A template is Jinja, as transformers reads it (`PreTrainedTokenizerBase.apply_chat_template`): `chat_template.jinja` beside the
tokenizer, else `chat_template` in tokenizer_config.json. It comes from others, so it runs in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, TypeAlias, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension as JinjaExtension
from jinja2.ext import loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titan_ckpt.errors import ConfigError, NotFoundError, TitanError
from titan_ckpt.parsing.json_values import parse_json
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store

TEMPLATE_FILE, CONFIG_FILE, SPECIAL_FILE = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
CHAT_FILES = (TEMPLATE_FILE, CONFIG_FILE, SPECIAL_FILE)
SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names under which templates and data know a message's reasoning

Message: TypeAlias = Mapping[str, Any]
Span: TypeAlias = tuple[int, int]


class TemplateProblem(ValueError):  # noqa: N818 - one conversation's, which becomes an error or is skipped
    """Why a template cannot render a conversation."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text, and the spans [start, end) of its characters that are the model's to write."""

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """A compiled template. `names` are the values that it finds beside the conversation, such as `bos_token`.

    `today` is the date that it is told, the same whenever a run is resumed.
    """

    def __init__(self, source: str, names: Mapping[str, str], *, where: str, today: date) -> None:
        self.source, self.names, self.where = source, dict(names), where
        self._environment = _environment(today)
        try:
            self._template = self._environment.from_string(source)
            self.has_generation = any(
                isinstance(call.node, nodes.ExtensionAttribute)
                for call in self._environment.parse(source).find_all(nodes.Call)
            )
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"{where}: not a chat template: {type(error).__name__}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        names: Mapping[str, Any] | None = None,
        prompt: bool = False,
    ) -> str:
        """The text of `messages`, with `prompt` up to where the model answers. TemplateProblem if the template refuses them."""
        return self._strip(self._run(messages, tools, names, prompt, marks=("", "")), ("", "")).text

    def render_answers(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        names: Mapping[str, Any] | None = None,
        first: int = 0,
        last_only: bool = False,
        left_out: Container[int] = (),
    ) -> Rendered:
        """The text, and the spans of the assistant's messages from number `first` on but `left_out`, or of the last of them.

        They are what the template writes between `{% generation %}` and `{% endgeneration %}`. A template without these is
        rendered up to each answer and up to its end; the longer text must begin with the shorter one, else TemplateProblem.
        """
        answers = [n for n, message in enumerate(messages) if n >= first and message.get("role") == "assistant"]
        kept = [n for n in answers if n not in left_out]
        if not self.has_generation:
            text = self.render(messages, tools=tools, names=names)
            due = kept[-1:] if last_only else kept
            return Rendered(text, tuple(self._between(messages, n, text, tools, names) for n in due))
        marks = _unused_marks(messages, tools, names)
        found = self._strip(self._run(messages, tools, names, False, marks=marks), marks)
        spans = found.spans
        if first:
            before = self.render(messages[:first], tools=tools, names=names, prompt=True)
            if not found.text.startswith(before):
                raise TemplateProblem(_not_stable(first, before, found.text, found.text))
            spans = tuple(span for span in spans if span[0] >= len(before))
        if kept != answers:
            if len(spans) != len(answers):
                raise TemplateProblem(
                    f"the template writes {len(spans)} {{% generation %}} blocks for {len(answers)} answers, so it cannot be "
                    "told which of them the line leaves out"
                )
            spans = tuple(span for span, n in zip(spans, answers, strict=True) if n in kept)
        return Rendered(found.text, spans[-1:] if last_only else spans)

    def _between(
        self,
        messages: Sequence[Message],
        number: int,
        text: str,
        tools: Sequence[Any] | None,
        names: Mapping[str, Any] | None,
    ) -> Span:
        """What answer `number` adds to the messages before it."""
        before = self.render(messages[:number], tools=tools, names=names, prompt=True)
        is_last = number == len(messages) - 1
        through = text if is_last else self.render(messages[: number + 1], tools=tools, names=names)
        if not (text.startswith(through) and through.startswith(before)):
            raise TemplateProblem(_not_stable(number, before, through, text))
        return len(before), len(through)

    def _run(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        names: Mapping[str, Any] | None,
        prompt: bool,
        marks: tuple[str, str],
    ) -> str:
        values = {**self.names, **(names or {})}
        values |= {"messages": _as_given(messages), "tools": tools, "documents": values.get("documents")}
        self._environment.globals["generation_marks"] = marks
        try:
            text = self._template.render(values | {"add_generation_prompt": prompt})
        except Exception as error:  # a template is a program: it may divide by zero, add text to nothing, recurse
            raise TemplateProblem(f"{type(error).__name__}: {str(error)[:300]}") from error
        check_text(text)
        return text

    @staticmethod
    def _strip(marked: str, marks: tuple[str, str]) -> Rendered:
        """Take the marks out of a text; their places are the spans."""
        start, end = marks
        if not start:
            return Rendered(marked, ())
        head, *parts = marked.split(start)
        text, spans = head, []
        for part in parts:
            inside, found, outside = part.partition(end)
            if not found or end in outside:
                raise TemplateProblem("{% generation %} blocks are nested, or their text is changed afterwards")
            spans.append((len(text), len(text) + len(inside)))
            text += inside + outside
        return Rendered(text, tuple(spans))


def _as_given(messages: Sequence[Message]) -> list[Message]:
    """As in transformers: without keys whose value is None, and with reasoning under the names that templates read."""
    found: list[Message] = []
    for message in ({key: value for key, value in each.items() if value is not None} for each in messages):
        given = next((message[key] for key in REASONING if message.get(key) is not None), None)
        found.append(message if given is None else {"thinking": given, **message, "reasoning_content": given})
    return found


def _unused_marks(*values: Any) -> tuple[str, str]:
    """Two texts that are not in `values`."""
    text = json.dumps(values, ensure_ascii=False, default=str)
    number = 0
    while f"\ufdd0{number}" in text:
        number += 1
    return f"\ufdd0{number}<", f"\ufdd0{number}>"


def _not_stable(number: int, before: str, through: str, text: str) -> str:
    shorter, longer = (through, text) if through.startswith(before) else (before, through)
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    return (
        f"the template writes the messages before answer {number} differently once there are more: "
        f"{shorter[same : same + 40]!r} becomes {longer[same : same + 40]!r}, so the answers cannot be told from the prompts; "
        'use a template with {% generation %} (chat.template), or learn the last answer alone (chat.train_on = "last")'
    )


class _Generation(JinjaExtension):
    """`{% generation %} ... {% endgeneration %}`: puts marks around what the model writes."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block, as a call with the block as its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        start, end = cast(tuple[str, str], self.environment.globals["generation_marks"])
        return f"{start}{caller()}{end}"


def _environment(today: date) -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": today.strftime, "dict": _dict}
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def check_text(text: str) -> None:
    """TemplateProblem for half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise TemplateProblem(f"the text has {half}, half of a surrogate pair, which is no character") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _dict(*pairs: Any, **values: Any) -> dict[Any, Any]:
    """`dict(...)`, without what the class has beside."""
    return dict(*pairs, **values)


def chat_files(folder: str) -> dict[str, bytes]:
    """Those of CHAT_FILES that are in a tokenizer's folder."""
    store, found = open_store(folder), {}
    for name in CHAT_FILES:
        try:
            found[name] = store.read(name)
        except NotFoundError:
            continue
    return found


def day(text: str) -> date:
    """The day that `chat.date` names; ConfigError if it is none."""
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"chat.date = {text!r}: expected a date such as 2024-07-26") from error


def template_assets(folder: str, own: str = "") -> dict[str, bytes]:
    """The files with which an exported model renders conversations as `open_template` does."""
    files = chat_files(folder) if folder else {}
    return files | ({TEMPLATE_FILE: _read_text(own).encode()} if own else {})


def open_template(folder: str, own: str = "", *, today: date) -> tuple[ChatTemplate, ChatTemplate]:
    """The templates for conversations without and with tools of the tokenizer in `folder` ("" if it is no folder's).

    `own` is the path or URL of a template that replaces them. ConfigError if there is none.
    """
    files = chat_files(folder) if folder else {}
    config = _mapping(files, CONFIG_FILE, folder)
    names = special_tokens(config, _mapping(files, SPECIAL_FILE, folder))
    if own:
        where, source = own, _read_text(own)
        only = ChatTemplate(source, names, where=where, today=today)
        return only, only
    if TEMPLATE_FILE in files:
        where = f"{folder}/{TEMPLATE_FILE}"
        only = ChatTemplate(_decoded(files[TEMPLATE_FILE], where), names, where=where, today=today)
        return only, only
    found = config.get("chat_template")
    where = f"{folder}/{CONFIG_FILE}"
    if isinstance(found, str):
        only = ChatTemplate(found, names, where=where, today=today)
        return only, only
    if isinstance(found, list):
        return _named(found, names, where, today)
    raise ConfigError(
        f"data.tokenizer = {folder or 'bytes'}: no chat template ({TEMPLATE_FILE}, or chat_template in {CONFIG_FILE}); "
        "give the tokenizer of a chat model, or a template with chat.template = FILE.jinja"
    )


def _named(found: list[Any], names: Mapping[str, str], where: str, today: date) -> tuple[ChatTemplate, ChatTemplate]:
    by_name = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
    plain, tools = by_name.get("default"), by_name.get("tool_use", by_name.get("default"))
    if not isinstance(plain, str) or not isinstance(tools, str):
        raise ConfigError(
            f"{where}: chat_template has no entry `default`, only {sorted(map(str, by_name))}; give one with chat.template"
        )
    made = {source: ChatTemplate(source, names, where=where, today=today) for source in (plain, tools)}
    return made[plain], made[tools]


def special_tokens(config: Mapping[str, Any], mapped: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and so on, as templates name them; tokenizer_config.json's count more than special_tokens_map.json's."""
    found = {}
    for name in (f"{kind}_token" for kind in SPECIAL_TOKENS):
        value = config.get(name, mapped.get(name))
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _mapping(files: Mapping[str, bytes], name: str, folder: str) -> Mapping[str, Any]:
    if name not in files:
        return {}
    try:
        value = parse_json(files[name], f"{folder}/{name}")
    except TitanError as error:
        raise ConfigError(str(error)) from error
    return value if isinstance(value, dict) else {}


def _read_text(url: str) -> str:
    folder, _, name = url.rpartition("/")
    store: Store = open_store(folder or ".")
    try:
        return _decoded(store.read(name), url)
    except NotFoundError as error:
        raise ConfigError(f"chat.template = {url}: {error}") from error


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not a chat template: not UTF-8: {error}") from error
