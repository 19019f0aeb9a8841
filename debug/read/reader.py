"""Read everything a job left behind into one Run. A damaged file becomes a flag, never an error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from titan_ckpt.debug.incident.black_box import HEADER_BYTES, MAGIC, read_heartbeat
from titan_ckpt.debug.incident.frames import user_frame
from titan_ckpt.debug.incident.gc_off import no_gc
from titan_ckpt.debug.incident.operation_table import MOST_OPERATIONS
from titan_ckpt.debug.incident.records import Dump, Exit, Frame, Group, Heartbeat, Launcher, LogEvent, RankLog, Run
from titan_ckpt.debug.read.assemble import assemble
from titan_ckpt.debug.read.black_boxes import Box, RawBox
from titan_ckpt.debug.read.discovery import Source, find_place, read_source, sources
from titan_ckpt.debug.read.evidence import MAX_RANK, RankEvidence, Reading
from titan_ckpt.debug.read.flight_recorder import ParsedDump, parse_dump
from titan_ckpt.debug.read.logs import (
    kind_of_error,
    looks_like_launcher,
    parse_launcher,
    parse_mixed_log,
    parse_rank_log,
)
from titan_ckpt.debug.read.plain_pickle import looks_like_pickle
from titan_ckpt.debug.read.stacks import parse_stacks
from titan_ckpt.errors import NotFoundError, StoreError, TitanError, UnsafeContentError
from titan_ckpt.location import local_path, scheme
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store


def open_run(url: str, *, store: Store | None = None) -> Run:
    """Read the newest incident at `url`: a run, an incident folder, a bare folder of dumps or logs, or one dump file.

    NotFoundError if nothing is there, TitanError if nothing there is evidence.
    """
    store, only = _open(url, store)
    place = find_place(store)
    reading = Reading(store=store)
    with no_gc():
        found = [source for source in sources(store, place) if only is None or source.path == only]
        keep = _operations_per_box(found)
        tails = [source for source in found if keep and source.path.endswith(".box")]
        together = MOST_OPERATIONS // max(keep, 1)
        for start in range(0, len(tails), together):
            _read_tails(reading, tails[start : start + together], keep)
        for source in sorted(found, key=_reading_order):
            if not keep or not source.path.endswith(".box"):
                _read(reading, source)
        if reading.num_evidence == 0:
            raise _nothing(store, reading, place.folders)
        return assemble(reading, place.incident, place.incidents)


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


def _nothing(store: Store, reading: Reading, folders: tuple[str, ...]) -> TitanError:
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


MOST_BOX_OPERATIONS = 1 << 19
LEAST_BOX_OPERATIONS = 32
MANY_BOXES = 256


def _operations_per_box(found: Sequence[Source]) -> int:
    """How many operations to read of each black box; 0: all."""
    boxes = sum(source.path.endswith(".box") for source in found)
    return max(LEAST_BOX_OPERATIONS, MOST_BOX_OPERATIONS // boxes) if boxes > MANY_BOXES else 0


def _read_tails(reading: Reading, found: Sequence[Source], keep: int) -> None:
    """The newest operations of many black boxes."""
    raw: list[tuple[Source, RawBox]] = []
    for source in found:
        try:
            raw.append((source, reading.boxes.read_tail(reading.store, source.path, keep)))
        except _DAMAGE as error:
            _flag(reading, source, error)
    for (source, _), box in zip(raw, reading.boxes.finish([box for _, box in raw], keep), strict=True):
        try:
            _take_box(reading, source, box)
        except _DAMAGE as error:
            _flag(reading, source, error)


def _read(reading: Reading, source: Source) -> None:
    try:
        _take(reading, source, read_source(reading.store, source))
    except _DAMAGE as error:
        _flag(reading, source, error)


_DAMAGE = (UnsafeContentError, StoreError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError)


def _flag(reading: Reading, source: Source, error: Exception) -> None:
    """A file that cannot be read or understood becomes a flag."""
    name, text = "DUMP_CORRUPT", f"{error}"[:300]
    if isinstance(error, UnsafeContentError):
        text = f"refused: {error}"
    elif isinstance(error, StoreError):
        name, text = "DUMP_MISSING", f"cannot be read: {error}"[:300]
    reading.flag(name, text, source.path, source.rank)


def _take(reading: Reading, source: Source, data: bytes) -> None:
    if source.suffix == ".svg" or not data:
        if source.rank is not None and not data and source.suffix in ("", ".pickle", ".pkl", ".json", ".box"):
            reading.flag("DUMP_CORRUPT", "is empty", source.path, source.rank)
        elif source.rank is None:
            _take_text(reading, source, "")
        return
    if data.startswith(MAGIC) or source.suffix == ".box":
        _take_box(reading, source, reading.boxes.parse(data, source.path))
    elif looks_like_pickle(data[:2]):
        _take_dump(reading, source, data)
    elif source.suffix == ".json" or data[:1] == b"{":
        _take_json(reading, source, data)
    elif source.suffix in (".pickle", ".pkl") or (source.suffix == "" and b"\0" in data[:4096]):
        raise ValueError("is no pickle (wrong first bytes)")
    else:
        _take_text(reading, source, data.decode("utf-8", "replace"))


def _rank(reading: Reading, rank: int) -> RankEvidence:
    if not 0 <= rank <= MAX_RANK:
        raise ValueError(f"rank {rank} is not possible")
    reading.num_evidence += 1
    return reading.ranks[rank]


def _take_dump(reading: Reading, source: Source, data: bytes) -> None:
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


def _note_dump(reading: Reading, source: Source, parsed: ParsedDump) -> None:
    assert source.rank is not None
    if not parsed.is_whole:
        reading.first_record[source.rank] = parsed.first_record_id
    if not parsed.has_usable_groups:
        reading.unusable_groups.add(source.rank)


def _take_box(reading: Reading, source: Source, box: Box) -> None:
    record = _rank(reading, box.rank)
    record.box, record.box_source, record.heartbeat = box, source.path, box.heartbeat
    record.known_groups.update({group.name: group for group in box.groups if group.members})
    reading.world_size = max(reading.world_size, box.world_size)


def _take_json(reading: Reading, source: Source, data: bytes) -> None:
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
    elif isinstance(value, dict) and ("entries" in value or "pg_config" in value) and source.rank is not None:
        _take_dump(reading, source, data)


def _take_sidecar(reading: Reading, value: Mapping[str, Any]) -> None:
    record = _rank(reading, int(value.get("rank", -1)))
    record.sidecar = value
    reading.recorded_ranks = max(reading.recorded_ranks, min(int(value.get("world_size", 0)), MAX_RANK))
    reading.world_size = max(reading.world_size, min(int(value.get("world_size", 0)), MAX_RANK))
    for item in value.get("groups", []):
        members = tuple(sorted(int(rank) for rank in item.get("members", [])))
        group = Group(name=str(item.get("name", "")), description=str(item.get("description", "")), members=members)
        record.known_groups[group.name] = group


def _take_error(reading: Reading, source: Source, value: Mapping[str, Any]) -> None:
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


def _take_exits(reading: Reading, source: Source, value: Mapping[str, Any]) -> None:
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


def _take_text(reading: Reading, source: Source, text: str) -> None:
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


def _log_starts_s(reading: Reading) -> float | None:
    """When this incident's process started, by the clock of logs (local time); None where no recorder told."""
    starts = [
        float(side["started_s"]) + float(side.get("utc_offset_s", 0))
        for found in reading.ranks.values()
        if "started_s" in (side := found.sidecar)
    ]
    return min(starts) - SLACK_S if starts else None


