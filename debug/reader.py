"""Read everything a job left behind into one Run. A damaged file becomes a flag, never an error."""

from __future__ import annotations

import gc
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from titan_ckpt.debug.blackbox import HEADER_BYTES, MAGIC, Box, parse_box, read_heartbeat
from titan_ckpt.debug.discovery import Source, find_place, read_source, sources
from titan_ckpt.debug.dumps import ParsedDump, parse_dump
from titan_ckpt.debug.interning import Interner
from titan_ckpt.debug.logs import (
    group_by_rank,
    kind_of_error,
    looks_like_launcher,
    merge_logs,
    parse_launcher,
    parse_mixed_log,
    parse_rank_log,
    user_frame,
)
from titan_ckpt.debug.records import (
    NO_OPERATIONS,
    Array,
    Dump,
    Exit,
    Flag,
    Frame,
    Group,
    Heartbeat,
    Launcher,
    LogEvent,
    RankLog,
    RankRecord,
    Run,
    StackSnapshot,
)
from titan_ckpt.debug.safe_pickle import looks_like_pickle
from titan_ckpt.debug.snapshots import add_box, merge_dumps
from titan_ckpt.debug.stacks import parse_stacks
from titan_ckpt.errors import NotFoundError, StoreError, TitanError, UnsafeContentError
from titan_ckpt.location import local_path, scheme
from titan_ckpt.store import Store, open_store

MAX_RANK = 131_072


@dataclass(slots=True)
class _Rank:
    """What was read of one rank so far."""

    dumps: list[tuple[Dump, Array]] = field(default_factory=list)
    known_groups: dict[str, Group] = field(default_factory=dict)
    stacks: list[StackSnapshot] = field(default_factory=list)
    logs: list[RankLog] = field(default_factory=list)
    box: Box | None = None
    box_source: str = ""
    heartbeat: Heartbeat | None = None
    sidecar: Mapping[str, Any] = field(default_factory=dict)
    process_state: str = ""


@dataclass(slots=True)
class _Reading:
    """State of one `open_run`."""

    store: Store
    interner: Interner = field(default_factory=Interner)
    ranks: defaultdict[int, _Rank] = field(default_factory=lambda: defaultdict(_Rank))
    flags: list[Flag] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    launcher: Launcher | None = None
    world_size: int = 0
    read_stems: set[tuple[int, str]] = field(default_factory=set)
    num_evidence: int = 0
    recorded_ranks: int = 0
    first_record: dict[int, int] = field(default_factory=dict)
    unusable_groups: set[int] = field(default_factory=set)

    def flag(self, name: str, text: str, source: str, rank: int | None = None) -> None:
        self.flags.append(Flag(flag=name, text=text, ranks=() if rank is None else (rank,), source=source))


def open_run(url: str, *, store: Store | None = None) -> Run:
    """Read the newest incident at `url`: a run, an incident folder, a bare folder of dumps or logs, or one dump file.

    NotFoundError if nothing is there, TitanError if nothing there is evidence.
    """
    store, only = _open(url, store)
    place = find_place(store)
    reading = _Reading(store=store)
    with _no_gc():
        for source in sorted(sources(store, place), key=_reading_order):
            if only is None or source.path == only:
                _read(reading, source)
    if reading.num_evidence == 0:
        raise _nothing(store, reading, place.folders)
    return _assemble(reading, place.incident, place.incidents)


def _open(url: str, store: Store | None) -> tuple[Store, str | None]:
    """The store, and the one file to read where the URL names a file."""
    if store is not None:
        return store, None
    store = open_store(url)
    if scheme(url) == "file":
        folder, _, name = local_path(store.url).rpartition("/")
        parent = open_store(folder or "/")
        if parent.exists(name):
            return parent, name
    return store, None


def _nothing(store: Store, reading: _Reading, folders: tuple[str, ...]) -> TitanError:
    if reading.flags:
        first = reading.flags[0]
        return TitanError(
            f"{store}: nothing readable: {len(reading.flags)} damaged files, first: {first.source}: {first.text}"
        )
    where = ", ".join(folder or "the folder itself" for folder in folders) or "no debug/ or logs/ folder"
    return NotFoundError(
        f"{store}: no dump, stack, black box or log found ({where}). Give a run's URL, a folder of Flight Recorder dumps "
        "(TORCH_NCCL_DEBUG_INFO_TEMP_FILE names it), or a folder of logs"
    )


def _reading_order(source: Source) -> tuple[bool, bool, bool, str]:
    """Sidecars first (they date the run); JSON twins after pickles (they hold less); launchers' logs after the ranks'."""
    return not source.stem.endswith(".sidecar"), source.suffix == ".json", source.rank is None, source.path


