"""Where the ranks' own records contradict each other: members of groups, the moments of dumps, clocks. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan_ckpt.debug.incident.kinds import DumpKind, FlagKind
from titan_ckpt.debug.incident.operation_table import operation_blocks, pairs_of
from titan_ckpt.debug.incident.records import COMPLETED, Array, Flag, LogEvent, Run

# Nobody leaves these before everybody has entered them.
MEETINGS = ("all_reduce", "barrier", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
DUMP_SKEW_S = 120.0
CLOCK_SKEW_NS = 1_000_000_000
LEAST_COMMON = 4
OLD_NS = 900 * 10**9  # by which the clocks of a job's hosts hardly differ
ZONES_S = 15 * 3600.0  # logs tell local times, of zones that are up to 14 h from UTC
MOST_COMPARED = 8  # ranks whose operations are looked up


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """One name for groups of different members: which ranks use which list, and the ranks that two lists share."""

    name: str
    users: Mapping[tuple[int, ...], tuple[int, ...]]
    shared: tuple[int, ...]


def conflicts(run: Run) -> list[Conflict]:
    """Groups of one name whose member lists overlap without being equal, among those that ranks used or knew."""
    users: defaultdict[str, dict[tuple[int, ...], set[int]]] = defaultdict(dict)
    for group in run.groups:
        if group.members:
            users[group.name].setdefault(group.members, set())
    for rank, record in run.ranks.items():
        for group in record.groups:
            if rank in group.members:
                users[group.name].setdefault(group.members, set()).add(rank)
    several = {name: lists for name, lists in users.items() if len(lists) > 1}
    for position, group in enumerate(run.groups):
        if group.members and group.name in several:
            using = (r for r, record in run.ranks.items() if bool((record.operations["group"] == position).any()))
            several[group.name][group.members].update(using)
    return [found for name, lists in several.items() if (found := _conflict(name, lists)) is not None]


def _conflict(name: str, users: Mapping[tuple[int, ...], set[int]]) -> Conflict | None:
    counts = Counter(rank for members in users for rank in members)
    shared = tuple(sorted(rank for rank, count in counts.items() if count > 1))
    if len(users) < 2 or not shared:
        return None
    return Conflict(
        name=name, users={members: tuple(sorted(users[members])) for members in sorted(users)}, shared=shared
    )


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1, 2`, of many the first eight."""
    text = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def num_ranks(count: int) -> str:
    """`4 ranks`, `1 rank`, `no rank`."""
    return f"{count:,} rank{'s' * (count > 1)}" if count else "no rank"


def flags(run: Run) -> Iterator[Flag]:
    """PG_CONFIG_CONFLICT, DUMP_SKEW and CLOCK_SKEW."""
    for conflict in conflicts(run):
        text = f"ranks disagree about who belongs to group {conflict.name}: it is treated as several groups"
        yield Flag(flag=FlagKind.PG_CONFIG_CONFLICT, ranks=conflict.shared, text=text)
    behind = _dumped_too_early(run)
    if behind:
        text = "dumped before the others finished what they then finished together: they may have issued more since"
        yield Flag(flag=FlagKind.DUMP_SKEW, ranks=behind, text=text)
    elif (spread_s := _spread_of_dumps(run)) > DUMP_SKEW_S:
        text = f"the ranks' dumps were written up to {spread_s:.0f} s apart: earlier ones may lack later operations"
        yield Flag(flag=FlagKind.DUMP_SKEW, text=text)
    skewed = _other_clocks(run)
    if skewed:
        text = "their clocks differ from the others' by more than all that was recorded took: times are not compared"
        yield Flag(flag=FlagKind.CLOCK_SKEW, ranks=skewed, text=text)


def old_dumps(run: Run) -> tuple[int, ...]:
    """The ranks, at most half, whose dump is of an earlier attempt: it lacks what all finished together, at times that are none
    of the others'; or it ended long before the others began, and is of another program. It says nothing of this one."""
    behind = _dumped_too_early(run)
    late = {rank for rank in _other_clocks(run) if rank in behind} if behind else set()
    late = late if 2 * len(late) < len(run.ranks) else set()
    old = tuple(sorted(late | _of_other_programs(run)))
    return old if 2 * len(old) <= len(run.ranks) else ()


def dumps_before_steps(run: Run) -> tuple[int, ...]:
    """All ranks with a dump, if the job logged steps so long after everything in the dumps that no time zone explains it."""
    newest = {
        rank: int(record.operations["created_ns"].max(initial=0))
        for rank, record in run.ranks.items()
        if record.has_flight_recorder
    }
    logs = [log for log in (run.job_log, *(record.log for record in run.ranks.values())) if log is not None]
    after_s = max(newest.values(), default=0) / 1e9 + ZONES_S
    steps = {step for log in logs for step, time_s in log.step_times.items() if time_s > after_s}
    return tuple(newest) if any(newest.values()) and len(steps) > 1 else ()


def _of_other_programs(run: Run) -> set[int]:
    """Ranks whose operations all are older than most others' by OLD_NS, and are not those that the others issued as well."""
    times = {
        rank: created[created > 0]
        for rank, record in run.ranks.items()
        if record.has_flight_recorder and (created := record.operations["created_ns"]).any()
    }
    if len(times) < 2:
        return set()
    begin = int(np.median([int(created.min()) for created in times.values()]))
    early = {rank for rank, created in times.items() if int(created.max()) < begin - OLD_NS}
    others = [_calls(run, rank) for rank in times if rank not in early][:MOST_COMPARED] if early else []
    return {rank for rank in early if not any(_is_as(_calls(run, rank), calls) for calls in others)}


