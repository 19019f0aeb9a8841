"""Secrets that stand beside a name without `=` or `:`: lists of `name` and `value`, shells, command lines, calls, .netrc, prose.

Sources: Kubernetes' EnvVar and Secret, curl(1), sshpass(1), mysql(1), docker-login(1), redis-cli, ldapsearch(1), netrc(5), fish's
`set`, csh's `setenv`, Windows' `setx`, Dockerfile's `ENV`, fluent-bit's classic configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from titan_ckpt.secret_names import ENDS, NAME
from titan_ckpt.secret_spans import (
    OPENING,
    PREFIX,
    Ends,
    Span,
    block_below,
    end_of_group,
    end_of_line,
    end_of_quoted,
    looks_random,
    start_of_line,
)

_Q = r"\\{0,7}[\"'`]?"
_SEP = r"[ \t\n]{0,40}[:=][ \t\n]{0,40}"
_SAME = (
    r"(?:[ \t]+|\\{0,7}[\"']?,[ \t\n]{0,40}\\{0,7}[\"']?)"  # between words of a command line, or of its list in JSON
)

_Finder = Callable[[str, str], list[Span]]


def phrase_spans(text: str, low: str) -> list[Span]:
    """All spans; `low` is the text in lower case, and tells which patterns can match at all."""
    found: list[Span] = []
    for words, finder in _FINDERS:
        if any(word in low for word in words):
            found += finder(text, low)
    return found


_WORD = re.compile(r"[^\s,}\])\"'`\\]+")


def _value_at(text: str, begin: int) -> Span:
    """The quoted value or the word at `begin`."""
    opening = OPENING.match(text, begin)
    if opening is not None:
        return opening.end(), end_of_quoted(text, opening, end_of_line(text, opening.end()))
    word = _WORD.match(text, begin)
    return (begin, begin) if word is None else word.span()


# ------------------------------------------------------------------------------------- lists of names and values

_NAMED = re.compile(
    rf"(?<![\w-])(?:name|key|variable|header|parameter|field|env_?var){_Q}{_SEP}{_Q}(?:{NAME})(?={_Q}(?:[\s,;}}\]]|\Z))",
)
_VALUE = re.compile(rf"(?<![\w-])(?:value|string_?value|content|default_?value){_Q}{_SEP}")
_OTHER = re.compile(rf"(?<![\w-])name{_Q}{_SEP}|[{{}}]|\n[ \t]*-[ \t]")
_NEAR = 600


def _named_values(text: str, low: str) -> list[Span]:
    """`name: HF_TOKEN` and `value: x` of one object, in either order (Kubernetes, Helm, HAR, ECS)."""
    found = []
    for match in _NAMED.finditer(low):
        value = _VALUE.search(low, match.end(), match.end() + _NEAR)
        if value is not None and _OTHER.search(low, match.end(), value.start()) is None:
            found.append(_value_at(text, value.end()))
            continue
        before = list(_VALUE.finditer(low, max(0, match.start() - _NEAR), match.start()))
        if before and _OTHER.search(low, before[-1].end(), match.start()) is None:
            found.append(_value_at(text, before[-1].end()))
    return found


_KIND = re.compile(rf"\bkind{_Q}[ \t]{{0,8}}:[ \t]{{0,8}}{_Q}(?:Sealed)?Secret\b")
_DATA = re.compile(rf"(?<![\w-])(?:data|stringData|encryptedData){_Q}[ \t]{{0,8}}:[ \t]{{0,8}}")
_KUBERNETES = 1 << 14


def _kubernetes_secrets(text: str, _low: str) -> list[Span]:
    """Everything in `data` and `stringData` of an object of kind Secret."""
    found: list[Span] = []
    last, ends = 0, Ends(text)
    for kind in _KIND.finditer(text):
        begin = max(kind.start() - _KUBERNETES, last)
        last = kind.end() + _KUBERNETES
        for data in _DATA.finditer(text, begin, last):
            end = end_of_group(text, data.end(), ends) if text[data.end() : data.end() + 1] == "{" else None
            found.append(
                (data.end(), end) if end is not None else block_below(text, data.start(), end_of_line(text, data.end()))
            )
    return found


_STORAGE = re.compile(rf"storage_options{_Q}[ \t]{{0,4}}[:=][ \t]{{0,4}}(?=\{{)")
_STORAGE_KEY = re.compile(rf"{_Q}(?:key|secret|token|username){_Q}[ \t]{{0,4}}:[ \t]{{0,4}}(?=[\"'])")


def _storage_options(text: str, _low: str) -> list[Span]:
    """fsspec's `storage_options`, where `key` is an access key."""
    found: list[Span] = []
    ends, done = Ends(text), 0
    for match in _STORAGE.finditer(text):
        if match.end() >= done:
            done = end_of_group(text, match.end(), ends) or min(match.end() + _NEAR, len(text))
            found += [_value_at(text, key.end()) for key in _STORAGE_KEY.finditer(text, match.end(), done)]
    return found