@contextmanager
def _no_gc() -> Iterator[None]:
    """Millions of short-lived dicts: the cycle collector would take half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read(reading: _Reading, source: Source) -> None:
    try:
        data = read_source(reading.store, source)
        _take(reading, source, data)
    except UnsafeContentError as error:
        reading.flag("DUMP_CORRUPT", f"refused: {error}", source.path, source.rank)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        reading.flag("DUMP_CORRUPT", f"{error}"[:300], source.path, source.rank)
    except StoreError as error:
        reading.flag("DUMP_MISSING", f"cannot be read: {error}"[:300], source.path, source.rank)


def _take(reading: _Reading, source: Source, data: bytes) -> None:
    if source.suffix == ".svg" or not data:
        if source.rank is not None and not data and source.suffix in ("", ".pickle", ".pkl", ".json", ".box"):
            reading.flag("DUMP_CORRUPT", "is empty", source.path, source.rank)
        elif source.rank is None:
            _take_text(reading, source, "")
        return
    if data.startswith(MAGIC) or source.suffix == ".box":
        _take_box(reading, source, data)
    elif looks_like_pickle(data[:2]):
        _take_dump(reading, source, data)
    elif source.suffix == ".json" or data[:1] == b"{":
        _take_json(reading, source, data)
    elif source.suffix in (".pickle", ".pkl") or (source.suffix == "" and b"\0" in data[:4096]):
        raise ValueError("is no pickle (wrong first bytes)")
    else:
        _take_text(reading, source, data.decode("utf-8", "replace"))


def _rank(reading: _Reading, rank: int) -> _Rank:
    if not 0 <= rank <= MAX_RANK:
        raise ValueError(f"rank {rank} is not possible")
    reading.num_evidence += 1
    return reading.ranks[rank]


def _take_dump(reading: _Reading, source: Source, data: bytes) -> None:
    if source.rank is None:
        raise ValueError("the file's name does not tell the rank (expected rank_N or ..._rank_N)")
    parsed = parse_dump(data, source.rank, reading.interner)
    record = _rank(reading, source.rank)
    reading.read_stems.add((source.rank, source.stem))
    _note_dump(reading, source, parsed)
    record.known_groups.update(
        {g.name: g for g in parsed.groups.values() if g.members and g.name and source.rank in g.members}
    )
    record.dumps.append((_dump_record(source, parsed), parsed.operations))


def _dump_record(source: Source, parsed: ParsedDump) -> Dump:
    return Dump(
        source=source.path, kind="flight_recorder", reason=source.reason, version=parsed.version,
        num_operations=len(parsed.operations), first_record_id=parsed.first_record_id,
        time_s=source.modified_s, is_truncated=not parsed.is_whole,
    )  # fmt: skip


def _note_dump(reading: _Reading, source: Source, parsed: ParsedDump) -> None:
    assert source.rank is not None
    if not parsed.is_whole:
        reading.first_record[source.rank] = parsed.first_record_id
    if not parsed.has_usable_groups:
        reading.unusable_groups.add(source.rank)


def _take_box(reading: _Reading, source: Source, data: bytes) -> None:
    box = parse_box(data, source.path, reading.interner)
    record = _rank(reading, box.rank)
    record.box, record.box_source, record.heartbeat = box, source.path, box.heartbeat
    record.known_groups.update({group.name: group for group in box.groups if group.members})
    reading.world_size = max(reading.world_size, box.world_size)


def _take_json(reading: _Reading, source: Source, data: bytes) -> None:
    if source.rank is not None and (source.rank, source.stem) in reading.read_stems:
        return  # the pickle of the same snapshot says all of it and the call stacks too
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        if source.rank is None:
            return  # somebody else's file
        raise ValueError(f"damaged JSON: {error}") from error
    kind = value.get("titan_ckpt") if isinstance(value, dict) else None
    if kind == "sidecar":
        _take_sidecar(reading, value)
    elif kind == "error":
        _take_error(reading, source, value)
    elif kind == "exits":
        _take_exits(reading, source, value)
    elif isinstance(value, dict) and "entries" in value and source.rank is not None:
        _take_dump(reading, source, data)


def _take_sidecar(reading: _Reading, value: Mapping[str, Any]) -> None:
    record = _rank(reading, int(value.get("rank", -1)))
    record.sidecar = value
    reading.recorded_ranks = max(reading.recorded_ranks, min(int(value.get("world_size", 0)), MAX_RANK))
    reading.world_size = max(reading.world_size, min(int(value.get("world_size", 0)), MAX_RANK))
    for item in value.get("groups", []):
        members = tuple(sorted(int(rank) for rank in item.get("members", [])))
        group = Group(name=str(item.get("name", "")), description=str(item.get("description", "")), members=members)
        record.known_groups[group.name] = group


def _take_error(reading: _Reading, source: Source, value: Mapping[str, Any]) -> None:
    frames = tuple(
        Frame(file=str(f[0]), line=int(f[1]), function=str(f[2]), text=str(f[3])) for f in value.get("frames", ())
    )
    text = f"{value.get('type', 'Error')}: {value.get('message', '')}"
    event = LogEvent(
        kind=kind_of_error(text),
        rank=int(value["rank"]),
        text=text[:400],
        source=source.path,
        line=0,
        time_s=float(value.get("time_s", 0.0)),
        frame=user_frame(frames),
        values={"type": str(value.get("type", ""))},
    )
    _rank(reading, event.rank).logs.append(RankLog(source=source.path, events=(event,)))


def _take_exits(reading: _Reading, source: Source, value: Mapping[str, Any]) -> None:
    reading.num_evidence += 1
    reading.world_size = max(reading.world_size, min(int(value.get("world_size", 0)), MAX_RANK))
    for item in value.get("exits", []):
        reading.exits.append(
            Exit(
                rank=int(item["rank"]),
                code=int(item["code"]),
                source=source.path,
                pid=item.get("pid"),
                time_s=item.get("time_s"),
                was_told=bool(item.get("was_told")),
                is_first=bool(item.get("is_first")),
            )
        )
    for item in value.get("processes", []):
        reading.ranks[int(item["rank"])].process_state = str(item.get("state", ""))
    if "code" in value:
        reading.launcher = Launcher(source=source.path, code=int(value["code"]))


def _take_text(reading: _Reading, source: Source, text: str) -> None:
    if source.rank is not None:
        _take_rank_text(reading, source, text)
        return
    if looks_like_launcher(text) or "launcher" in source.stem or "torchrun" in source.stem:
        reading.num_evidence += 1
        reading.launcher, exits = parse_launcher(text, source.path)
        reading.exits.extend(exits)
    for rank, log in parse_mixed_log(text, source.path).items():
        _rank(reading, rank).logs.append(log)


SLACK_S = 10.0  # from a launch to the start of the recorder


def _log_starts_s(reading: _Reading) -> float | None:
    """When this incident's process started, by the clock of logs (local time); None where no recorder told."""
    starts = [
        float(side["started_s"]) + float(side.get("utc_offset_s", 0))
        for found in reading.ranks.values()
        if "started_s" in (side := found.sidecar)
    ]
    return min(starts) - SLACK_S if starts else None


