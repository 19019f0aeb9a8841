"""Hide user info and query of URLs (RFC 3986 3.2.1 and 3.4), also of sloppy ones with `/`, `@`, `?` or spaces in the password.

`titan_ckpt.redaction` uses it. Where a text is ambiguous, more is hidden.
"""

from __future__ import annotations

import re

HIDDEN = "***"
SPACE = re.compile(r"\s")
TRAILING = ",;:.)]}>'\"`"
SCHEME = re.compile(r"(?<![A-Za-z0-9])[A-Za-z][A-Za-z0-9+.-]{0,30}://")

_PORT = re.compile(r"\d{1,5}(?=[/?#\s'\"`)\]}>,;:]|$)")
_FIRST_MARK = re.compile(r"[/@:?#\s\[]")
_STEP = re.compile(r"@(?:\d+|latest)(?!\w|\.\w|-|:\d|/\w)")
_HOST_AFTER = re.compile(r"@(?=[\w\[*$%{<.-])")
_QUERY = re.compile(r"\?[A-Za-z][\w.-]{0,60}=")
_CLOSING = {"'": "'", '"': '"', "`": "`", "<": ">"}
_MAX_USERINFO = 4096


def hide_urls(text: str) -> str:
    starts = [match.end() for match in SCHEME.finditer(text)]
    if not starts:
        return text
    parts, done, number = [], 0, 0
    while number < len(starts):
        begin = starts[number]
        end, number = _end_of_url(text, starts, number)
        parts += [text[done:begin], _hide_in_url(text[begin:end], _quote_before(text, begin))]
        done = end
    return "".join([*parts, text[done:]])


def _end_of_url(text: str, starts: list[int], number: int) -> tuple[int, int]:
    """Where what may belong to the URL ends, and the number of the next URL. A password and a query may contain `://`."""
    begin = starts[number]
    line = text.find("\n", begin, starts[number + 1] if number + 1 < len(starts) else len(text))
    if line >= 0:
        return line, number + 1
    is_open = _is_open(text[begin : begin + _MAX_USERINFO])
    closing = _quote_before(text, begin)
    has_query, seen = False, begin
    while True:
        number += 1
        end = len(text) if number == len(starts) else _start_of_scheme(text, starts[number])
        part, seen = text[seen:end], end
        if "\n" in part:
            return end - len(part) + part.find("\n"), number
        has_query = has_query or "?" in part
        is_ended = SPACE.search(part) is not None or (closing != "" and closing in part)
        is_open = is_open and "@" not in part and end - begin <= _MAX_USERINFO
        if number == len(starts) or (not is_open and (is_ended or not has_query)):
            return end, number


def _start_of_scheme(text: str, end: int) -> int:
    start = end - 3
    while start and (text[start - 1].isalnum() or text[start - 1] in "+.-") and end - start < 34:
        start -= 1
    return start


def _quote_before(text: str, begin: int) -> str:
    start = _start_of_scheme(text, begin)
    return _CLOSING.get(text[start - 1], "") if start else ""


def _hide_in_url(url: str, closing: str) -> str:
    """`url` is what follows `://`, up to the end of the line or the next URL."""
    shown = hide_userinfo(f"://{url}")[3:]
    start = shown.find("?")
    space = SPACE.search(shown)
    if start < 0 or (space is not None and space.start() < start):
        return shown
    if closing and 0 <= shown.find(closing) < start:
        return shown
    end = _end_of_query(shown, start + 1, closing)
    return f"{shown[: start + 1]}{HIDDEN}{shown[end:]}" if end > start + 1 else shown


def _end_of_query(text: str, start: int, closing: str) -> int:
    """Up to the closing quote of a quoted URL, else up to a space, without the punctuation before it."""
    if closing:
        quoted = closing_quote(text, start, closing, len(text))
        if quoted is not None:
            return quoted
    space = SPACE.search(text, start)
    end = len(text) if space is None else space.start()
    return start + len(text[start:end].rstrip(TRAILING))


def _is_open(rest: str) -> bool:
    """Whether what follows `://` begins with `user:password`, not with `host`, `host/` or `host:port`."""
    mark = _FIRST_MARK.search(rest)
    if mark is None or mark.group() != ":":
        return False
    after = rest[mark.end() : mark.end() + 1]
    return after not in ("", " ", "\t") and _PORT.match(rest, mark.end()) is None


def hide_userinfo(url: str) -> str:
    """Hide what is before the `@` of the host: the last one, since passwords may have more, but never that of a step."""
    begin = url.find("://") + 3
    rest = url[begin : begin + _MAX_USERINFO]
    space = SPACE.search(rest)
    word = rest if space is None else rest[: space.start()]
    mark = _FIRST_MARK.search(word)
    if _is_open(rest):
        at = _last_at(rest)
    elif mark is not None and mark.group() in "@:":
        at = _last_at(word)
    else:
        at = -1
    return url if at < 0 else f"{url[:begin]}{HIDDEN}{rest[at:]}{url[begin + _MAX_USERINFO :]}"


def _last_at(text: str) -> int:
    """The last `@` before something like a host, or -1; not that of `URL@STEP`, if there is another one."""
    found = [match.start() for match in _HOST_AFTER.finditer(text)]
    hosts = [at for at in found if _STEP.match(text, at) is None]
    if not hosts:
        return -1
    query = _QUERY.search(text)
    return max((at for at in hosts if query is not None and at < query.start()), default=hosts[-1])


_AFTER_QUOTE = re.compile(r"[\s,;:)\]}>&|]|\\n|\\\\?[\"']|$")


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
