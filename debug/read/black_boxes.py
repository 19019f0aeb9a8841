"""Read black boxes: all of one, or only the newest operations where thousands of ranks left one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from titan_ckpt.debug.incident.black_box import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    NUMBER,
    RECORD,
    RECORD_DTYPE,
    RETURNED,
    RUNNING,
    SPLITS_BYTES,
    SPLITS_USED,
    SPLITS_USED_AT,
    TEXT_BYTES,
    TEXT_DIGEST_AT,
    TEXT_END,
    TEXT_USED,
    TEXT_USED_AT,
    read_heartbeat,
    splits_at,
    unpack_members,
    unpack_splits,
)
from titan_ckpt.debug.incident.records import COMPLETED, OPERATION, SCHEDULED, Array, Group, Heartbeat, Splits
from titan_ckpt.debug.read.name_tables import Interner
from titan_ckpt.parsing.json_values import parse_json_line
from titan_ckpt.store.base import Store

Buffer: TypeAlias = bytes | memoryview

LOOK_AHEAD = (
    16  # operations read beyond the count, which is as of the last tick: where all are newer, all of the ring is read
)
MAX_KEY = 1 << 16
MAX_MEMBERS_IN_RUN = 1 << 22
"""Ranks in all distinct groups that the boxes of a run describe."""


@dataclass(
    slots=True, kw_only=True
)  # not frozen: there are tens of thousands, and frozen ones take three times as long to make
class BlackBox:
    """A black box that was read. `home`: the table that its operations are a part of, and where they begin in it; `splits`: of
    all_to_all operations, by row."""

    rank: int
    world_size: int
    pid: int
    count: int
    capacity: int
    operations: Array
    home: tuple[Array, int]
    groups: tuple[Group, ...]
    heartbeat: Heartbeat
    splits: Mapping[int, Splits]


class _Head(NamedTuple):
    """The header of a box; `issued`: operations as of the last tick."""

    magic: bytes
    rank: int
    world_size: int
    pid: int
    capacity: int
    issued: int
    started_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """A box's text as arrays from the records' numbers to positions; the last element is "not known"."""

    columns: Mapping[str, Array]
    groups: tuple[Group, ...]


@dataclass(slots=True, kw_only=True)  # as BlackBox
class RawBox:
    """A box as stored: the bytes of its header and the header parsed, its ring or a part of it, its text parsed, its splits."""

    head: bytes
    header: _Head
    ring: Buffer
    words: _Words
    splits: bytes
    source: str


@dataclass(slots=True)
class BoxReader:
    """Reads the boxes of one run. Ranks of one program write the same text, so each distinct text and line is read once."""

    interner: Interner
    _texts: dict[bytes, _Words] = field(default_factory=dict)
    _known: dict[bytes, _Words] = field(default_factory=dict)  # by the length and digest that a box's head gives
    _lines: dict[bytes, tuple[str, int, Any] | None] = field(default_factory=dict)
    _members: int = 0  # of all groups

    def parse(self, data: bytes, source: str) -> BlackBox:
        """A whole box. ValueError when it is none or is damaged."""
        header = _read_head(data)
        ring_end = HEADER_BYTES + header.capacity * RECORD.size
        if len(data) < ring_end:
            raise ValueError(
                f"is cut off: a ring of {header.capacity} records needs {ring_end} bytes, there are {len(data)}"
            )
        words = self._words(data[ring_end : ring_end + _text_used(data)])
        ring = memoryview(data)[HEADER_BYTES:ring_end]
        splits = data[splits_at(header.capacity) :][:SPLITS_BYTES]
        raw = RawBox(head=data[:HEADER_BYTES], header=header, ring=ring, words=words, splits=splits, source=source)
        return self.finish([raw], header.capacity)[0]

    def read_tail(self, store: Store, path: str, keep: int) -> RawBox:
        """The newest operations of a box, at least `keep` of them, by two or three small reads; `finish` parses them."""
        with store.opened(path) as read:
            head = read(0, HEADER_BYTES)
            header = _read_head(head)
            capacity, count = header.capacity, header.issued
            words = self._known.get(head[TEXT_USED_AT:TEXT_END])
            if words is None:
                words = self._words(read(HEADER_BYTES + capacity * RECORD.size, _text_used(head)))
                if any(head[TEXT_DIGEST_AT:TEXT_END]):
                    self._known[head[TEXT_USED_AT:TEXT_END]] = words
            length = min(keep + LOOK_AHEAD, capacity)
            start = max(0, count - keep) % capacity
            if length == capacity or start + length > capacity:  # small, or around the end: all of it
                start, length = 0, capacity
            ring = read(HEADER_BYTES + start * RECORD.size, length * RECORD.size)
            if len(ring) < length * RECORD.size:
                raise ValueError(f"is cut off: a ring of {capacity} records ends after {len(ring)} bytes")
            if length < capacity and NUMBER.unpack_from(ring, len(ring) - NUMBER.size)[0] > count:
                ring = read(HEADER_BYTES, capacity * RECORD.size)  # the count is too old
            splits = read(splits_at(capacity), SPLITS_BYTES) if _splits_used(head) else b""
        return RawBox(head=head, header=header, ring=ring, words=words, splits=splits, source=path)

    def finish(self, raw: Sequence[RawBox], keep: int) -> list[BlackBox]:
        """The boxes, with at most their `keep` newest operations: parts of one table, in the order of the boxes."""
        lengths = [len(box.ring) // RECORD.size for box in raw]
        owner = np.repeat(np.arange(len(raw), dtype=np.int32), lengths)
        records = np.frombuffer(b"".join(box.ring for box in raw), RECORD_DTYPE)
        number = records["number"].astype(np.int64)
        rows = np.flatnonzero(number > 0)
        rows = rows[np.argsort((owner[rows].astype(np.int64) << 32) | number[rows], kind="stable")]
        ends = np.cumsum(np.bincount(owner[rows], minlength=len(raw)))
        newest = rows[np.arange(len(rows)) >= ends[owner[rows]] - keep]
        known, which = _alike([box.words for box in raw])
        table = _operations(_rows(records, newest), known, which[owner[newest]], self.interner)
        kept = np.cumsum(np.bincount(owner[newest], minlength=len(raw)))
        counts = np.concatenate([[0], number[newest]])[np.where(np.diff(kept, prepend=0), kept, 0)].tolist()
        stops = kept.tolist()
        return [
            _box(box, count, table, start, stop, number[newest[start:stop]])
            for box, count, start, stop in zip(raw, counts, [0, *stops[:-1]], stops, strict=True)
        ]

    def _words(self, text: bytes) -> _Words:
        known = self._texts.get(text)
        if known is None:
            known = self._texts[text] = self._read_words(text)
        return known

    def _read_words(self, text: bytes) -> _Words:
        tables: dict[str, dict[int, Any]] = {"group": {}, "op": {}, "dtype": {}, "site": {}}
        for line in text.split(b"\n"):
            if line not in self._lines:
                self._lines[line] = self._read_line(line)
            entry = self._lines[line]
            if entry is not None:
                tables[entry[0]][entry[1]] = entry[2]
        groups = tables["group"]
        tables["group"] = {key: self.interner.group(group) for key, group in groups.items()}
        nameless = self.interner.group(Group(name="?"))
        columns = {kind: _lookup(entries, nameless if kind == "group" else 0) for kind, entries in tables.items()}
        return _Words(columns=columns, groups=tuple(groups.values()))

    def _read_line(self, line: bytes) -> tuple[str, int, Any] | None:
        """(kind, number, what it stands for); None for a half-written last line, or damage: records then show "not known"."""
        try:
            kind, key, value = parse_json_line(line)
            if type(key) is not int or not 0 <= key < MAX_KEY:
                return None
            if kind == "group":
                group = _group(value, MAX_MEMBERS_IN_RUN - self._members)
                self._members += len(group.members)
                return kind, key, group
            if kind == "op":
                return kind, key, self.interner.op(str(value))
            if kind == "dtype":
                return kind, key, self.interner.dtype([str(value)])
            return (kind, key, _site(value, self.interner)) if kind == "site" else None
        except (ValueError, TypeError, KeyError):
            return None


def _box(raw: RawBox, count: int, table: Array, start: int, stop: int, numbers: Array) -> BlackBox:
    header = raw.header
    used = _splits_used(raw.head)
    splits = unpack_splits(raw.splits, used) if used else {}
    return BlackBox(
        rank=header.rank,
        world_size=header.world_size,
        pid=header.pid,
        count=count,
        capacity=header.capacity,
        operations=table[start:stop],
        home=(table, start),
        groups=raw.words.groups,
        heartbeat=read_heartbeat(raw.head, raw.source),
        splits={row: splits[n] for row, n in enumerate(numbers.tolist()) if n in splits} if splits else {},
    )


def _alike(words: Sequence[_Words]) -> tuple[list[_Words], Array]:
    """Distinct tables of words, and the index of each box's own."""
    places = {id(one): place for place, one in enumerate(words)}
    numbers = {key: number for number, key in enumerate(places)}
    which = np.fromiter((numbers[id(one)] for one in words), np.int64, len(words))
    return [words[place] for place in places.values()], which