def _take_rank_text(reading: _Reading, source: Source, text: str) -> None:
    assert source.rank is not None
    if reading.recorded_ranks and source.rank >= reading.recorded_ranks and source.suffix in (".log", ".out", ".err"):
        return  # of an earlier, larger run
    record = _rank(reading, source.rank)
    has_stacks = "most recent call first" in text[:4096] and "Traceback" not in text[:4096]
    if source.suffix == ".stacks" or (has_stacks and source.suffix in ("", ".txt")):
        record.stacks.append(parse_stacks(text, source.path, source.reason))
        return
    record.logs.append(parse_rank_log(text, source.path, source.rank, since_s=_log_starts_s(reading)))
    if "(most recent call first)" in text and "Fatal Python error" in text:
        crash = text[text.index("Fatal Python error") :]
        record.stacks.append(parse_stacks(crash, source.path, "fatal"))


# ------------------------------------------------------------------------------------------------------- assembling


def _assemble(reading: _Reading, incident: str, incidents: tuple[str, ...]) -> Run:
    exits = group_by_rank(reading.exits)
    numbers = set(reading.ranks) | set(exits)
    largest = max((max(group.members) for group in reading.interner.groups if group.members), default=-1)
    world_size = max(reading.world_size, min(largest, MAX_RANK) + 1, max(numbers, default=-1) + 1)
    for rank in range(min(world_size, MAX_RANK)):
        if rank not in reading.ranks:
            reading.ranks[rank] = _Rank()
    with_box = [found for found in reading.ranks.values() if found.box]
    prefer_box = len(with_box) == len(reading.ranks) and any(not found.dumps for found in with_box)
    ranks = {
        rank: _rank_record(reading, rank, exits.get(rank), prefer_box=prefer_box) for rank in sorted(reading.ranks)
    }
    run = Run(
        url=str(reading.store),
        incident=incident,
        world_size=world_size,
        ranks=ranks,
        groups=tuple(reading.interner.groups),
        names=reading.interner.names(),
        launcher=reading.launcher,
        incidents=incidents,
    )
    return replace(run, flags=(*reading.flags, *_flags(reading, run)), wrappers=_wrappers(run))


