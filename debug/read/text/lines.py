"""Bytes of a log to lines: terminal codes and progress bars removed, container runtimes' JSON opened, wrapped lines joined.

Sources: Docker's json-file driver (`{"log":...,"stream":...,"time":...}`), the CRI logging format (`TIME stderr P TEXT`; P:
partial), keys of fluent-bit, python-json-logger, Cloud Logging (`jsonPayload`, `resource.labels`), CloudWatch Logs
(`logStreamName`) and `journalctl -o json`; `journalctl -o export` (systemd.journal-fields(7)), an instance of whose templates,
`train@3.service`, is the host `train-3`. SageMaker's log viewer shows ESC
as `#033[`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from titan_ckpt.debug.read.text.messages import LANDMARKS
from titan_ckpt.errors import CheckpointError
from titan_ckpt.parsing.json_values import parse_json

MAX_LINE = 2_000
MAX_JOINED = 1 << 16
MAX_MESSAGE = 4_000
MAX_FIELDS = 100  # of a journal entry
LONGEST_LINE = 1 << 20
_ANSI = re.compile(
    r"#033\[[0-9;]{0,40}m|\x1b(?:\[[0-9;?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|[@-Z\\^_])"
)
_MARKS = tuple(mark.decode() for mark in LANDMARKS)
TEXT_KEYS = (
    "log", "message", "msg", "textPayload", "MESSAGE", "text", "line", "event",
    "_raw", "@message", "_msg", "LogMessage", "LogEntry",
)  # fmt: skip
_OPENED = ("log", "message", "msg")  # of an object that is the text of an entry
TIME_KEYS = (
    "time", "timestamp", "ts", "@timestamp", "asctime", "__REALTIME_TIMESTAMP", "_time", "TimeGenerated",
)  # fmt: skip
_STEP_KEYS = ("step", "global_step", "iteration")
_RANK_KEYS = ("rank", "global_rank", "RANK")
_HOST_KEYS = (
    "pod_name", "pod", "kubernetes.pod.name", "PodName", "task_name", "host", "hostname", "host.name", "node",
    "_HOSTNAME", "logStreamName", "@logStream",
)  # fmt: skip
_INNER_KEYS = (
    "jsonPayload", "kubernetes", "resource", "labels", "k8s", "result", "_source", "attributes",
)  # Cloud Logging, fluent-bit, Splunk, elasticdump: objects within the entry  # fmt: skip
_NAMED_KEYS = ("pod", "host", "node")  # in the Elastic Common Schema objects with a name
_JOURNAL = ("__CURSOR=", "__REALTIME_TIMESTAMP=")  # the first fields of an entry
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


def numbered(chunks: Iterable[tuple[bytes, bool]]) -> Iterator[tuple[int, str]]:
    """Physical lines with their numbers in the file; of chunks marked True only those near a landmark."""
    number = 0
    rest = b""
    for chunk, is_middle in chunks:
        data = rest + chunk
        cut = data.rfind(b"\n") + 1
        data, rest = data[:cut], data[cut:]
        if is_middle:
            for first, part in _windows(data):
                for place, line in enumerate(physical_lines([part]), 1):
                    yield number + first + place, line
        else:
            for place, line in enumerate(physical_lines([data]), 1):
                yield number + place, line
        number += data.count(b"\n")
    for place, line in enumerate(physical_lines([rest]), 1):
        yield number + place, line


BEFORE, AFTER = 2, 60  # lines around a landmark


def _windows(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Parts of `data` around landmarks, each with the number of lines before it."""
    places = sorted({place for mark in LANDMARKS for place in _places(data, mark)})
    end = counted = lines = 0
    for place in places:
        if place < end:
            continue
        start = place
        for _ in range(BEFORE + 1):
            start = data.rfind(b"\n", end, start)
            if start < 0:
                start = end - 1
                break
        start += 1
        end = place
        for _ in range(AFTER):
            end = data.find(b"\n", end) + 1
            if not end:
                end = len(data)
                break
        lines += data.count(b"\n", counted, start)
        counted = start
        yield lines, data[start:end]