def _read_head(head: bytes) -> _Head:
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        raise ValueError("is no black box (wrong magic)")
    header = _Head._make(HEADER.unpack_from(head))
    if not 0 < header.capacity <= 1 << 24:
        raise ValueError(f"damaged header: a ring of {header.capacity} records")
    if header.world_size > 1 << 24 or header.rank > 1 << 24:
        raise ValueError(f"damaged header: rank {header.rank} of {header.world_size}")
    return header


def _text_used(head: bytes) -> int:
    used = int(TEXT_USED.unpack_from(head, TEXT_USED_AT)[0])
    return max(0, min(used, TEXT_BYTES))


def _splits_used(head: bytes) -> int:
    return int(SPLITS_USED.unpack_from(head, SPLITS_USED_AT)[0])


def _group(value: Any, most: int) -> Group:
    name, description, members = (*value, "", [])[:3] if isinstance(value, list) else ("?", "", [])
    ranks = unpack_members(members, most)
    description = "" if description == "undefined" else str(description)
    return Group(name=str(name)[:200], description=description[:200], members=ranks)


def _operations(records: Array, words: Sequence[_Words], which: Array, interner: Interner) -> Array:
    """Records as operations; `which` of the words each record's numbers point into."""
    table = np.zeros(len(records), OPERATION)
    for name, kind in (("group", "group"), ("op", "op"), ("dtypes", "dtype"), ("frames", "site")):
        table[name] = _translate(records[kind], [one.columns[kind] for one in words], which)
    table["sizes"] = _sizes(records["elements"], interner)
    for name, source in (("seq", "seq"), ("p2p", "p2p"), ("peer", "peer"), ("created_ns", "created")):
        table[name] = records[source]
    returned = (records["outcome"] == RETURNED) | ((records["outcome"] == RUNNING) & (records["ended"] > 0))
    table["completed_ns"] = np.where(returned, records["ended"], 0)
    table["state"] = np.where(returned, COMPLETED, SCHEDULED)
    table["retired"] = returned
    return table