def _calls(run: Run, rank: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """A rank's collectives: group and number to operation, sizes and dtypes."""
    table = run.ranks[rank].operations
    rows = table[table["p2p"] == 0][["group", "seq", "op", "sizes", "dtypes"]].tolist()
    return {(group, seq): call for group, seq, *call in rows}


def _is_as(mine: dict[tuple[int, int], tuple[int, ...]], others: dict[tuple[int, int], tuple[int, ...]]) -> bool:
    """Whether half of what both have comes before the first difference: a fault stops a job soon, other programs go on."""
    common = sorted(mine.keys() & others.keys())
    first = {group: seq for group, seq in reversed(common) if mine[group, seq] != others[group, seq]}
    return bool(common) and 2 * sum(seq < first.get(group, seq + 1) for group, seq in common) >= len(common)


def _spread_of_dumps(run: Run) -> float:
    """Seconds between the first and the last rank's newest dump."""
    newest = [
        max(times)
        for record in run.ranks.values()
        if (times := [d.time_s for d in record.dumps if d.kind == DumpKind.FLIGHT_RECORDER and d.time_s])
    ]
    return max(newest) - min(newest) if len(newest) > 1 else 0.0


def _dumped_too_early(run: Run) -> tuple[int, ...]:
    """Ranks whose dump lacks a collective that all of them completed by a peer's dump."""
    meetings = np.array([name in MEETINGS for name in run.names.ops], bool)
    newest: defaultdict[int, dict[int, int]] = defaultdict(dict)
    finished: defaultdict[int, int] = defaultdict(lambda: -1)
    for rank, record in run.ranks.items():
        if record.has_flight_recorder:
            _note_ends(record.operations, rank, meetings, newest, finished)
    return tuple(
        sorted({rank for group, ends in newest.items() for rank, end in ends.items() if end < finished[group]})
    )


def _note_ends(
    table: Array, rank: int, meetings: Array, newest: dict[int, dict[int, int]], finished: dict[int, int]
) -> None:
    collectives = table[table["p2p"] == 0]
    # in a black box `completed` means that the call returned; only a dump records when the device started
    done = meetings[collectives["op"]] & (collectives["state"] == COMPLETED) & (collectives["started_ns"] > 0)
    for group in np.unique(collectives["group"]).tolist():
        of_group = collectives["group"] == group
        newest[group][rank] = int(collectives["seq"][of_group].max())
        finished[group] = max(finished[group], int(collectives["seq"][of_group & done].max(initial=-1)))


def _other_clocks(run: Run) -> tuple[int, ...]:
    """Ranks whose whole record of collectives that others issued too lies before or after the others' record of them."""
    spans = _spans(run)
    lowest, highest = np.zeros(len(run.groups), np.int64), np.full(len(run.groups), -1, np.int64)
    for group in np.flatnonzero(np.bincount(spans.group, minlength=len(run.groups)) > 1).tolist():
        of_group = spans.group == group
        first, last = spans.first[of_group].max(), spans.last[of_group].min()
        if last - first + 1 >= LEAST_COMMON:
            lowest[group], highest[group] = first, last
    times = _times(run, spans, lowest, highest)
    ranks = list(run.ranks)
    return tuple(sorted(ranks[place] for group in set(times.group.tolist()) for place in _apart(times, group)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    """Of each rank (its place among all) the group that it used most, and the ends of something on it."""

    owner: Array
    group: Array
    first: Array
    last: Array


def _is_dated(table: Array) -> Array:
    dated: Array = (table["p2p"] == 0) & (table["created_ns"] > 0) & (table["seq"] >= 0)
    return dated


def _spans(run: Run) -> _Spans:
    """The first and last sequence numbers."""
    columns: list[tuple[Array, ...]] = [(np.zeros(0, np.int64),) * 5]
    for block in operation_blocks(run.ranks):
        pairs, seq = pairs_of(block, _is_dated(block.table)), block.table["seq"]
        columns.append((pairs.owner, pairs.group, pairs.counts, seq[pairs.first], seq[pairs.last]))
    owner, group, counts, first, last = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    order = np.lexsort((group, -counts, owner))
    most = order[np.flatnonzero(np.diff(owner[order], prepend=-1))]
    return _Spans(owner=owner[most], group=group[most], first=first[most], last=last[most])


def _times(run: Run, spans: _Spans, lowest: Array, highest: Array) -> _Spans:
    """The first and last moments at which each rank issued collectives that all users of its group issued."""
    main = np.full(len(run.ranks), -1, np.int64)
    main[spans.owner] = spans.group
    columns: list[tuple[Array, ...]] = [(np.zeros(0, np.int64),) * 3]
    for block in operation_blocks(run.ranks):
        group, seq = block.table["group"], block.table["seq"]
        is_common = (group == main[block.owner]) & (seq >= lowest[group]) & (seq <= highest[group])
        places = np.flatnonzero(is_common & _is_dated(block.table))
        owner, created = block.owner[places], block.table["created_ns"][places]
        begins = np.flatnonzero(np.diff(owner, prepend=-1))
        if len(begins):
            columns.append((owner[begins], np.minimum.reduceat(created, begins), np.maximum.reduceat(created, begins)))
    owner, first, last = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return _Spans(owner=owner, group=main[owner], first=first, last=last)


def _apart(times: _Spans, group: int) -> list[int]:
    of_group = times.group == group
    first, last = times.first[of_group], times.last[of_group]
    begin, end = int(np.median(first)), int(np.median(last))
    is_apart = (first > end + CLOCK_SKEW_NS) | (last < begin - CLOCK_SKEW_NS)
    apart: list[int] = times.owner[of_group][is_apart].tolist()
    return apart


def is_last_word(event: LogEvent) -> bool:
    """Whether a text is what the C++ runtime writes when it aborts a process for an exception that nobody caught."""
    return event.text.startswith("what():")
