"""Hide secrets in URLs, texts and JSON values: errors, logs, manifests, reports, screens and evidence all go through here.

What is known: URLs (`titan_ckpt.url_secrets`), names with values in any notation (`secret_pairs`, `secret_phrases`), and secrets
that show by their own form (`secret_tokens`). Where a text is ambiguous, more is hidden. A redacted text has the lines of the
original. Time is linear in the text's length: no pattern repeats without a bound on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from titan_ckpt.secret_names import WORDS, is_secret_name
from titan_ckpt.secret_pairs import option_spans, pair_spans, xml_spans
from titan_ckpt.secret_phrases import phrase_spans
from titan_ckpt.secret_spans import HIDDEN, SPACE, hide
from titan_ckpt.secret_tokens import is_marked, key_spans, token_spans
from titan_ckpt.url_secrets import SCHEME, hide_encoded_urls, hide_urls, hide_userinfo

_OPTION_NAME = re.compile(rf"--?[A-Za-z0-9_.-]{{0,40}}?(?:{WORDS})\Z", re.IGNORECASE)
_ESCAPED = re.compile(
    r"\\{1,8}(?:u00|x)(2[13468-9a-fA-F]|3[0-9a-bA-BdDfF]|[46][0-9a-fA-F]|5[0-9aAbBdDeEfF]|7[0-9a-eA-E])"
)


def redact(url: str) -> str:
    """`url` with user info and query hidden, since they may contain credentials; any other text as by `redact_text`.

    >>> redact("s3://key:secret@bucket/run?token=1")
    's3://***@bucket/run?***'
    """
    if not SCHEME.match(url) or re.search(r"\s", url):
        return redact_text(url)
    head, mark, _ = hide_userinfo(url).partition("?")
    return head + (f"?{HIDDEN}" if mark else "")


def redact_text(text: str) -> str:
    """`text` with every secret hidden whose form or name shows it; what is around it stays.

    >>> redact_text("PUT https://me:secret@host/a?token=1: refused")
    'PUT https://***@host/a?***: refused'
    >>> redact_text("{'HF_TOKEN': 'abc', 'host': 'db1'}")
    "{'HF_TOKEN': '***', 'host': 'db1'}"
    """
    text = _decoded(text) if "\\u00" in text or "\\x" in text else text
    text = hide_encoded_urls(hide_urls(hide(text, key_spans(text))))
    low = _lower(text)
    spans = [
        *pair_spans(text, low),
        *option_spans(text),
        *xml_spans(text),
        *phrase_spans(text, low),
        *token_spans(text, low),
    ]
    return hide(text, spans)


def _decoded(text: str) -> str:
    """Lines whose names of secrets are written with escapes of JSON or C, decoded; all other lines as they are."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if "\\u00" in line or "\\x" in line:
            plain = _ESCAPED.sub(lambda match: chr(int(match.group(1), 16)), line)
            if plain != line and len(pair_spans(plain, _lower(plain))) > len(pair_spans(line, _lower(line))):
                lines[number] = plain
    return "\n".join(lines)


def _lower(text: str) -> str:
    """`text` in lower case, character by character: patterns that ignore case are ten times slower."""
    low = text.lower()
    return low if len(low) == len(text) else "".join(c.lower() if c.isascii() else c for c in text)


def is_credential(value: str) -> bool:
    """Whether a value, by its form alone, is a token with a known mark or a URL with a password or a signature.

    >>> is_credential("https://me:secret@host/a"), is_credential("https://host/a?download=1"), is_credential("</s>")
    (True, False, False)
    """
    if is_marked(value):
        return True
    if not SCHEME.match(value) or SPACE.search(value):
        return False
    query = value.partition("?")[2]
    return hide_userinfo(value) != value or pair_spans(query, query.lower()) != []


# ------------------------------------------------------------------------------------------------------- JSON values


_NAME_KEYS, _VALUE_KEYS = ("name", "Name", "key", "Key"), ("value", "Value", "default")


def redact_values(value: Any) -> Any:
    """A JSON value with secrets hidden: under names of secrets, after options of secrets, and in its strings."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, bytes | bytearray):
        return redact_text(bytes(value).decode("utf-8", "backslashreplace"))
    if isinstance(value, Mapping):
        is_pair = any(is_secret_name(value.get(key)) for key in _NAME_KEYS)
        return {
            redact_text(key) if isinstance(key, str) else key: _hide_all(inner)
            if is_secret_name(key) or (is_pair and key in _VALUE_KEYS)
            else redact_values(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _hide_all(inner) if _follows_name(value, number) else redact_values(inner)
            for number, inner in enumerate(value)
        ]
    return value


def _follows_name(values: list[Any] | tuple[Any, ...], number: int) -> bool:
    """Whether an item is the value of the one before it: `["--token", "abc"]`, or a pair of a name and a value."""
    before = values[number - 1] if number else None
    if not isinstance(before, str):
        return False
    return _OPTION_NAME.match(before) is not None or (len(values) == 2 and is_secret_name(before))


def _hide_all(value: Any) -> Any:
    """Hide everything in a value, but whether there is one."""
    if value is None or isinstance(value, bool) or value in ("", b""):
        return value
    if isinstance(value, Mapping):
        return {key: _hide_all(inner) for key, inner in value.items()}
    return [_hide_all(inner) for inner in value] if isinstance(value, list | tuple) else HIDDEN
