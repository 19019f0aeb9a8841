"""Names with values in texts: environment listings, command lines, JSON, YAML, TOML, INI, Python's repr, headers, XML.

Where a text is ambiguous, more is hidden. Values of several lines (YAML's block scalars and mappings, lists, triple quotes) too.
"""

from __future__ import annotations

import re

from titan_ckpt.secret_names import ENDING, ENDS, INVISIBLE, WORDS
from titan_ckpt.secret_spans import (
    OPENING,
    PREFIX,
    TRAILING,
    Ends,
    Span,
    block_below,
    closing_quote,
    end_of_group,
    end_of_line,
    end_of_quoted,
    looks_random,
    start_of_line,
)

_PAIR = re.compile(  # on text in lower case
    rf"(?P<name>{WORDS}){ENDING}(?P<end>\\{{0,7}}[\"'`]?\]?){INVISIBLE}"
    r"(?:[ \t]{0,2}:[ \t]{0,2}(?:str|secretstr|optional\[str\]|string)(?=[ \t]{0,2}=))?"
    r"(?P<sep>[ \t]{0,40}(?:=>|:=|\+=|==?|:|%(?:25){0,3}3[da])[ \t]{0,40}"
    + INVISIBLE
    + r"|[ \t]{0,4},[ \t\n]{0,40}(?=[brfu]{0,2}\\{0,7}[\"']))"
)
_COARSE = re.compile(rf"{ENDS}[\\\"'`\] \t\x1b\[0-9;m\u200b-\u200d\ufeff]{{0,48}}(?:[:=,+]|%(?:25){{0,3}}3)")
_OPTION = re.compile(rf"(?<!\S)--?[a-z0-9_.-]{{0,40}}?(?:{WORDS})[ \t]{{1,4}}(?=[^\s-])", re.IGNORECASE)
_AUTHSCHEME = re.compile(
    r"(?:bearer|basic|token|digest|negotiate|apikey|sharedkey(?:lite)?|aws4-hmac-sha256|goog4-rsa-sha256)[ \t]+",
    re.IGNORECASE,
)
_NEXT_PAIR = re.compile(  # after a value without quotes: parameters of connection strings, SAS, presigned URLs and DSNs
    r"[;&,](?=(?:Account(?:Name|Key)|EndpointSuffix|(?:Blob|Queue|File|Table)Endpoint|DefaultEndpointsProtocol|EntityPath"
    r"|SharedAccess(?:Key(?:Name)?|Signature)|Endpoint|X-(?:Amz|Goog)-[A-Za-z-]{1,30}|Signature|Expires|SignedHeaders|Credential"
    r"|s[a-z]{1,4}|sktid|sig|host(?:name)?|port|user(?:name)?|uid|db(?:name)?|database|server|sslmode|region|bucket|url"
    r"|endpoint(?:_url)?|step|rank)=)|%(?:25){0,3}(?:26|22|0[aA])",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"(?:none|null|nil|true|false|undefined|unset|\*{3,})(?![\w-])", re.IGNORECASE)
_PROSE = re.compile(  # a value of one word is hidden in the middle of a line: none of these is one
    r"(?:a|an|and|are|as|at|be|been|by|check|each|every|expected|failed|for|from|has|have|if|in|into|invalid|is|it|its|missing|no|not"
    r"|of|on|or|required|see|that|the|their|there|these|they|this|those|to|unexpected|use|was|were|when|where|which|who|with|you|your)"
    r"(?=[ \t]+[A-Za-z`'(])"
)
_HEREDOC = re.compile(r"<<[-~]?[\"']?(\w{1,40})[\"']?[ \t]*\r?\n")
_MAX_HEREDOC = 1 << 14
_CONTINUED = re.compile(r"[\"'\\]{0,2}\r?\n[ \t]+[\"']?([^\s:\"'\\]{4,})[\"',\\]{0,3}(?=[ \t]*\r?(?:\n|\Z))")
_MEASURED = ("pass", "pat", "sig", "token")  # names that also count or measure something
_MEASURE = re.compile(r"\d{1,5}(?:\.\d{1,6})?(?=[ \t]*(?:[,;)/|\r\n]|(?:[mun]?s|%|[kKMGT]?i?B)\b|\Z))")
_LINE_START = re.compile(rf"(?:{PREFIX})?[ \t]*(?:-[ \t]+)?[\"']?[\w.-]{{0,80}}\Z")
_BLOCK = re.compile(
    r"[ \t]*(?:!!?\w{0,20}[ \t]*)?(?:&\w{1,30}[ \t]*)?(?:[|>][+-]?\d?[+-]?)?[ \t]*(?:#[^\n]{0,200})?\r?(?=\n)"
)
_ARROW = re.compile(r"\\{0,7}[\"']?[ \t]{0,4}->[ \t]{0,4}(?=\\{0,7}[\"'])")
_WORD_START = re.compile(r"[\w.-]{0,80}\Z")
_WRAPPED = re.compile(r"\n([A-Za-z0-9+/=_.~-]{4,200})[\"',;)\]}]{0,3}(?=\n|\Z)")
_WRAPPED_AT = 60


