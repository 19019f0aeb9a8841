"""One text that holds the logs of several ranks, hosts or files, as people collect and paste them.

Forms: `tail` and `head` of several files (`==> FILE <==`), `more` (`::::::` above and below FILE), `clush -b` and `dshbak`
(`------` above and below HOST), `grep -H` and `grep -r` (`FILE:` before each line, `FILE-` before those around a match); and
people's own headings: `=== rank 3 ===`, `### rank_3.log`, `rank 3:`, `$ cat FILE`, `$ kubectl logs POD`.

Headings of people are taken only where each occurs once and they begin the text, or stand above a fenced block of Markdown: a
program may write the like into its log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from titan_ckpt.debug.read.text.prefixes import peel

MOST_SECTIONS = 10_000
_ERRORS = ("Traceback (most recent", "atchdog", "Error: ", "NCCL WARN")

_PATH = r"[\w.@%+=/~-]{1,200}"
_LOG = rf"{_PATH}\.(?:log|out|err|txt|stdout|stderr)"
_OF_TAIL = re.compile(rf"==> ({_PATH}) <==")
_RULER = re.compile(r":{14}|-{15,16}")
_NAME = re.compile(rf"{_PATH}(?: \(\d+\))?")
_OF_GREP = re.compile(rf"({_LOG}):")
_AROUND = re.compile(rf"({_LOG})-")
_COUNTED = re.compile(r"^(\d{1,9})[:-]")
_FENCE = re.compile(r"\s{0,3}(?:```+|~~~+)[\w-]{0,20}")
_TAG = re.compile(r"</?(?:details|summary|b|strong|h\d|p|br) ?/?>")
_DECORATION = "=#*~_<>`+-[]:. "
_RANK = re.compile(
    r"(?:global |worker |process )?rank[ _:#=-]{0,2}(\d{1,6})(?:'s)?(?: (?:logs?|output|stderr|stdout))?", re.I
)
_COMMAND = re.compile(
    rf"(?P<prompt>[^$#%>]{{0,100}}[$#%>] ?)(?:sudo )?(?:cat|tail|head|less|more|zcat)(?: -\S+(?: \d+)?)* (?P<file>{_LOG})"
)
_KUBECTL = re.compile(
    r"[^$#%>]{0,100}[$#%>] ?(?:kubectl|oc) logs(?: -\S+(?: [^-\s]\S*)?)* (?:pod/)?(\w[\w.-]{0,200})(?: -\S+(?: [^-\s]\S*)?)*"
)

# The name of what it is of, and its lines with their numbers in the whole text.
Section = tuple[str, list[tuple[int, str]]]


def sections(text: str) -> list[Section]:
    """The logs that a text holds, by name; what is of none stands under "". [] where the text is one log."""
    lines = [line.rstrip("\r") for line in text.split("\n")]
    first = next((line.strip() for line in lines if line.strip()), "")
    if _OF_TAIL.fullmatch(first) or _RULER.fullmatch(first):
        named = _under_headings(lines)
    elif _OF_GREP.match(first) or _AROUND.match(first):
        named = _of_grep(lines)
    elif _heading(first) and not any(map(_FENCE.fullmatch, lines)):
        named = _under_own_headings(lines)
    else:
        named = _in_fences(lines)
    found: dict[str, list[tuple[int, str]]] = {}
    for number, (name, line) in enumerate(named, 1):
        if line is not None:
            found.setdefault(name.lstrip("/.~"), []).append((number, line))
    return list(found.items()) if 1 < len(found.keys() | {""}) - 1 <= MOST_SECTIONS else []


_Named = Iterable[tuple[str, str | None]]  # of each line of the text: whose it is, and its text; None: a heading


def _under_headings(lines: list[str]) -> _Named:
    """As tools write them: `tail -f` comes back to a file again and again."""
    name, place = "", 0
    while place < len(lines):
        line, rest = lines[place].strip(), [one.strip() for one in lines[place + 1 : place + 3]]
        if match := _OF_TAIL.fullmatch(line):
            name = match[1]
            yield name, None
        elif _RULER.fullmatch(line) and rest[1:] == [line] and _NAME.fullmatch(rest[0]):
            name = _of_host(rest[0].partition(" ")[0])
            yield from [(name, None)] * 3
            place += 2
        else:
            yield name, lines[place]
        place += 1


def _of_host(name: str) -> str:
    """The name of a host's log, for `more` shows files and `clush` hosts between its rulers."""
    return name if re.fullmatch(_LOG, name) else f"{name}.log"


