"""The small JSON files of a recorder, a drill and `debug collect`: sidecars, errors, exit codes, each value checked.

DamagedError for a file that is not as they write it; the file is then lost, and nothing but it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from titan_ckpt.debug.incident.frames import torch_call, user_frame
from titan_ckpt.debug.incident.records import MAX_RANK, Exit, Frame, Group, Launcher, LogEvent
from titan_ckpt.debug.read.text.error_kinds import kind_of_error
from titan_ckpt.parsing.json_values import JsonValue

MAX_TEXT = 4096
LAST_SECOND = 1e11  # the year 5138
_MAX_CODE = 1 << 32
_DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What a recorder says of its process. `started_s` is by the clock of logs (local time), None if unknown; `began_s` the same
    since 1970. `launch` tells attempts apart."""

    rank: int
    world_size: int
    host: str
    pid: int | None
    coordinates: Mapping[str, int]
    groups: tuple[Group, ...]
    started_s: float | None
    began_s: float | None
    launch: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exits:
    """How the processes of a job ended, or what the kernel says of those that run (`states` and `pids`, by rank)."""

    world_size: int
    exits: tuple[Exit, ...]
    states: Mapping[int, str] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)
    launcher: Launcher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProcess:
    """A process as `debug collect --pid` found it; `rank` is None where its environment has none."""

    host: str
    pid: int
    state: str
    rank: int | None
    world_size: int
    slept_since: int = 0  # times, of the main thread, from one look to the next


def read_process(document: JsonValue) -> LiveProcess:
    """A `.process.json`."""
    rank, slept = document.find("rank"), document.find("slept_since")
    return LiveProcess(
        host=_text(document, "host"), pid=document["pid"].whole(), state=_text(document, "state"),
        rank=None if rank is None or rank.value is None else _rank(rank), world_size=_world_size(document),
        slept_since=0 if slept is None else slept.whole(),
    )  # fmt: skip


def read_sidecar(document: JsonValue) -> Sidecar:
    """The `.sidecar.json` of a rank."""
    coordinates, groups = document.find("coordinates"), document.find("groups")
    launch = document.find("launch")
    started, offset = document.find("started_s"), document.find("utc_offset_s")
    return Sidecar(
        rank=_rank(document["rank"]),
        world_size=_world_size(document),
        host=_text(document, "host"),
        pid=_whole(document, "pid"),
        coordinates={} if coordinates is None else {axis: n.whole(0, MAX_RANK) for axis, n in coordinates.items()},
        groups=() if groups is None else tuple(_group(group) for group in groups.entries()),
        started_s=None if started is None else _seconds(started) + (offset.whole(-_DAY_S, _DAY_S) if offset else 0),
        began_s=None if started is None else _seconds(started),
        launch={} if launch is None else {key: value.text(MAX_TEXT) for key, value in launch.items()},
    )


def read_error(document: JsonValue, source: str) -> LogEvent:
    """The `.error.json` of a rank: the error that ended it."""
    frames = document.find("frames")
    kind, message = _text(document, "type") or "Error", _text(document, "message")
    text = f"{kind}: {message}"
    time_s = document.find("time_s")
    stack = () if frames is None else tuple(_frame(frame) for frame in frames.entries())
    return LogEvent(
        kind=kind_of_error(text),
        rank=_rank(document["rank"]),
        text=text[:400],
        source=source,
        line=0,
        time_s=0.0 if time_s is None else _seconds(time_s),
        frame=user_frame(stack),
        values={"type": kind, **({"call": call} if (call := torch_call(stack)) else {})},
    )


def read_exits(document: JsonValue, source: str) -> Exits:
    """An `exits.json` or `processes.json`."""
    exits, processes, code = document.find("exits"), document.find("processes"), document.find("code")
    return Exits(
        world_size=_world_size(document),
        exits=() if exits is None else tuple(_exit(entry, source) for entry in exits.entries()),
        states={}
        if processes is None
        else {_rank(entry["rank"]): _text(entry, "state") for entry in processes.entries()},
        pids={} if processes is None else {_rank(e["rank"]): p for e in processes.entries() if (p := _whole(e, "pid"))},
        launcher=None if code is None else Launcher(source=source, code=code.whole(-_MAX_CODE, _MAX_CODE)),
    )


def _exit(entry: JsonValue, source: str) -> Exit:
    time_s, was_told, is_first = entry.find("time_s"), entry.find("was_told"), entry.find("is_first")
    return Exit(
        rank=_rank(entry["rank"]),
        code=entry["code"].whole(-_MAX_CODE, _MAX_CODE),
        source=source,
        pid=_whole(entry, "pid"),
        time_s=None if time_s is None else _seconds(time_s),
        was_told=was_told is not None and was_told.flag(),
        is_first=is_first is not None and is_first.flag(),
    )


def _group(entry: JsonValue) -> Group:
    members = entry.find("members")
    return Group(
        name=_text(entry, "name")[:200],
        description=_text(entry, "description")[:200],
        members=() if members is None else tuple(sorted(set(members.wholes(0, MAX_RANK)))),
    )


def _frame(entry: JsonValue) -> Frame:
    parts = list(entry.entries())
    if len(parts) != 4:
        entry.fail("[file, line, function, text]")
    file, line, function, text = parts
    return Frame(
        file=file.text(MAX_TEXT), line=line.whole(), function=function.text(MAX_TEXT), text=text.text()[:MAX_TEXT]
    )


def _rank(value: JsonValue) -> int:
    return value.whole(0, MAX_RANK)


def _world_size(document: JsonValue) -> int:
    found = document.find("world_size")
    return 0 if found is None else found.whole(0, MAX_RANK)


def _whole(document: JsonValue, key: str) -> int | None:
    found = document.find(key)
    return None if found is None else found.whole()


def _text(document: JsonValue, key: str) -> str:
    found = document.find(key)
    return "" if found is None else found.text(MAX_TEXT)


def _seconds(value: JsonValue) -> float:
    if not 0 <= value.number() <= LAST_SECOND:
        value.fail("a time in seconds since 1970")
    return value.number()