def _wrappers(run: Run) -> frozenset[tuple[str, int]]:
    """Lines through which operations of several kinds are called: (file, line) seen below two or more op names."""
    pairs: set[int] = set()
    for record in run.ranks.values():
        table = record.operations
        pairs.update(np.unique((table["op"].astype(np.int64) << 32) | table["frames"]).tolist())
    ops: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for pair in pairs:
        frame = user_frame(run.names.frames[pair & 0xFFFFFFFF])
        if frame is not None:
            ops[frame.file, frame.line].add(pair >> 32)
    return frozenset(place for place, used_by in ops.items() if len(used_by) > 1)


def _rank_record(reading: _Reading, rank: int, exit_: Exit | None, *, prefer_box: bool) -> RankRecord:
    found = reading.ranks[rank]
    tables = [_with_known_groups(table, found.known_groups, reading.interner) for _, table in found.dumps]
    box = found.box.operations if found.box else NO_OPERATIONS
    box = _with_known_groups(box, found.known_groups, reading.interner)
    dumps = [dump for dump, _ in found.dumps]
    if found.box:
        dumps.append(
            Dump(
                source=found.box_source,
                kind="black_box",
                reason="",
                version="1",
                num_operations=len(box),
                first_record_id=max(0, found.box.count - found.box.capacity),
                is_truncated=found.box.count > found.box.capacity,
            )
        )
    side = found.sidecar
    return RankRecord(
        rank=rank,
        host=str(side.get("host", "")),
        pid=side.get("pid") if isinstance(side.get("pid"), int) else (found.box.pid if found.box else None),
        coordinates={str(k): int(v) for k, v in dict(side.get("coordinates") or {}).items()},
        operations=add_box(merge_dumps(tables), box, prefer_box=prefer_box),
        dumps=tuple(dumps),
        stacks=tuple(found.stacks),
        log=merge_logs(found.logs),
        exit=exit_,
        heartbeat=found.heartbeat,
        process_state=found.process_state,
        has_recorder=bool(side) or found.box is not None,
    )


def _with_known_groups(table: Array, known: Mapping[str, Group], interner: Interner) -> Array:
    """Operations whose groups carry members wherever this rank's own process knew them (gloo's dumps do not)."""
    if not len(table) or not known:
        return table
    for position in np.unique(table["group"]):
        group = interner.groups[position]
        members = known[group.name].members if group.name in known else ()
        description = group.description or (known[group.name].description if group.name in known else "")
        better = Group(name=group.name, description=_described(description), members=members or group.members)
        if better != group:
            table["group"][table["group"] == position] = interner.group(better)
    return table


def _described(description: str) -> str:
    return "" if description == "undefined" else description


def _flags(reading: _Reading, run: Run) -> Iterator[Flag]:
    if reading.first_record:
        ranks = tuple(sorted(reading.first_record))
        yield Flag(flag="RING_TRUNCATED", ranks=ranks, text="the ring buffer was full: the oldest operations are gone")
    with_dump = {rank for rank, record in run.ranks.items() if record.dumps}
    if with_dump and len(with_dump) < len(run.ranks):
        missing = tuple(rank for rank in run.ranks if rank not in with_dump)
        yield Flag(flag="DUMP_MISSING", ranks=missing, text="no dump and no black box of these ranks")
    versions = {
        dump.version for record in run.ranks.values() for dump in record.dumps if dump.kind == "flight_recorder"
    }
    if len(versions) > 1:
        yield Flag(flag="VERSION_MIX", text=f"dumps of different versions: {', '.join(sorted(versions))}")
    for name, members in _conflicts(run):
        yield Flag(
            flag="PG_CONFIG_CONFLICT",
            ranks=members,
            text=f"ranks disagree about who belongs to group {name}: it is treated as several groups",
        )
    unusable = tuple(sorted(r for r in reading.unusable_groups if _has_unknown_members(run, r)))
    if unusable:
        yield Flag(
            flag="PG_CONFIG_UNUSABLE",
            ranks=unusable,
            text="the dumps do not say who belongs to a group (gloo never does); members are those seen using it",
        )


def _conflicts(run: Run) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Groups of one name whose member lists overlap without being equal, with the ranks in question."""
    by_name: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for group in run.groups:
        if group.members:
            by_name[group.name].add(group.members)
    for name, lists in by_name.items():
        counts = Counter(rank for members in lists for rank in members)
        shared = tuple(sorted(rank for rank, count in counts.items() if count > 1))
        if shared:
            yield name, shared


def _has_unknown_members(run: Run, rank: int) -> bool:
    return any(not run.groups[position].members for position in np.unique(run.ranks[rank].operations["group"]))


def read_box_heartbeat(store: Store, path: str) -> Heartbeat | None:
    """Only the heartbeat of a box, by one small read; None when it is no box (yet)."""
    try:
        head = store.read(path, 0, HEADER_BYTES)
    except StoreError:
        return None
    return read_heartbeat(head, path) if head.startswith(MAGIC) else None
