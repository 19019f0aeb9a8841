"""Bytes of a log to lines: terminal codes and progress bars removed, container runtimes' JSON opened, wrapped lines joined.

Sources: Docker's json-file driver (`{"log":...,"stream":...,"time":...}`), the CRI logging format (`TIME stderr P TEXT`; P:
partial), fluent-bit's and python-json-logger's keys.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_ckpt.debug.read.text.messages import LANDMARKS

MAX_LINE = 2_000
MAX_JOINED = 1 << 16
MAX_MESSAGE = 4_000
LONGEST_LINE = 1 << 20
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|[@-Z\\^_])")
_MARKS = tuple(mark.decode() for mark in LANDMARKS)
_TEXT_KEYS = ("log", "message", "msg", "textPayload", "MESSAGE", "text", "line", "event")
_TIME_KEYS = ("time", "timestamp", "ts", "@timestamp", "asctime")
_RANK_KEYS = ("rank", "global_rank", "RANK")
_HOST_KEYS = ("host", "hostname", "node", "pod", "pod_name")
_CRI = re.compile(r"(\d{4}-\d\d-\d\dT\S{8,30} std(?:out|err) )([PF]) ")


def physical_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines of consecutive chunks; what is longer than LONGEST_LINE is cut there."""
    rest = b""
    for chunk in chunks:
        parts = (rest + chunk).split(b"\n")
        rest = parts.pop()
        for part in parts:
            yield part.decode("utf-8", "replace")
        if len(rest) > LONGEST_LINE:
            rest = rest[:MAX_LINE] + b" ... " + rest[-MAX_LINE:]
    if rest:
        yield rest.decode("utf-8", "replace")


@dataclass(slots=True)
class Opener:
    """Physical lines to lines as they were written."""

    width: int = 0
    _partial: str = ""
    _held: str = ""

    def open(self, raw: str) -> list[str]:
        """The written lines that a physical line completes."""
        if "\x1b" in raw:
            raw = _ANSI.sub("", raw)
        if raw.startswith("{"):
            return [_ANSI.sub("", line) for text in _from_json(raw) for line in text.split("\n") if line.strip()]
        if raw[4:5] == "-" and (match := _CRI.match(raw[:80])):
            raw = self._whole(raw, match)
        raw = raw.rstrip("\r")
        parts = _without_progress(raw) if "\r" in raw else [raw]
        return [_shortened(part) for part in parts if part]

    def _whole(self, raw: str, match: re.Match[str]) -> str:
        """A CRI line with the partial ones before it; "" while it is partial itself."""
        text = raw[match.end() :]
        if self._partial:
            text = self._partial[:MAX_JOINED] + text
        if match[2] == "P":
            self._partial = text
            return ""
        self._partial = ""
        return f"{match[1]}F {text}"


def _without_progress(raw: str) -> list[str]:
    """Of a line that was written over and over: what is no progress bar, with the prefix of the first."""
    parts = [part for part in raw.split("\r") if part.strip()]
    kept = [part for part in parts[:-1] if any(mark in part for mark in _MARKS)]
    return [*kept, *parts[-1:]]


def _shortened(line: str) -> str:
    """At most about MAX_LINE characters: the beginning, and the part that says something."""
    if len(line) <= MAX_LINE:
        return line
    places = [place for mark in _MARKS if (place := line.find(mark, MAX_LINE - 400)) >= 0]
    if not places:
        return line[:MAX_LINE]
    first = max(0, min(places) - 300)
    return f"{line[:300]} ... {line[first : first + MAX_LINE]}"


def _from_json(raw: str) -> list[str]:
    """The text of a JSON line with its time, rank and host put before it as prefixes; the line itself where it holds none."""
    if len(raw) > MAX_JOINED:
        return [_shortened(raw)]
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return [_shortened(raw)]
    if not isinstance(value, dict):
        return [_shortened(raw)]
    text = _first(value, _TEXT_KEYS)
    if text is None:
        return [_shortened(raw)]
    rank, host, time = (_first(value, keys) for keys in (_RANK_KEYS, _HOST_KEYS, _TIME_KEYS))
    prefix = f"{time} " if time and re.match(r"\d{4}-\d\d-\d\d[T ]", time) else ""
    prefix += f"[pod/{host}/log] " if host and re.fullmatch(r"[\w.-]{1,80}", host) else ""
    prefix += f"[rank{rank}]: " if rank and rank.isdigit() else ""
    level = _first(value, ("levelname", "level", "severity")) or ""
    prefix += f"{level} " if level.isupper() else ""
    trace = _first(value, ("exc_info", "stack_info", "traceback", "exception"))
    lines = [*text.rstrip("\n").split("\n"), *(trace.split("\n") if trace else ())]
    bare = prefix.removesuffix(f"{level} ") if level else prefix
    return [_shortened((prefix if place == 0 else bare) + line.rstrip("\r")) for place, line in enumerate(lines)]


def _first(value: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """The first of `keys` with a text or a number."""
    for key in keys:
        found = value.get(key)
        if isinstance(found, str) and found:
            return found
        if isinstance(found, int) and not isinstance(found, bool):
            return str(found)
    return None


# --------------------------------------------------------------------------------------------------- wrapped lines

LEAST_WIDTH = 60
_RULER = re.compile(r"(.)\1*$")
_UNFINISHED = ("atchdog", "WorkNCCL(", "ProcessGroup", "monitoredBarrier", "running collective", "exception:")


def wrap_width(lines: Sequence[str]) -> int:
    """The width at which a terminal broke the lines; 0 if none did: several lines end exactly there, none goes on."""
    lengths = Counter(len(line) for line in lines if not _RULER.fullmatch(line.strip() or "-"))
    widest = max(lengths, default=0)
    full = lengths[widest] + lengths[widest - 1]
    return widest if widest >= LEAST_WIDTH and lengths[widest] >= 2 and full >= 0.05 * len(lines) else 0


def is_broken(message: str, last: str, width: int) -> bool:
    """Whether a message, of which `last` is the last line, goes on: that fills the terminal, or a parenthesis is open."""
    if not any(mark in message for mark in _UNFINISHED):
        return False
    return (0 < width - 1 <= len(last) <= width) or message.count("(") > message.count(")")