_TOKENS = re.compile(r"tokens?[\"']?[ \t]{0,4}[:=][ \t]{0,4}(?=\[[ \t\n]{0,40}[\"'])")
_ITEM = re.compile(r"[\"']([\w+/=.~-]{16,})[\"']")


def _token_lists(text: str, low: str) -> list[Span]:
    """Items of `"tokens": [...]` that look random; words of a vocabulary stay."""
    found: list[Span] = []
    done = 0
    for match in _TOKENS.finditer(low):
        begin = max(match.end(), done)
        end = text.find("]", begin, begin + (1 << 14))
        done = end if end >= 0 else begin + 1024
        for item in _ITEM.finditer(text, begin, done):
            if looks_random(item.group(1)) and any(c.isdigit() for c in item.group(1)):
                found.append(item.span(1))
    return found


# ------------------------------------------------------------------------------------------- shells and command lines

_SHELL = re.compile(
    rf"(?<![\w.-])(?:setenv|putenv|setx|env|arg|set(?:[ \t]+--?[\w-]{{1,20}}){{1,3}}"
    rf"|(?:config(?:ure)?|secrets?|vars?|env)(?:[ \t]+(?:set|add|put|create|--?[\w-]{{1,20}})){{1,3}})[ \t]+"
    rf"[\"']?(?:{NAME})[\"']?[ \t]+(?=[^\s=])"
)
_FAR = r"\b[^\n|;]{0,300}?(?<=[\s\"'])"  # other words of the command before the option
_LOGINS = "docker|podman|nerdctl|buildah|skopeo|crane|oras|helm[ \\t]+registry|az(?:[ \\t]+acr)?|cf|oc|npm"
_COMMANDS = re.compile(
    r"(?<![\w-])(?:"
    + "|".join(
        (
            rf"(?:curl|wget|https?|xh|lftp){_FAR}(?:-u|-U|--user|--proxy-user|-a|--auth)(?:{_SAME}|=)?[\"']?[^\s:\"'=/-][^\s:\"'/]{{0,200}}:(?!//)",
            rf"sshpass{_FAR}-p{_SAME}?",
            rf"(?:mysql[\w-]{{0,10}}|mariadb[\w-]{{0,10}}|7za?|rar){_FAR}-p(?=[^\s])",
            rf"(?:(?:{_LOGINS})[ \t]+login|mongo\w{{0,10}}|twine[ \t]+upload){_FAR}-p{_SAME}",
            rf"redis-cli{_FAR}-a{_SAME}",
            rf"ldap\w{{3,8}}{_FAR}-w{_SAME}",
            rf"(?:ipmitool|zip|unzip){_FAR}-P{_SAME}",
            rf"smbclient{_FAR}-U{_SAME}[^\s%]{{1,80}}%",
            rf"openssl\b[^\n|;]{{0,300}}?(?:pass:|(?<=[\s\"'])-k{_SAME})",
            r"htpasswd\b[^\n|;]{0,60}?-\w{0,6}b\w{0,6}[ \t]+\S{1,200}[ \t]+\S{1,200}[ \t]+",
            r"(?:wandb|vault|sentry-cli|comet|neptune)[ \t]+login(?:[ \t]+--?[\w-]{1,30}(?!=)){0,3}[ \t]+",
        )
    )
    + r")(?=[^\s-])"
)


def _shells(text: str, low: str) -> list[Span]:
    return [_value_at(text, match.end()) for match in _SHELL.finditer(low)]


def _commands(text: str, _low: str) -> list[Span]:
    return [_word_at(text, match.end()) for match in _COMMANDS.finditer(text)]


_SHELL_WORD = re.compile(r"[^\s\"'`]+")


def _word_at(text: str, begin: int) -> Span:
    """A shell's word: to the closing quote, or to a space; in a JSON list to the quote."""
    opening = OPENING.match(text, begin)
    if opening is not None:
        return opening.end(), end_of_quoted(text, opening, end_of_line(text, opening.end()))
    word = _SHELL_WORD.match(text, begin)
    return (begin, begin) if word is None else (begin, begin + len(word.group().rstrip("\\")))


# ---------------------------------------------------------------------------------------------- calls, files, prose

_CALL = re.compile(
    r"(?:(?:Basic|Digest|HTTP|Proxy)\w{0,20}Auth(?:entication)?|\w{0,30}Credentials?)"
    r"\([ \t]{0,8}[brfu]{0,2}[\"'][^\"'\n]{0,200}[\"'][ \t]{0,8},[ \t]{0,8}"
    r"|\b(?:login|SecretStr|Secret|Password|set_password|check_password)"
    r"\([ \t]{0,8}(?:key[ \t]{0,4}=[ \t]{0,4})?(?=[brfu]{0,2}[\"'])"
)
_NETRC = re.compile(
    rf"\b(?:machine|login|account|default)\b(?:[ \t]+\S{{1,256}})?\s{{1,80}}(?:{PREFIX})?[ \t]*"
    rf"(?:(?:login|account|user)\s{{1,20}}\S{{1,256}}\s{{1,80}}(?:{PREFIX})?[ \t]*)?(?:password|passwd)[ \t]{{1,40}}(?=\S)"
)
_IS = r"[\"']?[ \t](?:is|was|are|set[ \t]to|equals)[ \t]{0,4}:?[ \t]{1,4}[\"'`]?"
_KEY = r"(?:api|access|secret|private|auth)[ \t]key(?:[ \t]provided)?"
_PROSE = re.compile(rf"(?:(?:{ENDS}|{_KEY}){_IS}|{_KEY}[ \t]{{0,2}}[:=][ \t]{{1,4}}[\"'`]?)([^\s\"'`]{{6,}})")
_SPACED = re.compile(rf"{ENDS}[ \t]+(?=[^\s=:,]\S*[ \t]*\r?(?:\n|\Z))")
_SETTING = re.compile(rf"(?:{PREFIX})?[ \t]*(?P<name>{NAME})(?P<gap>[ \t]+)(?P<value>\S+)[ \t]*\r?\Z")


