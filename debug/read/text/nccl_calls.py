"""What NCCL logs with `NCCL_DEBUG=INFO` and `NCCL_DEBUG_SUBSYS=INIT,COLL`: ranks that called otherwise or less, or never came.

Forms: NCCL's and RCCL's src/init.cc (`ncclCommInitRank comm 0x55 rank 3 nranks 8 ... commId 0x9f - Init START`) and
src/enqueue.cc (`AllReduce: opCount 28c sendbuff 0x7f recvbuff 0x7f count 512 datatype 7 op 0 root 0 comm 0x55 [nranks=8] stream
0x55`). `opCount` is hexadecimal and counts the operations of one communicator. Communicators with sends are not compared: their
ranks differ by right. Ranks count as the job's in its largest communicator only.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import MAX_RANK
from titan_ckpt.debug.read.text.schedulers.process_ends import Note
from titan_ckpt.debug.read.text.writers.labels import Writer

KEPT_CALLS = 256  # of each rank and communicator
MOST_COMMS = 1 << 16
MOST_NOTES = 4096
_DEVICE = r"(?:\[(?P<device>\d{1,4})\] )?NCCL INFO "
_COMM = r"\bcomm (?P<comm>0x[0-9a-f]{1,16}) "
_CALL = re.compile(
    rf"{_DEVICE}(?P<op>[A-Z]\w{{2,20}}): opCount (?P<number>[0-9a-f]{{1,16}}) .{{0,120}}?\bcount (?P<count>\d{{1,18}}) "
    rf"datatype (?P<dtype>\d{{1,3}}) .{{0,40}}?{_COMM}\[nranks=(?P<size>\d{{1,7}})\]"
)
_INIT = re.compile(
    rf"{_DEVICE}.{{0,60}}?{_COMM}rank (?P<rank>\d{{1,7}}) n[rR]anks (?P<size>\d{{1,7}})\b"
    r"(?:.{0,120}?\bcommId (?P<id>0x[0-9a-f]{1,16}))?"
)
_P2P = ("Send", "Recv")


@dataclass(slots=True)
class _Member:
    """One process in one communicator."""

    writer: Writer
    source: str
    device: int = 0
    rank: int | None = None
    size: int = 0
    name: str = ""
    line: int = 0
    is_made: bool = False
    has_p2p: bool = False
    calls: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))  # (number, call)


@dataclass(slots=True)
class NcclCalls:
    """The communicators that one file speaks of, by process and address."""

    source: str
    members: dict[tuple[Writer, str], _Member] = field(default_factory=dict)

    def take(self, writer: Writer, number: int, text: str, device: int | None) -> None:
        """Account for a line of NCCL's. `device`: of the GPU, where it was taken off the text as a prefix."""
        match = _CALL.search(text) or _INIT.search(text)
        if match is None or len(self.members) >= MOST_COMMS:
            return
        member = self.members.setdefault((writer, match["comm"]), _Member(writer=writer, source=self.source))
        member.size, member.line, member.device = int(match["size"]), number, int(match["device"] or device or 0)
        if match.re is _INIT:
            member.rank, member.name = int(match["rank"]), match["id"] or member.name
            member.is_made = "COMPLETE" in text
        elif match["op"] in _P2P:
            member.has_p2p = True
        else:
            member.calls.append((int(match["number"], 16), f"{match['op']}|[{match['count']}]|{match['dtype']}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Something about ranks of a communicator of `size` ranks, and the file that shows it."""

    source: str
    note: Note
    size: int


def told_by(found: Sequence[NcclCalls]) -> Iterator[Told]:
    """What the logs say of the ranks of the job's largest communicator."""
    members = [member for calls in found for member in calls.members.values()]
    largest = max((member.size for member in members), default=0)
    groups: defaultdict[str, dict[int, _Member]] = defaultdict(dict)
    of_world = [member for member in members if member.size == largest and 1 < largest <= MAX_RANK]
    several = Counter((member.writer, member.name) for member in of_world)
    for member in of_world:
        rank = _rank(member, of_world)
        is_clear = member.name or several[member.writer, member.name] == 1  # else one of several, nobody knows which
        if rank is not None and rank < largest and is_clear:
            groups[member.name][rank] = member
    for name, ranks in groups.items():
        called = {rank: member for rank, member in ranks.items() if member.calls}
        if not any(member.has_p2p for member in ranks.values()):
            yield from [*_mismatch(called)] or [*_behind(name, called)]
        yield from _missing(name, ranks, largest)


def _rank(member: _Member, of_world: Sequence[_Member]) -> int | None:
    """The member's rank: as NCCL says it, as its file's name does, or its GPU on the one host that has a process on each."""
    if member.rank is not None or member.writer[0] == "rank":
        return member.writer[2] if member.rank is None else member.rank
    others = {(other.writer[1], other.device) for other in of_world}
    is_one_host = (
        others == {(member.writer[1], device) for device in range(member.size)} and len(of_world) == member.size
    )
    return member.device if is_one_host and all(other.rank is None for other in of_world) else None


def _mismatch(members: Mapping[int, _Member]) -> Iterator[Told]:
    """What each rank called at the first number at which they differ; only numbers that all have are compared."""
    calls = {rank: _once(member.calls) for rank, member in members.items()}
    common = set.intersection(*map(set, calls.values())) if len(calls) > 1 else set()
    number = min((n for n in common if len({theirs[n] for theirs in calls.values()}) > 1), default=None)
    if number is None:
        return
    at = {rank: theirs[number] for rank, theirs in calls.items()}
    for rank, call in list(at.items())[:MOST_NOTES]:
        other = next(peer for peer, theirs in at.items() if theirs != call)
        text = f"NCCL's log: rank {rank} called {_words(call)} as #{number:x}, rank {other} {_words(at[other])}"
        values = {"own": str(rank), "call_of_own": call, "names": str(other), "call_of_named": at[other]}
        yield _told(members[rank], EventKind.COMM_MISMATCH, text, values)


def _once(calls: Sequence[tuple[int, str]]) -> dict[int, str]:
    """Calls by number, without those of a group (ncclGroupStart), which share theirs."""
    counts = Counter(number for number, _ in calls)
    return {number: call for number, call in calls if counts[number] == 1}


def _behind(name: str, members: Mapping[int, _Member]) -> Iterator[Told]:
    newest = {rank: max(number for number, _ in member.calls) for rank, member in members.items()}
    most = max(newest.values(), default=0)
    behind = sorted(rank for rank, number in newest.items() if number < most)
    if behind and 2 * len(behind) <= len(members):
        told = ", ".join(f"rank {rank} called #{newest[rank]:x}" for rank in behind[:8])
        text = f"NCCL's log: in communicator {name or '?'} {told} last, the others #{most:x}"
        yield _told(members[behind[0]], EventKind.DESYNC, text, {"names": _names(behind), "done": str(most)})


def _missing(name: str, members: Mapping[int, _Member], size: int) -> Iterator[Told]:
    """Ranks that never began to make a communicator that most others began to make and did not complete."""
    missing = [rank for rank in range(size) if rank not in members]
    has_begun = all(member.rank is not None and not member.is_made and not member.calls for member in members.values())
    if missing and has_begun and 2 * len(missing) < size:
        told = ", ".join(map(str, missing[:8]))
        text = f"NCCL's log: of rank {told} nothing; {len(members)} of {size} ranks began to make communicator {name or '?'}"
        yield _told(next(iter(members.values())), EventKind.DESYNC, text, {"names": _names(missing), "done": "0"})


def _told(member: _Member, kind: EventKind, text: str, values: dict[str, str]) -> Told:
    note = Note(kind=kind, text=text[:400], line=member.line, values=values)
    return Told(source=member.source, note=note, size=member.size)


def _names(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks[:4000]))


def _words(call: str) -> str:
    op, count, dtype = call.split("|")
    return f"{op} of {count.strip('[]')} elements (datatype {dtype})"
