"""What NCCL's watchdogs say on several ranks, compared: one passed another size, or never issued what the others wait in. Pure.

Texts from torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (1.13 to 2.13).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_ckpt.debug.diagnosis.advice import advice
from titan_ckpt.debug.incident.busy_with import busy_by_log
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.kinds import EventKind, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, LogEvent, RankRecord, Run, Verdict

# Operations in which all members pass equally many elements; the others may differ by right.
_EVEN = frozenset(
    {"ALLREDUCE", "BROADCAST", "REDUCE", "ALLGATHER", "_ALLGATHER_BASE", "REDUCE_SCATTER", "_REDUCE_SCATTER_BASE"}
)
_SAID = (EventKind.WATCHDOG, EventKind.HEARTBEAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The operation that timed out on a rank. `group` is "" where no line names it."""

    rank: int
    group: str
    seq: int
    op: str
    size: str
    event: LogEvent

    @property
    def place(self) -> tuple[str, int, str, str]:
        """What the members of a group meet in: its group, number, operation and elements."""
        return self.group, self.seq, self.op, self.size


def watchdogs(run: Run) -> Iterator[Verdict]:
    """SIZE_MISMATCH and STUCK_ON_CPU, by the watchdogs' lines alone."""
    works = [work for record in run.ranks.values() if (work := timed_out(record)) is not None]
    yield from _sizes(run, works)
    yield from [*_behind(run, works)] or _never_issued(run)


INFERRED = "default"  # of a line that names the rank in its group, where that is its rank in the job


def timed_out(record: RankRecord) -> Work | None:
    """The first operation that a rank's watchdog reported; its group may be named by another line about the same number."""
    said = [
        event for event in record.events if event.kind == EventKind.WATCHDOG and event.values.get("seq", "").isdigit()
    ]
    first = next((event for event in said if "op" in event.values), None)
    if first is None:
        return None
    seq = first.values["seq"]
    groups = (event.values["group"] for event in said if event.values.get("group") and event.values["seq"] == seq)
    group = next(groups, INFERRED if first.values.get("rank") == str(record.rank) else "")
    return Work(
        rank=record.rank, group=group, seq=int(seq), op=first.values["op"], size=first.values.get("numel_in", ""), event=first
    )  # fmt: skip


def _sizes(run: Run, works: list[Work]) -> Iterator[Verdict]:
    met: defaultdict[tuple[str, int, str], list[Work]] = defaultdict(list)
    for work in works:
        if work.group and work.size and work.op in _EVEN:
            met[work.group, work.seq, work.op].append(work)
    for (_, seq, op), found in met.items():
        counts = Counter(work.size for work in found).most_common()
        if len(counts) < 2:
            continue
        is_clear = 2 * counts[0][1] > len(found)
        others = tuple(work.rank for work in found if work.size != counts[0][0] or not is_clear)
        odd = next(work for work in found if work.size != counts[0][0])
        yield Verdict(
            verdict=VerdictKind.SIZE_MISMATCH,
            culprits=others if is_clear else (), suspects=() if is_clear else others,
            victims=tuple(work.rank for work in found if work.rank not in others),
            op=op.lower(), seq=seq, step=run.step_of(odd.rank),
            confidence=(Basis.WATCHDOGS if is_clear else Basis.TIE).confidence,
            headline=f"{rank_list(others)} passed "
            + (f"{odd.size} elements" if is_clear else f"{odd.size} or {counts[0][0]} elements, they do not agree,")
            + f" to {op.lower()} #{seq}" + (f", the others passed {counts[0][0]}" if is_clear else ""),
            evidence=(_said(odd.event), _said(next(work.event for work in found if work.size == counts[0][0]))),
            next_steps=(
                "compare the shapes at that call: a last batch, a branch or a parameter that differs between ranks",
                "exchange shapes first where they depend on the data",
            ),
        )  # fmt: skip
        return


def _behind(run: Run, works: list[Work]) -> Iterator[Verdict]:
    """Ranks whose last enqueued number in a group is below the one that the others wait in, and that wait in nothing."""
    waiting = {work.rank for work in works}
    by_group: defaultdict[str, list[Work]] = defaultdict(list)
    for work in works:
        by_group[work.group].append(work)
    for group, found in by_group.items():
        seq = min(work.seq for work in found)
        last = {rank: event for rank, event in _enqueued(run, group).items() if rank not in waiting}
        culprits = tuple(rank for rank, event in last.items() if int(event.values["enqueued"]) < seq)
        if not group or not culprits or len(culprits) >= len(found):
            continue
        subtype = busy_by_log(run.ranks[culprits[0]])
        victims = tuple(work.rank for work in found)
        number, op = last[culprits[0]].values["enqueued"], found[0].op.lower()
        yield Verdict(
            verdict=VerdictKind.STUCK_ON_CPU, subtype=subtype, culprits=culprits, victims=victims, group=group, seq=seq,
            op=op, step=run.step_of(culprits[0]), confidence=Basis.WATCHDOGS.confidence,
            headline=f"{rank_list(culprits)} never issued {op} #{seq} of group {group}, in which the others wait: its last one "
            f"was #{number}",
            evidence=(_said(last[culprits[0]]), _said(found[0].event)),
            chain=tuple((rank, culprits[0]) for rank in victims), next_steps=advice(VerdictKind.STUCK_ON_CPU, subtype),
        )  # fmt: skip
        return