def _calls(text: str, _low: str) -> list[Span]:
    found = []
    for match in _CALL.finditer(text):
        opening = OPENING.match(text, match.end())
        if opening is not None:
            found.append((opening.end(), end_of_quoted(text, opening, end_of_line(text, opening.end()))))
    return found


_CELL = re.compile(rf"{ENDS}[\"'`]?[ \t]{{0,40}}(?:\||->|→|：|,)[ \t]{{0,40}}([^\s|,\"'()]{{8,}})")
_ENTITY = r"&(?:quot|\#34|\#39|apos);"
_BESIDE = re.compile(
    rf"{ENDS}{_ENTITY}[ \t]{{0,4}}[:=][ \t]{{0,4}}{_ENTITY}((?:(?!{_ENTITY})\S){{1,400}})"
    r"|\b(?:identified[ \t]{1,4}by|password)[ \t]{1,4}'([^'\n]{1,400})"  # SQL
    r"|\boracle:\w{1,10}:[^/\s]{1,60}/([^@\s]{1,200})@"
    r"|::add-mask::([^\n]{1,400})"
    r"|\b(?:echo|printf|print)[ \t]{1,4}(?:-n[ \t]{1,4})?[\"']?([^\s\"'|]{1,400})[\"']?[ \t]{0,4}"
    r"\|[^\n|]{0,200}--(?:[\w-]{1,20}-stdin|with-token)"
    rf"|\bname=\"{NAME}\"[^\n]{{0,200}}\n(?:[\w-]{{1,40}}:[^\n]{{0,200}}\n){{0,4}}\r?\n([^\n]{{1,4000}})"
)


def _marked_values(text: str, low: str) -> list[Span]:
    """Cells of tables and CSV, HTML's quotes, SQL, Oracle's URLs, masks of GitHub's runners, what is piped to a login, forms."""
    found = [match.span(1) for match in _CELL.finditer(low) if looks_random(text[match.start(1) : match.end(1)])]
    return found + [match.span(match.lastindex or 0) for match in _BESIDE.finditer(low)]


def _netrc(text: str, low: str) -> list[Span]:
    return [_word_at(text, match.end()) for match in _NETRC.finditer(low)]


def _prose(text: str, low: str) -> list[Span]:
    """`the password is x7Kq...`, but not `the token is required`."""
    found = [match.span(1) for match in _PROSE.finditer(low)]
    return [(start, end) for start, end in found if looks_random(text[start:end].rstrip(",.;:!?"))]


def _spaced(text: str, low: str) -> list[Span]:
    """Lines of a name and a value with spaces between: fluent-bit, redis.conf, spark-defaults.conf."""
    found = []
    for coarse in _SPACED.finditer(low):
        start = start_of_line(text, coarse.start())
        match = _SETTING.match(low, start, end_of_line(text, coarse.end())) if coarse.end() - start < _NEAR else None
        if match is not None:
            is_setting = match.group("gap") != " " or "_" in match.group("name") or "." in match.group("name")
            if is_setting or looks_random(text[match.start("value") : match.end("value")]):
                found.append(match.span("value"))
    return found


_FINDERS: tuple[tuple[tuple[str, ...], _Finder], ...] = (
    (("value", "content"), _named_values),
    (("secret",), _kubernetes_secrets),
    (("storage_options",), _storage_options),
    (("token",), _token_lists),
    (("setenv", "putenv", "setx", "env ", "arg ", "set ", "secret", "config"), _shells),
    (
        ("curl", "wget", "http", "xh ", "lftp", "sshpass", "mysql", "mariadb", "7z", "rar", "login", "mongo", "twine",
         "redis-cli", "ldap", "ipmitool", "zip", "smbclient", "openssl", "htpasswd"),
        _commands,
    ),
    (("auth(", "authentication(", "credential", "login(", "secret", "password("), _calls),
    (
        ("|", "->", "→", "：", ",", "&quot;", "&#", "by '", "d '", "oracle:", "add-mask", "form-data"),
        _marked_values,
    ),
    (("password", "passwd"), _netrc),
    ((" is", " was", " are", " set to", " equals", " key"), _prose),
    (("pass", "token", "secret", "key", "auth", "cred", "pw"), _spaced),
)  # fmt: skip
