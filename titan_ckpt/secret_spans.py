"""What the finders of secrets share: spans of a text, hidden line by line, and where values end.

A span that has several lines stays several lines, so that a line of the redacted text is the same line of the original.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

HIDDEN = "***"
SPACE = re.compile(r"\s")
TRAILING = ",;:.)]}>'\"`"
OPENING = re.compile(r"(?:(?:[brfuBRFU]{1,2})?)(\\{0,7})(\"\"\"|'''|[\"'`])")
PREFIX = r"(?:\[[^\]\n]{1,60}\]:?|[\w.-]{1,40}[ \t]{1,20}\|)"  # of torchrun, of docker compose
Span: TypeAlias = tuple[int, int]

_AFTER_QUOTE = re.compile(r"[\s,;:)\]}>&|]|\\n|\\\\?[\"']|$")
_BRACKETS = re.compile(r"\\.|[\[\](){}\"'\n]", re.DOTALL)
_MAX_GROUP = 1 << 14
_CONTENT = re.compile(rf"(?:{PREFIX})?[ \t]*[\"'`]?(.*?)[\"'`,\\]*[ \t\r]*\Z")


def hide(text: str, spans: Iterable[Span]) -> str:
    """`text` with the spans hidden; they may touch and overlap."""
    parts, done = [], 0
    for start, end in _merged(spans):
        parts += [text[done:start], hidden(text[start:end])]
        done = end
    return "".join([*parts, text[done:]])


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif start < end:
            merged.append((start, end))
    return merged


def hidden(secret: str) -> str:
    """`***` for each line of a secret; indentation, prefixes of log lines and quotes stay, so that JSON stays JSON."""
    if "\n" not in secret:
        return HIDDEN
    first, *rest = secret.split("\n")
    return "\n".join([HIDDEN if first.strip() else first, *map(_hidden_line, rest)])


def _hidden_line(line: str) -> str:
    match = _CONTENT.match(line)
    if match is None or match.start(1) == match.end(1):
        return line
    return f"{line[: match.start(1)]}{HIDDEN}{line[match.end(1) :]}"


@dataclass(slots=True)
class Ends:
    """Ends of the line and of the word at growing positions; each character is looked at once."""

    text: str
    line: int = -1
    word: int = -1
    unclosed: int = -1  # up to where a bracket was looked for whose pair is not there

    def go_to(self, begin: int) -> None:
        """Find both ends for `begin`."""
        if begin > self.line:
            self.line = end_of_line(self.text, begin)
        if begin > self.word:
            space = SPACE.search(self.text, begin)
            self.word = len(self.text) if space is None else space.start()


def end_of_line(text: str, begin: int) -> int:
    """Where the line of `begin` ends."""
    found = text.find("\n", begin)
    return len(text) if found < 0 else found


def start_of_line(text: str, at: int) -> int:
    """Where the line of `at` begins."""
    return text.rfind("\n", 0, at) + 1


def end_of_group(text: str, begin: int, ends: Ends) -> int | None:
    """The end of a list or mapping, by counting brackets outside of quotes; None if it is not closed, or in a word."""
    if begin < ends.unclosed:
        return None
    depth, quote, limit = 0, "", min(len(text), begin + _MAX_GROUP)
    for match in _BRACKETS.finditer(text, begin, limit):
        mark = match.group()
        if quote:
            quote = "" if mark == quote or mark == "\n" else quote
        elif mark in "\"'":
            quote = mark if _is_opening(text, match.start()) else ""
        elif mark in "[({":
            depth += 1
        elif mark in "])}":
            depth -= 1
            if depth == 0:
                end = match.end()
                return end if end == len(text) or text[end] in " \t\r\n,;)]}>\"'\\" else None
    ends.unclosed = limit
    return None


def _is_opening(text: str, at: int) -> bool:
    return at > 0 and text[at - 1] in "[({,:= \t\nbrfuBRFU"


_LINE = re.compile(rf"(?P<prefix>{PREFIX})?(?P<indent>[ \t]*)(?P<dash>-[ \t])?")
_MAX_BLOCK_LINES = 200


def block_below(text: str, name: int, begin: int) -> Span:
    """The lines below `name:` that are indented more (YAML 1.2, 8.1), or list items of the same indent, or one quoted value."""
    line = _LINE.match(text, start_of_line(text, name))
    prefix, indent = (line.group("prefix") or "", len(line.group("indent"))) if line else ("", 0)
    at, end, is_list = begin + 1, begin, None
    for _ in range(_MAX_BLOCK_LINES):
        limit = end_of_line(text, at)
        found = _LINE.match(text, at, limit)
        if at >= len(text) or found is None:
            break
        content, width = found.end(), len(found.group("indent"))
        is_inside = (found.group("prefix") or "") == prefix and width > indent
        is_list = bool(found.group("dash")) and width == indent if is_list is None else is_list
        is_item = is_list and found.group("dash") is not None and width == indent
        is_value = end == begin and text[content : content + 1] in ("'", '"')
        if not (is_inside or is_item or is_value or not text[content:limit].strip()):
            break
        end, at = limit, limit + 1
        if is_value and not is_inside:
            break
    return begin, end


def end_of_quoted(text: str, opening: re.Match[str], line: int) -> int:
    """The end of a value after its opening quote; the end of the line if it is cut off."""
    end = closing_quote(text, opening.end(), opening.group(1) + opening.group(2), line)
    return line if end is None else end


def closing_quote(text: str, begin: int, closing: str, line: int) -> int | None:
    """Where a quoted value ends: at a quote that is not escaped, and that does not go on with a letter; before `line`.

    `closing` may have backslashes: JSON within JSON writes `\\"` for the quote, and `\\\\\\"` for a quote in the value.
    """
    quote = closing.lstrip("\\")
    depth = len(closing) - len(quote)
    limit = line if len(quote) == 1 else len(text)
    at, last = begin, None
    while True:
        at = text.find(quote, at, limit)
        if at < 0:
            return last
        escapes = 0
        while at - escapes > begin and text[at - escapes - 1] == "\\":
            escapes += 1
        if escapes >= depth and (escapes - depth) % (2 * depth + 2) == 0:
            last = at - depth
            if _AFTER_QUOTE.match(text, at + len(quote)):
                return last
        at += len(quote)


def looks_random(value: str) -> bool:
    """Whether a word looks made by a machine: digits, or upper and lower case, among at least eight characters.

    >>> looks_random("kJ8dLq02"), looks_random("required"), looks_random("model.layers.0")
    (True, False, False)
    """
    if len(value) < 8 or SPACE.search(value) or "/" in value[:1] or re.fullmatch(r"[a-z_]+(?:\.[a-z0-9_]+)+", value):
        return False
    has_digit = any(c.isdigit() for c in value)
    return (has_digit and any(c.isalpha() for c in value)) or (value.lower() != value and not value[1:].islower())