MOST_PLACES = 20_000


def _places(data: bytes, mark: bytes) -> Iterator[int]:
    """Where a landmark stands: the first MOST_PLACES times, a line's only once."""
    place = data.find(mark)
    for _ in range(MOST_PLACES):
        if place < 0:
            return
        yield place
        line_end = data.find(b"\n", place)
        place = data.find(mark, line_end) if line_end >= 0 else -1


@dataclass(slots=True)
class Opener:
    """Physical lines to lines as they were written."""

    width: int = 0
    _partial: str = ""
    _entry: dict[str, str] = field(default_factory=dict)

    def open(self, raw: str) -> list[str]:
        """The written lines that a physical line completes."""
        if "\x1b" in raw or "#033[" in raw:
            raw = _ANSI.sub("", raw)
        if self._entry or raw.startswith(_JOURNAL):
            return self._of_journal(raw)
        if raw.startswith("{"):
            return [_ANSI.sub("", line) for text in _from_json(raw) for line in text.split("\n") if line.strip()]
        if raw[4:5] == "-" and (match := _CRI.match(raw[:80])):
            raw = self._whole(raw, match)
        raw = raw.rstrip("\r")
        parts = _without_progress(raw) if "\r" in raw else [raw]
        return [_shortened(part) for part in parts if part]

    def _of_journal(self, raw: str) -> list[str]:
        """A line of a journal entry, whose fields stand in lines of their own up to an empty line."""
        name, equals, value = raw.partition("=")
        if raw.strip():
            if equals and len(self._entry) < MAX_FIELDS:
                self._entry[name] = value
            return [] if self._entry else [raw]
        entry, self._entry = self._entry, {}
        return _from_entry(entry) if "MESSAGE" in entry else []

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
    value = _parsed(raw)
    return (_from_entry(value) if isinstance(value, dict) else []) or [_shortened(raw)]


def _of_metrics(value: Mapping[str, Any]) -> str | None:
    """What an entry of a rank's metrics tells in words; None if it names no step of a rank."""
    step = next((value[key] for key in _STEP_KEYS if type(value.get(key)) is int), None)
    return f"step {step}" if step is not None and _first(value, _RANK_KEYS) else None


def _from_entry(entry: Mapping[str, Any]) -> list[str]:
    """The lines of an entry; [] where it holds no text."""
    value = _flat(entry)
    text = _first(value, TEXT_KEYS) or _of_metrics(value)
    if text is None:
        return []
    if text.startswith("{") and isinstance(inner := _parsed(text), dict) and _first(inner, _OPENED):
        value = {**_flat(inner), **{key: found for key, found in value.items() if key not in TEXT_KEYS}}
        text = _first(inner, _OPENED) or ""
    rank, host, time = (_first(value, keys) for keys in (_RANK_KEYS, _HOST_KEYS, TIME_KEYS))
    prefix = f"{clock} " if (clock := _iso_time(time or "")) else ""
    if not rank and (own := _OWN_RANK.match(text)):
        rank = own[1] or own[2]
    unit = _INSTANCE.fullmatch(str(value.get("_SYSTEMD_UNIT", "")))
    host = f"{unit[1]}-{unit[2]}" if unit else (host or "").rpartition("/")[2]
    prefix += f"[pod/{host}/log] " if host and re.fullmatch(r"[\w.-]{1,80}", host) else ""
    prefix += f"[rank{rank}]: " if rank and rank.isdigit() else ""
    level = _first(value, ("levelname", "level", "severity")) or ""
    level = level if level.isupper() and not (level in _OF_ERRORS and _OF_TRACEBACK.match(text)) else ""
    prefix += f"{level} " if level else ""
    trace = _first(value, ("exc_info", "stack_info", "traceback", "exception"))
    lines = [*text.rstrip("\n").split("\n"), *(trace.split("\n") if trace else ())]
    bare = prefix.removesuffix(f"{level} ") if level else prefix
    return [_shortened((prefix if place == 0 else bare) + line.rstrip("\r")) for place, line in enumerate(lines)]