def pair_spans(text: str, low: str) -> list[Span]:
    """Spans of the values of names; `low` is the text in lower case."""
    found: list[Span] = []
    ends, done = Ends(text), 0
    for coarse in _COARSE.finditer(low):
        begin = max(done, coarse.start() - 32)
        while begin < coarse.end() and (match := _PAIR.search(low, begin, coarse.end() + 48)) is not None:
            ends.go_to(match.end())
            start, end = _value(text, match, ends)
            begin = max(match.end(), end)
            if start < end:
                found.append((start, end))
                found += _after(text, start, end)
                done = found[-1][1]
    return found


def _after(text: str, start: int, end: int) -> list[Span]:
    """What belongs to a value that has ended: the new value of a Terraform plan, the rest of a line that a terminal broke."""
    arrow = _ARROW.match(text, end)
    if arrow is not None:
        opening = OPENING.match(text, arrow.end())
        if opening is not None:
            return [(opening.end(), end_of_quoted(text, opening, end_of_line(text, opening.end())))]
    continued = _CONTINUED.match(text, end)
    if continued is not None and looks_random(continued.group(1)):  # a value of YAML that goes on in the next line
        return [continued.span(1), *_after(text, continued.start(1), continued.end(1))]
    if end == len(text) or text[end] != "\n" or end - start < 8 or end - start_of_line(text, start) < _WRAPPED_AT:
        return []
    wrapped = _WRAPPED.match(text, end)
    return [wrapped.span(1)] if wrapped is not None and looks_random(wrapped.group(1)) else []


def _value(text: str, match: re.Match[str], ends: Ends) -> Span:
    """Begin and end of the value after a name; empty if there is nothing to hide."""
    begin, sep = match.end(), match.group("sep")
    if "," in sep:
        return _after_comma(text, match)
    if "%" in sep:
        return begin, _end_of_word(text, begin, ends.word)
    if _PLAIN.match(text, begin) or (match.group("name") in _MEASURED and _MEASURE.match(text, begin)):
        return begin, begin
    if "\n" not in sep and (block := _BLOCK.match(text, begin)) is not None and (":" in sep or _is_yaml(text, match)):
        return block_below(text, match.start(), block.end())
    if (tag := _HEREDOC.match(text, begin)) is not None:
        end = re.compile(rf"\n[ \t]*{tag.group(1)}\b").search(text, tag.end() - 1, tag.end() + _MAX_HEREDOC)
        return tag.end(), ends.line if end is None else end.start()
    if ":" in sep and not match.group("end") and _is_yaml(text, match):
        return begin, begin + len(text[begin : ends.line].rstrip())
    opening = OPENING.match(text, begin)
    if opening is not None:
        return opening.end(), end_of_quoted(text, opening, ends.line)
    if text[begin : begin + 1] in ("[", "{", "(") and (group := end_of_group(text, begin, ends)) is not None:
        return begin, group
    return _unquoted(text, match, ends)


