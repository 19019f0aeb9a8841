"""Jobs of a few ranks in a few lines of text, for exact tests of the analyzer.

    0 2: all_reduce@5 x:broadcast(8)@6?     ranks: operations, oldest first
    1: all_reduce@5 send>0?
    group x: 0 1                            members of a group other than that of all ranks
    group y as x: 0 1 2                     another one that these ranks call by the same name
    at 1: /job/data.py 7 load               file, line and function of a rank's main thread
    exit 1: -9                              how it ended
    store 1: 0                              its log says that it waited for rank 0's key in the store
    knows 1: x                              groups that its recorder wrote down
    splits 1: world#5 4,4,9 4,4,4           of an operation, the elements sent to each member and those expected of each

An operation: `group:` (default: all ranks), name, `>1` or `<1` the peer of a send or recv or `^1` the root, `(sizes)`, `/dtype`
(`none`: not recorded), `@line` of train.py, `?` pending.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from titan_ckpt.debug.incident.kinds import DumpKind, EventKind
from titan_ckpt.debug.incident.records import (
    COMPLETED,
    OPERATION,
    RECV,
    SCHEDULED,
    SEND,
    Array,
    Dump,
    Exit,
    Frame,
    Group,
    LogEvent,
    Names,
    RankLog,
    RankRecord,
    Run,
    Splits,
    StackSnapshot,
    Thread,
)

START_NS = 1_700_000_000 * 10**9
SECOND_NS = 10**9
_WORD = re.compile(
    r"(?:(?P<group>\w+):)?(?P<op>[a-z_]+)(?:(?P<way>[<>^])(?P<peer>\d+))?(?:\((?P<sizes>[^)]*)\))?(?:/(?P<dtype>\w+))?"
    r"(?:@(?P<line>\d+))?(?P<open>\?)?\Z"
)


class _Tables:
    """The names that operations refer to by their places."""

    def __init__(self, groups: Sequence[str]) -> None:
        self.groups = list(groups)
        self.ops: list[str] = []
        self.sizes, self.dtypes = [""], [""]  # the first: not known
        self.frames: list[tuple[Frame, ...]] = [()]

    def row(self, word: str, number: int, seen: Counter[tuple[str, ...]]) -> tuple[object, ...]:
        found = _WORD.match(word)
        assert found is not None, word
        group, op, way = found["group"] or "world", found["op"], found["way"]
        key = (group, op, found["peer"]) if way in ("<", ">") else (group,)
        seen[key] += 1
        line = int(found["line"] or 0)
        frames = (Frame(file="/job/train.py", line=line, function="step"),) if line else ()
        state, p2p = SCHEDULED if found["open"] else COMPLETED, {">": SEND, "<": RECV}.get(way or "", 0)
        places = (
            _place(self.dtypes, (found["dtype"] or "Float").replace("none", "")),
            _place(self.sizes, (found["sizes"] or "4").replace(",", ", ").replace("none", "")),
        )
        return (
            self.groups.index(group), seen[key], _place(self.ops, op), p2p, state, not found["open"], *places,
            _place(self.frames, frames), int(found["peer"] or -1), 0, START_NS + number * SECOND_NS, 0, 0,
        )  # fmt: skip


def _place(table: list[Any], value: Any) -> int:
    if value not in table:
        table.append(value)
    return table.index(value)


@dataclass(slots=True)
class _Rank:
    """What the text says of a rank."""

    words: list[str]
    frame: Frame | None = None
    code: int | None = None
    groups: tuple[str, ...] = ()
    awaited: str = ""
    splits: dict[tuple[str, int], Splits] = field(default_factory=dict)


def job(text: str) -> Run:
    """The run that a text describes."""
    ranks: dict[int, _Rank] = {}
    members: dict[str, tuple[int, ...]] = {"world": ()}
    called = {"world": "world"}
    for line in text.strip().splitlines():
        left, _, right = line.strip().partition(": ")
        kind, *names = left.rstrip(":").split()
        if kind == "group":
            members[names[0]] = tuple(map(int, right.split()))
            called[names[0]] = names[-1]
        elif kind.isdigit():
            ranks |= {int(rank): _Rank(right.split()) for rank in (kind, *names)}
        else:
            _describe(ranks[int(names[0])], kind, right.split())
    ranks = dict(sorted(ranks.items()))
    members["world"] = tuple(ranks)
    tables = _Tables(list(members))
    groups = {
        name: Group(name=called[name], description="default_pg" if name == "world" else called[name], members=those)
        for name, those in members.items()
    }
    records = {rank: _record(rank, one, tables, groups) for rank, one in ranks.items()}
    names_ = Names(
        ops=tuple(tables.ops), sizes=tuple(tables.sizes), dtypes=tuple(tables.dtypes), frames=tuple(tables.frames)
    )
    return Run(url="", incident="", world_size=len(ranks), ranks=records, groups=tuple(groups.values()), names=names_)


def _describe(rank: _Rank, kind: str, words: list[str]) -> None:
    if kind == "at":
        rank.frame = Frame(file=words[0], line=int(words[1]), function=words[2])
    elif kind == "exit":
        rank.code = int(words[0])
    elif kind == "store":
        rank.awaited = words[0]
    elif kind == "splits":
        group, _, number = words[0].partition("#")
        sent, expected = (tuple(map(int, part.split(","))) for part in words[1:])
        rank.splits[group, int(number)] = sent, expected
    else:
        assert kind == "knows", kind
        rank.groups = tuple(words)


def _record(rank: int, one: _Rank, tables: _Tables, groups: Mapping[str, Group]) -> RankRecord:
    seen: Counter[tuple[str, ...]] = Counter()
    rows = [tables.row(word, number, seen) for number, word in enumerate(one.words)]
    table: Array = np.array(rows, OPERATION)
    dump = Dump(source="d", kind=DumpKind.FLIGHT_RECORDER, reason="", version="2.10", num_operations=len(rows))
    main = Thread(name="", frames=(one.frame,) if one.frame else (), is_main=True)
    stack = StackSnapshot(source="s", reason="stall", threads=(main,))
    return RankRecord(
        rank=rank,
        operations=table,
        dumps=(dump,) if rows else (),
        stacks=(stack,) if one.frame else (),
        log=RankLog(source="l", events=(_store_wait(rank, one.awaited),)) if one.awaited else None,
        exit=None if one.code is None else Exit(rank=rank, code=one.code, source="e"),
        groups=tuple(groups[name] for name in one.groups),
        splits={(tables.groups.index(group), number): splits for (group, number), splits in one.splits.items()},
    )


def _store_wait(rank: int, awaited: str) -> LogEvent:
    return LogEvent(kind=EventKind.STORE_WAIT, rank=rank, text="waits", source="l", line=1, values={"rank": awaited})