# What an entry says first of who wrote it, all its lines: `[rank 3] ...`, `rank 3/8 ...`, `rank=3 step=7`.
_OWN_RANK = re.compile(r"(?:\[[Rr]ank[ =_]?(\d{1,6})\]|[Rr]ank[ =](\d{1,6})(?:/\d{1,6}\b| (?=\w+=|Traceback)))")
# A line of a traceback that is an entry of its own, as services make of each line of the standard error.
_OF_ERRORS = ("ERROR", "CRITICAL")
_OF_TRACEBACK = re.compile(
    r"  |Traceback \(|(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception)(?:: |$)"
    r"|(?:[a-z_]\w{0,60}\.){1,8}[A-Z]\w{0,60}: "
)
_INSTANCE = re.compile(r"([\w.-]{1,60})@(\d{1,6})\.service")


def _flat(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """An entry with the fields of its inner objects, which never replace its own, but name a pod rather than the host."""
    found: dict[str, Any] = {}
    inside = [value]
    for _ in range(8):
        if not inside:
            break
        part = inside.pop(0)
        names = {key: part[key].get("name") for key in _NAMED_KEYS if isinstance(part.get(key), dict)}
        found = {**part, **names, **found}
        inside += [part[key] for key in _INNER_KEYS if isinstance(part.get(key), dict)]
    return found


def _iso_time(text: str) -> str:
    """A time as it is, or made of seconds, milli-, micro- or nanoseconds since the epoch; "" if it is none."""
    if re.match(r"\d{4}-\d\d-\d\d[T ]", text):
        return text
    unit = {10: 1, 13: 10**3, 16: 10**6, 19: 10**9}.get(len(text)) if text.isdigit() else None
    return datetime.fromtimestamp(int(text) / unit, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ") if unit else ""


def _parsed(raw: str) -> Any:
    """The JSON value of a line, None if it is none; a number that is not one (Python's `NaN`, `Infinity`) counts as null."""
    for text in (raw, _NO_NUMBER.sub("null", raw)):
        try:
            return parse_json(text.encode("utf-8", "replace"), "a line")
        except CheckpointError:
            continue
    return None


_NO_NUMBER = re.compile(r"(?<=[:,\[ ])-?(?:NaN|Infinity)(?=[,\]} ])")


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

_PRTERUN = " exited on"  # PRRTE's help-prterun.txt breaks its line here, before `signal 9 (Killed).`


def wrap_width(lines: Sequence[str]) -> int:
    """The width at which a terminal broke the lines; 0 if none did: several lines end exactly there, none goes on."""
    lengths = Counter(len(line) for line in lines if not _RULER.fullmatch(line.strip() or "-"))
    widest = max(lengths, default=0)
    full = lengths[widest] + lengths[widest - 1]
    return widest if widest >= LEAST_WIDTH and lengths[widest] >= 2 and full >= 0.05 * len(lines) else 0


def is_broken(message: str, last: str, width: int) -> bool:
    """Whether a message, of which `last` is the last line, goes on: that fills the terminal, or a parenthesis is open. (A line
    that ends with the parenthesis is one of a program, as tracebacks show it.)"""
    if message.endswith(_PRTERUN):
        return True
    if not any(mark in message for mark in _UNFINISHED):
        return False
    is_open = message.count("(") > message.count(")") and not message.rstrip().endswith("(")
    return (0 < width - 1 <= len(last) <= width) or is_open


_NUMBER = re.compile(r"\d+")
_COMPARED = 12  # characters, each number counted as one: as many as a task's or a pod's label has


def begins_alike(message: str, line: str) -> bool:
    """Whether a line begins as a message does, but for numbers: then it is another message, and not the rest of that one."""
    first, second = (_NUMBER.sub("0", text[: 2 * _COMPARED])[:_COMPARED] for text in (message, line))
    return first == second