def _of_grep(lines: list[str]) -> _Named:
    """`FILE:text` is a match, `FILE-text` a line around one; with `-n` all have a number, too."""
    found = {match[1] for line in lines if (match := _OF_GREP.match(line))}
    names = {name for name in found if not any(name[: dash.start()] in found for dash in re.finditer("-", name))}
    named = [_of_file(line, names) for line in lines]
    if sum(not name and line not in ("", "--") for name, line in named) > len(named) // 20:
        return []  # a program that tells of files
    is_numbered = _count_up(named)
    return [(name, _COUNTED.sub("", line) if is_numbered and name else line) for name, line in named]


def _of_file(line: str, names: set[str]) -> tuple[str, str]:
    """Which file a line is of, and its text."""
    for pattern in (_OF_GREP, _AROUND):
        if (match := pattern.match(line)) and match[1] in names:
            return match[1], line[match.end() :]
    return "", line


def _count_up(named: Iterable[tuple[str, str]]) -> bool:
    """Whether the lines of each file begin with numbers that grow, as line numbers do, and hours or labels of ranks do not."""
    last: dict[str, int] = {}
    has_grown = False
    for name, line in named:
        match = _COUNTED.match(line) if name else None
        if name and (match is None or int(match[1]) <= last.get(name, 0)):
            return False
        has_grown |= name in last
        last |= {name: int(match[1])} if match else {}
    return has_grown


def _under_own_headings(lines: list[str]) -> _Named:
    """Sections as people make them. Each line that begins like the shell's prompt above the first of them ends one."""
    headings = [name for line in lines if (name := _heading(line))]
    if len(set(headings)) < len(headings):
        return []
    command = next(filter(None, map(_COMMAND.fullmatch, lines)), None)
    named: list[tuple[str, str | None]] = []
    name = ""
    for line in lines:
        found = _heading(line)
        is_prompt = command is not None and line.startswith(command["prompt"])
        name = found or ("" if is_prompt else name)
        named.append((name, None if found or is_prompt else line))
    return named if _are_side_by_side(named) else []


_STEP = re.compile(r"\b(?:step|iter|iteration|epoch|batch)\b[ =:#\[(]{1,3}\d", re.IGNORECASE)


def _are_side_by_side(named: _Named) -> bool:
    """Whether at least two sections tell of steps or errors, at one time where the lines have times. A program that greets from
    each rank under a heading, and then logs for all, does neither."""
    telling, spans = set[str](), dict[str, tuple[float, float]]()
    for name, line in named:
        if line is None or not name:
            continue
        if _STEP.search(line[:400]) or any(mark in line for mark in _ERRORS):
            telling.add(name)
        if (time_s := peel(line).time_s) is not None:
            first, last = spans.get(name, (time_s, time_s))
            spans[name] = min(first, time_s), max(last, time_s)
    in_order = sorted(spans.values())
    is_in_turn = len(spans) > 1 and all(end <= begin for (_, end), (begin, _) in pairwise(in_order))
    return len(telling) > 1 and not is_in_turn


def _in_fences(lines: list[str]) -> _Named:
    """Fenced blocks, each under the heading above it; the rest is of nobody."""
    name, is_inside, above, seen = "", False, "", set[str]()
    for line in lines:
        if _FENCE.fullmatch(line):
            is_inside = not is_inside
            name = (_heading(above) or "") if is_inside else ""
            name = "" if name in seen else name
            seen.add(name)
            above = ""
            yield name, None
        else:
            above = line if line.strip() else above
            yield name, line


def _heading(line: str) -> str | None:
    """Whose lines follow: a file's name, or None if this is no heading."""
    line = line.strip()
    if len(line) > 300:
        return None
    if match := _COMMAND.fullmatch(line):
        return match["file"]
    if match := _KUBECTL.fullmatch(line):
        return _of_host(match[1])
    bare = _TAG.sub(" ", line).strip()
    inner = bare.strip(_DECORATION)
    if len(line) == len(inner) or not inner:
        return None
    if match := _RANK.fullmatch(inner):
        return f"rank_{match[1]}.log"
    return inner if re.fullmatch(_LOG, inner) else None