def _rows(records: Array, rows: Array) -> Array:
    """Some of the records; as plain numbers they are copied several times as fast."""
    numbers = records.view(np.int64).reshape(len(records), -1)
    some: Array = numbers[rows].reshape(-1).view(RECORD_DTYPE)
    return some


def _sizes(elements: Array, interner: Interner) -> Array:
    distinct, places = np.unique(elements, return_inverse=True)
    return np.array([interner.size([[n]]) if n >= 0 else 0 for n in distinct.tolist()], np.int64)[places]


def _site(value: Any, interner: Interner) -> int:
    """A call stack [[file, line, function], ...], most recent call first."""
    if not isinstance(value, list):
        return 0
    frames = [
        {"filename": str(f[0]), "line": int(f[1]), "name": str(f[2])}
        for f in value
        if isinstance(f, list) and len(f) == 3 and isinstance(f[1], int)
    ]
    return interner.stack(frames) if frames else 0


def _lookup(entries: Mapping[int, int], unknown: int) -> Array:
    table = np.full(max(entries, default=-1) + 2, unknown, np.int32)
    for key, position in entries.items():
        table[key] = position
    return table


def _translate(column: Array, lookups: Sequence[Array], which: Array) -> Array:
    """Each number looked up; those out of range (as unsigned numbers, negative ones are) give the last element."""
    numbers = column.astype(np.uint32)
    if len(lookups) == 1:
        of_one: Array = lookups[0][np.minimum(numbers, len(lookups[0]) - 1)]
        return of_one
    lengths = np.fromiter(map(len, lookups), np.int64, len(lookups))
    starts = np.cumsum(lengths) - lengths
    of_all: Array = np.concatenate(lookups)[starts[which] + np.minimum(numbers, lengths[which] - 1)]
    return of_all