def _take_rank_text(reading: Reading, source: Source, text: str) -> None:
    assert source.rank is not None
    if reading.recorded_ranks and source.rank >= reading.recorded_ranks and source.suffix in (".log", ".out", ".err"):
        return  # of an earlier, larger run
    record = _rank(reading, source.rank)
    has_stacks = "most recent call first" in text[:4096] and "Traceback" not in text[:4096]
    if source.suffix == ".stacks" or (has_stacks and source.suffix in ("", ".txt")):
        if source.reason == "gil":
            text = text[max(0, text.rfind("Timeout (")) :]  # the timer may have gone off before: the last time counts
        is_abort = source.reason == "fatal" and "Fatal Python error: Aborted" in text[:200]
        record.stacks.append(parse_stacks(text, source.path, "fatal abort" if is_abort else source.reason))
        return
    record.logs.append(parse_rank_log(text, source.path, source.rank, since_s=_log_starts_s(reading)))
    if "(most recent call first)" in text and "Fatal Python error" in text:
        crash = text[text.index("Fatal Python error") :]
        is_abort = crash.startswith("Fatal Python error: Aborted")
        record.stacks.append(parse_stacks(crash, source.path, "fatal abort" if is_abort else "fatal"))


def read_box_heartbeat(store: Store, path: str) -> Heartbeat | None:
    """Only the heartbeat of a box, by one small read; None when it is no box (yet)."""
    try:
        head = store.read(path, 0, HEADER_BYTES)
    except StoreError:
        return None
    return read_heartbeat(head, path) if head.startswith(MAGIC) else None
