"""Hide user info and query of URLs (RFC 3986 3.2.1 and 3.4), also of sloppy ones with `/`, `@`, `?` or spaces in the password.

`titan_ckpt.redaction` uses it. Where a text is ambiguous, more is hidden.
"""

from __future__ import annotations

import re

from titan_ckpt.secret_spans import HIDDEN, SPACE, TRAILING, closing_quote

SCHEME = re.compile(r"(?<![A-Za-z0-9])[A-Za-z][A-Za-z0-9+.-]{0,30}://")

_PORT = re.compile(r"\d{1,5}(?=[/?#\s'\"`)\]}>,;:]|$)")
_FIRST_MARK = re.compile(r"[/@:?#\s\[]")
_STEP = re.compile(r"@(?:\d+|latest)(?!\w|\.\w|-|:\d|/\w)")
_HOST_AFTER = re.compile(r"@(?=[\w\[*$%{<.-])")
# `abfs://container@account.dfs.core.windows.net`: what is before the `@` is no secret.
_CONTAINER = re.compile(
    r"(?:abfss?|az|wasbs?)://[a-z0-9$][a-z0-9-]{0,62}@[a-z0-9-]{1,63}\.(?:dfs|blob)\.", re.IGNORECASE
)
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
        scheme = text[_start_of_scheme(text, begin) : begin]
        parts += [text[done:begin], _hide_in_url(scheme, text[begin:end], _quote_before(text, begin))]
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


def _hide_in_url(scheme: str, url: str, closing: str) -> str:
    """`url` is what follows `scheme`, with its `://`, up to the end of the line or the next URL."""
    shown = hide_userinfo(scheme + url)[len(scheme) :]
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
    if _CONTAINER.match(url):
        return url
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


# -------------------------------------------------------------------------------------------------- percent-encoded URLs

_ENCODED = re.compile(r"%(?:25){0,3}3A%(?:25){0,3}2F%(?:25){0,3}2F([^\s\"'<>&]{1,8192})", re.IGNORECASE)
_ENCODED_USERINFO = re.compile(r".{0,4096}(?=%(?:25){0,3}40(?!\d{1,15}(?:\Z|%)))", re.IGNORECASE)
_ENCODED_QUERY = re.compile(r"%(?:25){0,3}3F", re.IGNORECASE)


def hide_encoded_urls(text: str) -> str:
    """Hide user info and query of URLs that are a parameter of another URL, encoded once or several times (RFC 3986 2.1)."""
    return _ENCODED.sub(_hide_encoded, text) if "%" in text else text


def _hide_encoded(match: re.Match[str]) -> str:
    head, rest = match.group()[: match.start(1) - match.start()], match.group(1)
    query = _ENCODED_QUERY.search(rest)
    shown = rest if query is None else rest[: query.end()]
    user = _ENCODED_USERINFO.match(shown)
    if user is None and query is not None and (user := _ENCODED_USERINFO.match(rest)) is not None:
        return f"{head}{HIDDEN}{rest[user.end() :]}"  # a password with a question mark
    shown = shown if user is None else HIDDEN + shown[user.end() :]
    return head + shown + (HIDDEN if query is not None and query.end() < len(rest) else "")
