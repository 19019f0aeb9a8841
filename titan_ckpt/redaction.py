"""Hide secrets in URLs, texts and JSON values: errors, logs, manifests, reports and evidence all go through here.

Shapes, and where they are defined: URLs (`titan_ckpt.url_secrets`); presigned requests (AWS `X-Amz-*`, Google `X-Goog-*`, SAS
`sig=`); connection strings (`AccountKey=`); headers (RFC 7617 Basic, RFC 6750 Bearer, cookies); names with values in environment
listings, command lines, JSON, YAML, TOML, INI and Python's repr; XML elements; PEM private keys (RFC 7468); and the tokens that
services mark by a prefix.

Where a text is ambiguous, more is hidden. Time is linear in the text's length: no pattern repeats without a bound on both sides.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt.url_secrets import HIDDEN, SCHEME, SPACE, TRAILING, closing_quote, hide_urls, hide_userinfo

# --------------------------------------------------------------------------------------------------- names and values

_SPECIAL = (
    "bos", "eos", "pad", "unk", "mask", "cls", "sep", "image", "video", "audio", "special", "vocab", "per", "next", "num",
)  # fmt: skip
_NOT_SPECIAL = "".join(f"(?<!{word}_)" for word in _SPECIAL)
_ALONE = r"(?<![A-Za-z0-9])"
_WORDS = (
    r"pass(?:word|wd|phrase|code)s?|" + _ALONE + r"(?:pass|pwd|pw|sig|sas|auth|creds?|jwt|dsn)|secrets?|secret[_-]?id|"
    r"(?:access|account|api|app|auth|deploy|encryption|hmac|license|master|private|secret|service|shared|signing|storage|subscription)"
    r"[_-]?keys?(?:[_-]?id)?(?:[_-]?data)?|secretkey|"
    + _NOT_SPECIAL
    + r"token|token[_-]?(?:value|secret)|credentials?|signature|authorization|(?:set-)?cookie|"
    r"connection[_-]?string|webhook(?:[_-]?url)?|x-amz-(?:security-token|credential|signature)|x-goog-(?:credential|signature)"
)
_PAIR = re.compile(
    rf"(?P<name>{_WORDS})(?:[_-]?(?:\d{{1,3}}|b64|base64|raw|value|plain))?(?P<end>\\{{0,7}}[\"'`]?\]?)"
    rf"(?P<sep>[ \t]{{0,4}}(?:=>|:=|==?|:)[ \t]{{0,4}})",
    re.IGNORECASE,
)
_COARSE = re.compile(  # where a name may end; on text in lower case
    r"(?:pass|pwd|pw|sig|sas|auth|cred|jwt|dsn|secret|key|token|cookie|string|webhook)[\w-]{0,20}[\\\"'`\] \t]{0,13}[:=]"
)
_OPTION = re.compile(rf"(?<!\S)--?[a-z0-9_.-]{{0,40}}?(?:{_WORDS})[ \t]{{1,4}}(?=[^\s-])", re.IGNORECASE)
_OPTION_NAME = re.compile(rf"--?[A-Za-z0-9_.-]{{0,40}}?(?:{_WORDS})\Z", re.IGNORECASE)
_OPENING = re.compile(r"(?:(?:[brfuBRFU]{1,2})?)(\\{0,7})(\"\"\"|'''|[\"'`])")
_AUTHSCHEME = re.compile(
    r"(?:bearer|basic|token|digest|negotiate|apikey|sharedkey(?:lite)?|aws4-hmac-sha256|goog4-rsa-sha256)[ \t]+",
    re.IGNORECASE,
)
_NEXT_PAIR = re.compile(  # after a value without quotes: parameters of connection strings, SAS, presigned URLs and DSNs
    r"[;&,](?=(?:Account(?:Name|Key)|EndpointSuffix|(?:Blob|Queue|File|Table)Endpoint|DefaultEndpointsProtocol|EntityPath"
    r"|SharedAccess(?:Key(?:Name)?|Signature)|Endpoint|X-(?:Amz|Goog)-[A-Za-z-]{1,30}|Signature|Expires|SignedHeaders|Credential"
    r"|s[a-z]{1,4}|sktid|sig|host(?:name)?|port|user(?:name)?|uid|db(?:name)?|database|server|sslmode|region|bucket|url"
    r"|endpoint(?:_url)?|step|rank)=)",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"(?:none|null|nil|true|false|undefined|unset|\*{3,})(?![\w-])", re.IGNORECASE)
_LINE_START = re.compile(r"[ \t]*(?:-[ \t]+)?[\"']?[\w.-]{0,80}\Z")


@dataclass(slots=True)
class _Ends:
    """Ends of the line and of the word at growing positions; each character is looked at once."""

    text: str
    line: int = -1
    word: int = -1
    unclosed: int = -1  # the end of a line that has a bracket without its pair

    def go_to(self, begin: int) -> None:
        """Find both ends for `begin`."""
        if begin > self.line:
            found = self.text.find("\n", begin)
            self.line = len(self.text) if found < 0 else found
        if begin > self.word:
            space = SPACE.search(self.text, begin)
            self.word = len(self.text) if space is None else space.start()


def _hide_pairs(text: str) -> str:
    parts, done, ends = [], 0, _Ends(text)
    for coarse in _COARSE.finditer(_lower(text)):
        begin = max(done, coarse.start() - 32)
        while (match := _PAIR.search(text, begin, coarse.end() + 8)) is not None:
            ends.go_to(match.end())
            start, end = _value(text, match, ends)
            begin = max(match.end(), end)
            if start < end:
                parts += [text[done:start], HIDDEN]
                done = end
    return "".join([*parts, text[done:]])


def _lower(text: str) -> str:
    """`text` in lower case, character by character: patterns that ignore case are ten times slower."""
    low = text.lower()
    return low if len(low) == len(text) else "".join(c.lower() if c.isascii() else c for c in text)


def _value(text: str, match: re.Match[str], ends: _Ends) -> tuple[int, int]:
    """Begin and end of the value after a name; empty if there is nothing to hide."""
    begin = match.end()
    if ":" in match.group("sep") and not match.group("end") and _is_yaml(text, match) and not _PLAIN.match(text, begin):
        return begin, begin + len(text[begin : ends.line].rstrip())
    opening = _OPENING.match(text, begin)
    if opening is not None:
        end = closing_quote(text, opening.end(), opening.group(1) + opening.group(2), ends.line)
        return opening.end(), ends.line if end is None else end
    if text[begin : begin + 1] in ("[", "{") and ends.unclosed != ends.line:
        group = _end_of_group(text, begin, ends.line)
        if group is not None:
            return begin, group
        ends.unclosed = ends.line
    if _PLAIN.match(text, begin):
        return begin, begin
    is_spaced = " " in match.group("sep")
    if match.group("name").lower().endswith("cookie") or (is_spaced and _is_yaml(text, match)):
        return begin, begin + len(text[begin : ends.line].rstrip())
    scheme = _AUTHSCHEME.match(text, begin)
    if scheme is not None:
        ends.go_to(scheme.end())
        begin = scheme.end()
    return begin, _end_of_word(text, begin, ends.word)


def _is_yaml(text: str, match: re.Match[str]) -> bool:
    """Whether the name begins its line, as in YAML, INI and headers: then the whole line is its value."""
    line = max(text.rfind("\n", max(0, match.start() - 100), match.start()) + 1, match.start() - 100, 0)
    is_start = line == 0 or text[line - 1] == "\n"
    return is_start and _LINE_START.match(text[line : match.start()]) is not None


def _end_of_word(text: str, begin: int, end: int) -> int:
    """The end of a value without quotes in the word that ends at `end`: before `;name=`, or the punctuation of a sentence."""
    following = _NEXT_PAIR.search(text, begin, end)
    if following is not None:
        return following.start()
    word = text[begin:end].rstrip(TRAILING)
    return begin + len(word) if word else end


def _end_of_group(text: str, begin: int, limit: int) -> int | None:
    """The end of a list or mapping, by counting brackets; None if it is not one: not closed before `limit`, or in a word."""
    depth = 0
    for at in range(begin, limit):
        depth += (text[at] in "[{(") - (text[at] in ")}]")
        if depth == 0:
            return at + 1 if at + 1 == limit or text[at + 1] in " \t\n\r,;)]}" else None
    return None


def _hide_options(text: str) -> str:
    parts, done, ends = [], 0, _Ends(text)
    for match in _OPTION.finditer(text):
        if match.start() >= done:
            begin = match.end()
            ends.go_to(begin)
            opening = _OPENING.match(text, begin)
            quoted = None
            if opening is not None:
                begin = opening.end()
                quoted = closing_quote(text, begin, opening.group(1) + opening.group(2), ends.line)
            parts += [text[done:begin], HIDDEN]
            done = _end_of_word(text, begin, ends.word) if quoted is None else quoted
    return "".join([*parts, text[done:]])


# ------------------------------------------------------------------------------------------------ tokens by their form

_PEM = re.compile(
    r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)(?:[^-]|-(?!----))*(-----END [A-Z0-9 ]{0,40}-----)?"
)
_XML = re.compile(rf"(<[\w:.-]{{0,40}}?(?:{_WORDS})>)[^<]*(?=<|$)", re.IGNORECASE)
_BEARER = re.compile(r"\b([Bb]earer|BEARER)([ \t]+)(?=\S*[\d_.-])\S{6,}")
_BASIC = re.compile(r"\b([Bb]asic|BASIC)([ \t]+)([A-Za-z0-9+/_-]{6,}={0,2})")
_MARKED = re.compile(
    r"\b(?:"
    r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AIPA|ANPA|ANVA|AROA)[A-Z0-9]{12,124}"  # AWS IAM identifiers
    r"|(?:FwoG|FQoG|IQoJ)[A-Za-z0-9+/=]{40,}"  # AWS session tokens
    r"|GOOG[A-Z0-9][A-Z0-9]{15,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"  # Google: HMAC, API key, OAuth
    r"|hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|sk-[\w-]{16,}|xox[a-z]-[\w-]{8,}|xapp-[\w-]{8,}|wandb_v1_[\w-]{8,}"  # OpenAI and others, Slack, W&B
    r"|npm_[A-Za-z0-9]{16,}|pypi-[\w-]{16,}|dop_v1_[a-f0-9]{16,}|SG\.[\w-]{8,}\.[\w-]{8,}"
    r"|eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?"  # JSON web tokens, RFC 7519
    r")"
)
_SLACK_HOOK = re.compile(r"(hooks\.slack\.com/[a-z]{1,20}/)[\w/-]+")


def _hide_basic(match: re.Match[str]) -> str:
    word, space, value = match.groups()
    try:
        is_pair = b":" in base64.b64decode(
            value + "=" * (-len(value) % 4), altchars=b"-_" if "-" in value or "_" in value else None
        )
    except (ValueError, binascii.Error):
        is_pair = False
    return f"{word}{space}{HIDDEN}" if is_pair else match.group()


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
    text = _PEM.sub(rf"\1{HIDDEN}\2", text)
    text = hide_urls(text)
    text = _XML.sub(rf"\1{HIDDEN}", text)
    text = _hide_options(_hide_pairs(text))
    text = _BEARER.sub(rf"\1\2{HIDDEN}", text)
    text = _BASIC.sub(_hide_basic, text)
    return _SLACK_HOOK.sub(rf"\1{HIDDEN}", _MARKED.sub(HIDDEN, text))


def is_credential(value: str) -> bool:
    """Whether a value, by its form alone, is a token with a known mark or a URL with a password or a signature.

    >>> is_credential("https://me:secret@host/a"), is_credential("https://host/a?download=1"), is_credential("</s>")
    (True, False, False)
    """
    if _MARKED.fullmatch(value):
        return True
    if not SCHEME.match(value) or SPACE.search(value):
        return False
    query = value.partition("?")[2]
    return hide_userinfo(value) != value or _hide_pairs(query) != query


# ------------------------------------------------------------------------------------------------------- JSON values


def is_secret_name(name: object) -> bool:
    """Whether a value with this name is a secret.

    >>> is_secret_name("AWS_SECRET_ACCESS_KEY"), is_secret_name("eos_token"), is_secret_name("num_tokens")
    (True, False, False)
    """
    text = name if isinstance(name, str) else ""
    return any(match.end() == len(text) for match in _NAMES.finditer(text))


_NAMES = re.compile(rf"(?:{_WORDS})(?:[_-]?(?:\d{{1,3}}|b64|base64|raw|value|plain))?", re.IGNORECASE)
_NAME_KEYS, _VALUE_KEYS = ("name", "key"), ("value",)


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