def _unquoted(text: str, match: re.Match[str], ends: Ends) -> Span:
    begin = match.end()
    if _is_passed_on(text, match):
        return begin, begin
    is_whole_line = match.group("name").endswith("cookie") or (" " in match.group("sep") and _is_yaml(text, match))
    if is_whole_line:
        return begin, begin + len(text[begin : ends.line].rstrip())
    quote = _quote_before(text, match)
    if quote and (closing := closing_quote(text, begin, quote, ends.line)) is not None:
        return begin, closing
    scheme = _AUTHSCHEME.match(text, begin)
    if scheme is not None:
        ends.go_to(scheme.end())
        begin = scheme.end()
    if match.group("sep") == ": " and _PROSE.match(text, begin):
        return begin, begin
    return begin, _end_of_word(text, begin, ends.word)


def _is_passed_on(text: str, match: re.Match[str]) -> bool:
    """Whether a call passes a variable on under its own name, as source lines in tracebacks do: `token=token`."""
    word = _WORD_START.search(text, max(0, match.start() - 80), match.start())
    name = text[match.start() if word is None else word.start() : match.end("name")]
    end = match.end() + len(name)
    return match.group("sep") == "=" and text[match.end() : end] == name and text[end : end + 1] in (",", ")")


def _quote_before(text: str, match: re.Match[str]) -> str:
    """The quote of `"NAME=value"`, in lists of environment variables; empty if there is none."""
    if match.group("end") or "=" not in match.group("sep"):
        return ""
    word = _WORD_START.search(text, max(0, match.start() - 80), match.start())
    start = match.start() if word is None else word.start()
    opening = re.compile(r"\\{0,7}[\"'`]\Z").search(text, max(0, start - 8), start)
    return "" if opening is None else opening.group()


def _after_comma(text: str, match: re.Match[str]) -> Span:
    """The value of `("NAME", "value")`; a word of lower case is another item of a list of names."""
    opening = OPENING.match(text, match.end())
    if opening is None or not match.group("end"):
        return match.end(), match.end()
    end = end_of_quoted(text, opening, end_of_line(text, opening.end()))
    value = text[opening.end() : end]
    is_name = re.fullmatch(r"[a-z_]{1,24}|[A-Z_]{1,40}|", value) is not None
    return (end, end) if is_name else (opening.end(), end)


def _is_yaml(text: str, match: re.Match[str]) -> bool:
    """Whether the name begins its line, as in YAML, INI and headers: then the whole line is its value."""
    line = max(text.rfind("\n", max(0, match.start() - 160), match.start()) + 1, match.start() - 160, 0)
    is_start = line == 0 or text[line - 1] == "\n"
    return is_start and _LINE_START.match(text[line : match.start()]) is not None


def _end_of_word(text: str, begin: int, end: int) -> int:
    """The end of a value without quotes in the word that ends at `end`: before `;name=`, or the punctuation of a sentence."""
    following = _NEXT_PAIR.search(text, begin, end)
    if following is not None:
        return following.start()
    word = text[begin:end].rstrip(TRAILING)
    return begin + len(word) if word else end


def option_spans(text: str) -> list[Span]:
    """Spans of the values of options such as `--api-key VALUE`."""
    found: list[Span] = []
    done, ends = 0, Ends(text)
    for match in _OPTION.finditer(text):
        if match.start() >= done:
            begin = match.end()
            ends.go_to(begin)
            opening = OPENING.match(text, begin)
            if opening is not None and (
                end := closing_quote(text, opening.end(), opening.group(1) + opening.group(2), ends.line)
            ):
                found.append((opening.end(), end))
            else:
                start = begin if opening is None else opening.end()
                found.append((start, _end_of_word(text, start, ends.word)))
            done = found[-1][1]
    return found


_XML = re.compile(
    rf"<[\w:.-]{{0,40}}?(?:{WORDS})(?:[ \t][^>\n]{{0,200}})?>(?:<!\[CDATA\[)?([^<]+?)(?=\]\]>|<|$)"
    rf"|<key>[\w:.-]{{0,40}}?(?:{WORDS})</key>\s{{0,40}}<\w{{1,20}}>([^<]+)",
    re.IGNORECASE,
)


def xml_spans(text: str) -> list[Span]:
    """Spans of the contents of XML elements with a secret's name."""
    return [match.span(match.lastindex or 0) for match in _XML.finditer(text)] if "<" in text else []