def _never_issued(run: Run) -> Iterator[Verdict]:
    """Without the timed-out operation: few ranks have done all that they enqueued, the others wait in the one that follows."""
    groups = {event.values.get("group", "") for record in run.ranks.values() for event in record.events} - {""}
    for group in sorted(groups):
        last = _enqueued(run, group)
        newest = max((_number(event, "enqueued") for event in last.values()), default=0)
        waiting = tuple(
            rank
            for rank, event in last.items()
            if _number(event, "enqueued") == newest > _number(event, "completed") >= 0
        )
        culprits = tuple(
            rank
            for rank, event in last.items()
            if _number(event, "enqueued") == _number(event, "completed") == newest - 1
        )
        if not culprits or len(culprits) >= len(waiting) or len(waiting) + len(culprits) < len(last):
            continue
        event, subtype = last[culprits[0]], busy_by_log(run.ranks[culprits[0]])
        yield Verdict(
            verdict=VerdictKind.STUCK_ON_CPU, subtype=subtype, culprits=culprits, victims=waiting, group=group, seq=newest,
            step=run.step_of(culprits[0]), confidence=Basis.WATCHDOGS.confidence,
            headline=f"{rank_list(culprits)} never issued #{newest} of group {group}, in which the others wait: it has completed "
            f"all that it issued, up to #{newest - 1}",
            evidence=(_said(event), _said(last[waiting[0]])),
            chain=tuple((rank, culprits[0]) for rank in waiting), next_steps=advice(VerdictKind.STUCK_ON_CPU, subtype),
        )  # fmt: skip
        return


_OF_ALL = re.compile(r"0|default|(?:0\()?default_pg\)?")  # of the group that holds all ranks


def wait_in_parts(run: Run, ranks: Sequence[int]) -> bool:
    """Whether these ranks' watchdogs name groups that need not hold all ranks, and no dump tells who is in them."""
    works = [timed_out(run.ranks[rank]) for rank in ranks]
    is_part = all(work is not None and work.group and not _OF_ALL.fullmatch(work.group) for work in works)
    return is_part and not any(len(group.members) > 0 for group in run.groups)


def wait_apart(run: Run, some: Sequence[int], ranks: Sequence[int]) -> bool:
    """Whether the watchdogs of some of these ranks name other groups than those of the rest, and none that holds all ranks: then
    neither party waits for the other."""
    groups = {rank: work.group for rank in ranks if (work := timed_out(run.ranks[rank])) is not None}
    named = {group for rank, group in groups.items() if rank in some}
    rest = {group for rank, group in groups.items() if rank not in some}
    is_part = all(group and not _OF_ALL.fullmatch(group) for group in named | rest)
    return is_part and bool(named) and bool(rest) and named.isdisjoint(rest)


def wait_together(run: Run, ranks: Sequence[int]) -> bool:
    """Whether several ranks wait in one operation of a group that does not hold all ranks: for another member, or for none."""
    works = {work.place for rank in ranks if (work := timed_out(run.ranks[rank])) is not None}
    groups = {work.group for rank in ranks if (work := timed_out(run.ranks[rank])) is not None}
    return len(ranks) > 1 and len(works) == 1 and all(group and not _OF_ALL.fullmatch(group) for group in groups)


def _number(event: LogEvent, name: str) -> int:
    value = event.values.get(name, "")
    return int(value) if value.isdigit() else -1


def _enqueued(run: Run, group: str) -> Mapping[int, LogEvent]:
    """The line of each rank with the highest number that it enqueued in a group."""
    last: dict[int, LogEvent] = {}
    for rank, record in run.ranks.items():
        said = [
            event
            for event in record.events
            if event.kind in _SAID and event.values.get("group") == group and event.values.get("enqueued", "").isdigit()
        ]
        if said:
            last[rank] = max(said, key=lambda event: int(event.values["enqueued"]))
    return last


def _said(event: LogEvent) -> Evidence:
    return Evidence(text=event.text[:300], rank=event.rank, source=f"{event.source}:{event.line}")
