"""From all files that were read to one Run, with flags for what limits it."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from titan_ckpt.debug.incident import contradictions as disagreement
from titan_ckpt.debug.incident.frames import hang_stack, is_importing, main_thread_state, user_frame, without_loaders
from titan_ckpt.debug.incident.kinds import DEMAND, STALL, DumpKind, FlagKind, RankState
from titan_ckpt.debug.incident.operation_table import operation_blocks, with_blocks
from titan_ckpt.debug.incident.records import (
    MAX_RANK,
    NO_OPERATIONS,
    Array,
    Dump,
    Exit,
    Flag,
    Group,
    Heartbeat,
    Launcher,
    RankLog,
    RankRecord,
    Run,
    Splits,
    StackSnapshot,
)
from titan_ckpt.debug.read.black_boxes import BlackBox, BoxReader
from titan_ckpt.debug.read.name_tables import Interner
from titan_ckpt.debug.read.recorder_files import Sidecar
from titan_ckpt.debug.read.reports.inspector import Progress
from titan_ckpt.debug.read.reports.process_stacks import ProcessStacks
from titan_ckpt.debug.read.snapshots import add_box, merge_dumps
from titan_ckpt.debug.read.text.job_text import JobText
from titan_ckpt.debug.read.text.several_files import group_by_rank, merge_logs
from titan_ckpt.store.base import Store

_Place: TypeAlias = tuple[str, int]  # a file and a line


@dataclass(slots=True)
class RankEvidence:
    """What was read of one rank so far; `sidecar` is the JSON that its recorder wrote."""

    dumps: list[tuple[Dump, Array]] = field(default_factory=list)
    known_groups: dict[str, Group] = field(default_factory=dict)
    stacks: list[StackSnapshot] = field(default_factory=list)
    logs: list[RankLog] = field(default_factory=list)
    box: BlackBox | None = None
    box_source: str = ""
    heartbeat: Heartbeat | None = None
    sidecar: Sidecar | None = None
    process_state: str = ""
    process_pid: int | None = None


@dataclass(slots=True)
class RunEvidence:
    """What one `open_run` has read so far: by rank, and of the job as a whole."""

    store: Store
    interner: Interner = field(default_factory=Interner)
    ranks: defaultdict[int, RankEvidence] = field(default_factory=lambda: defaultdict(RankEvidence))
    flags: list[Flag] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    launcher: Launcher | None = None
    world_size: int = 0
    read_stems: dict[tuple[int | None, str], int] = field(default_factory=dict)  # of pickles: their highest number
    num_evidence: int = 0
    has_notes_only: bool = False  # nothing else was found: a page into which somebody pasted logs is evidence
    recorded_ranks: int = 0
    started_s: float | None = None  # when the first recorder started, by the clock of logs (local time)
    until_s: float = math.inf  # when that of the next incident did
    boxes: BoxReader = field(init=False)
    texts: list[JobText] = field(default_factory=list)
    job_log: RankLog | None = None
    hosts: Mapping[int, str] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)
    first_record: dict[int, int] = field(default_factory=dict)
    progress: list[Progress] = field(default_factory=list)
    processes: list[ProcessStacks] = field(default_factory=list)  # of which no file's name gives the rank
    host_of_file: dict[int, str] = field(default_factory=dict)
    pid_of_file: dict[int, int] = field(default_factory=dict)
    unusable_groups: set[int] = field(default_factory=set)
    # Called with the bytes of each file, or piece of one, that was read.
    on_bytes: Callable[[int], object] = lambda _: None

    def __post_init__(self) -> None:
        self.boxes = BoxReader(self.interner)

    def flag(self, name: FlagKind, text: str, source: str, rank: int | None = None) -> None:
        self.flags.append(Flag(flag=name, text=text, ranks=() if rank is None else (rank,), source=source))


_NOTHING = RankEvidence()


def assemble(evidence: RunEvidence, incident: str, incidents: tuple[str, ...]) -> Run:
    """Build the Run."""
    exits = group_by_rank(evidence.exits)
    named = {rank for rank in (*evidence.hosts, *evidence.pids) if not evidence.recorded_ranks}
    numbers = set(evidence.ranks) | set(exits) | named
    largest = max((max(group.members) for group in evidence.interner.groups if group.members), default=-1)
    world_size = min(MAX_RANK, max(evidence.world_size, largest + 1, max(numbers, default=-1) + 1))
    for rank in range(world_size):
        if rank not in evidence.ranks:
            evidence.ranks[rank] = RankEvidence()
    with_box = [found for found in evidence.ranks.values() if found.box]
    prefer_box = len(with_box) == len(evidence.ranks) and any(map(_is_box_newer, with_box))
    ranks = {
        rank: _rank_record(evidence, rank, exits.get(rank), prefer_box=prefer_box) for rank in sorted(evidence.ranks)
    }
    run = Run(
        url=str(evidence.store),
        incident=incident,
        world_size=world_size,
        ranks=with_blocks(ranks, [_home(evidence.ranks[rank], record) for rank, record in ranks.items()]),
        groups=tuple(evidence.interner.groups),
        names=evidence.interner.names(),
        launcher=evidence.launcher,
        incidents=incidents,
        job_log=evidence.job_log,
        read_ns=time.time_ns(),
    )
    for ranks_of, why in _OF_EARLIER:
        if old := [rank for rank in ranks_of(run) if evidence.ranks[rank].box is None]:
            for rank in old:
                evidence.ranks[rank].dumps.clear()
                evidence.ranks[rank].known_groups.clear()
            text = f"the dump of these ranks is of an earlier attempt: {why}"
            evidence.flags.append(Flag(flag=FlagKind.EARLIER_ATTEMPT, text=text, ranks=(*old,)))
            return assemble(evidence, incident, incidents)
    return replace(run, flags=(*evidence.flags, *_flags(evidence, run)), wrappers=_wrappers(run))


_OF_EARLIER = (
    (disagreement.old_dumps, "the others finished what it waits in, or began long after it"),
    (disagreement.dumps_before_steps, "steps were logged more than 15 h after all that is in it"),
)


def _is_box_newer(found: RankEvidence) -> bool:
    """Whether a rank's black box goes on after all of its dumps, which were asked for: it was killed since, or never dumped.
    Operations would then have the box's names on this rank and the dumps' on others, so all take the box's."""
    box = found.box.operations if found.box else NO_OPERATIONS
    newest = int(box["created_ns"][box["p2p"] == 0].max(initial=0))
    if any(dump.reason != DEMAND for dump, _ in found.dumps):
        return False
    return not found.dumps or newest > max(int(table["created_ns"].max(initial=0)) for _, table in found.dumps)


def _home(found: RankEvidence, record: RankRecord) -> tuple[Array, int] | None:
    """The table that a rank's operations are a slice of, if all of them come from its black box."""
    return found.box.home if found.box and record.operations is found.box.operations else None


def _wrappers(run: Run) -> frozenset[tuple[str, int]]:
    """Lines of helpers: (file, line) through which a caller issues operations of one kind, and other callers those of others. (A
    line that issues several for each caller is no helper: a backward pass, a call that gathers objects.)"""
    pairs: set[int] = set()
    for block in operation_blocks(run.ranks):
        pairs.update(np.unique((block.table["op"].astype(np.int64) << 32) | block.table["frames"]).tolist())
    ops: defaultdict[_Place, defaultdict[object, set[int]]] = defaultdict(lambda: defaultdict(set))
    for pair in pairs:
        frames = run.names.frames[pair & 0xFFFFFFFF]
        frame = user_frame(frames)
        if frame is not None:
            outer = frames[frames.index(frame) + 1 :][:1]
            ops[frame.file, frame.line][outer].add(pair >> 32)
    found = (ops, _calls_in_stacks(run))
    return frozenset(place for seen in found for place, by_caller in seen.items() if _is_helper([*by_caller.values()]))


def _calls_in_stacks(run: Run) -> Mapping[_Place, Mapping[object, set[str]]]:
    """The calls of torch.distributed in which stacks stand, by the program's line and its caller: not all are recorded (gloo's
    recorder has no sends and receives)."""
    calls: defaultdict[_Place, defaultdict[object, set[str]]] = defaultdict(lambda: defaultdict(set))
    for record in run.ranks.values():
        stack = hang_stack(record) if record.stacks else None
        main = stack.main if stack is not None else None
        frame = user_frame(main.frames) if main is not None else None
        if main is None or frame is None:
            continue
        kind, call = main_thread_state(main)
        if kind in (RankState.IN_COLLECTIVE, RankState.IN_P2P) and call != "wait":
            calls[frame.file, frame.line][main.frames[main.frames.index(frame) + 1 :][:1]].add(call)
    return calls


def _is_helper(kinds: Sequence[set[Any]]) -> bool:
    """Whether several callers issue different kinds of operations, `kinds` by caller, one of each."""
    return len(set().union(*kinds)) > 1 and all(len(of_caller) == 1 for of_caller in kinds)


def _rank_record(evidence: RunEvidence, rank: int, exit_: Exit | None, *, prefer_box: bool) -> RankRecord:
    found = evidence.ranks[rank]
    if exit_ is None and found == _NOTHING and rank not in evidence.hosts and rank not in evidence.pids:
        return RankRecord(rank=rank)
    if found.box and not (found.dumps or found.sidecar or found.logs or found.stacks):
        return RankRecord(
            rank=rank, pid=found.box.pid, operations=found.box.operations, dumps=(_box_dump(found, found.box),), exit=exit_,
            heartbeat=found.heartbeat, process_state=found.process_state, has_recorder=True,
            splits=_splits(found.box, found.box.operations),
        )  # fmt: skip
    tables = [_with_known_groups(table, found.known_groups, evidence.interner) for _, table in found.dumps]
    box = found.box.operations if found.box else NO_OPERATIONS
    box = _with_known_groups(box, found.known_groups, evidence.interner)
    has_ended = exit_ is not None and exit_.code == 0 and found.heartbeat is not None and found.heartbeat.is_stopped
    stale = [reason for reason in (STALL, DEMAND) if has_ended or _went_on(found, box, reason)]
    dumps = [dump for dump, _ in found.dumps if dump.reason != DEMAND or DEMAND not in stale]
    if found.box:
        dumps.append(_box_dump(found, found.box))
    side = found.sidecar
    return RankRecord(
        rank=rank,
        host=(side.host if side else "") or evidence.hosts.get(rank, ""),
        pid=side.pid if side and side.pid is not None else (found.box.pid if found.box else evidence.pids.get(rank)),
        coordinates=side.coordinates if side else {},
        operations=add_box(merge_dumps(tables), box, prefer_box=prefer_box),
        dumps=tuple(dumps),
        stacks=without_loaders([stack for stack in found.stacks if stack.reason not in stale]),
        log=merge_logs(found.logs),
        exit=exit_,
        heartbeat=found.heartbeat,
        process_state=found.process_state,
        has_recorder=side is not None or found.box is not None,
        groups=tuple(found.known_groups.values()),
        splits=_splits(found.box, box) if found.box else {},
    )


def _splits(box: BlackBox, operations: Array) -> dict[tuple[int, int], Splits]:
    """The splits of a box by group and sequence number; `operations`: its own, their groups as the run knows them."""
    rows = operations[list(box.splits)][["group", "seq"]].tolist() if box.splits else []
    return dict(zip(rows, box.splits.values(), strict=True))


def _went_on(found: RankEvidence, box: Array, reason: str) -> bool:
    """Whether something newer shows that the rank went on after the dump of a stall, or on demand: that stack misleads. Newer are
    operations in the black box or in another dump; after a stall in an import, also a step or an error in its log."""
    stalls = [table for dump, table in found.dumps if dump.reason == reason]
    others = [table["created_ns"] for dump, table in found.dumps if dump.reason != reason]
    others.append(box["created_ns"][box["p2p"] == 0])
    newest = max((int(table["created_ns"].max(initial=0)) for table in stalls), default=0)
    if not stalls:
        return False
    is_past_import = reason == STALL and newest == 0 and _came_from_import(found)
    return max(int(times.max(initial=0)) for times in others) > newest or is_past_import


def _came_from_import(found: RankEvidence) -> bool:
    """Whether a rank that stalled in an import wrote a step, an error or an orderly end afterwards."""
    mains = [stack.main for stack in found.stacks if stack.reason == STALL and stack.main]
    has_ended = found.heartbeat is not None and found.heartbeat.is_stopped
    has_trained = any(log.last_step is not None or log.events for log in found.logs)
    return any(is_importing(main.frames) for main in mains) and (has_ended or has_trained)


def _box_dump(found: RankEvidence, box: BlackBox) -> Dump:
    return Dump(
        source=found.box_source,
        kind=DumpKind.BLACK_BOX,
        reason="",
        version="1",
        num_operations=len(box.operations),
        first_record_id=box.count - len(box.operations),
        is_truncated=box.count > len(box.operations),
    )


def _with_known_groups(table: Array, known: Mapping[str, Group], interner: Interner) -> Array:
    """Operations with the members of their groups filled in as this rank's process knew them (gloo's dumps lack them)."""
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


def _flags(evidence: RunEvidence, run: Run) -> Iterator[Flag]:
    only_boxes = {rank for rank, record in run.ranks.items() if record.dumps and _are_cut_boxes(record.dumps)}
    if only_boxes or evidence.first_record:
        ranks = tuple(sorted(only_boxes | set(evidence.first_record)))
        yield Flag(
            flag=FlagKind.RING_TRUNCATED, ranks=ranks, text="the ring buffer was full: the oldest operations are gone"
        )
    with_dump = {rank for rank, record in run.ranks.items() if record.dumps}
    if with_dump and len(with_dump) < len(run.ranks):
        missing = tuple(rank for rank in run.ranks if rank not in with_dump)
        yield Flag(flag=FlagKind.DUMP_MISSING, ranks=missing, text="no dump and no black box")
    versions = {
        dump.version for record in run.ranks.values() for dump in record.dumps if dump.kind == DumpKind.FLIGHT_RECORDER
    }
    if len(versions) > 1:
        yield Flag(flag=FlagKind.VERSION_MIX, text=f"dumps of different versions: {', '.join(sorted(versions))}")
    yield from disagreement.flags(run)
    unusable = tuple(sorted(r for r in evidence.unusable_groups if _has_unknown_members(run, r)))
    if unusable:
        yield Flag(
            flag=FlagKind.PG_CONFIG_UNUSABLE,
            ranks=unusable,
            text="the dumps do not say who belongs to a group (gloo never does); members are those seen using it",
        )


def _are_cut_boxes(dumps: Sequence[Dump]) -> bool:
    return all(dump.kind == DumpKind.BLACK_BOX and dump.is_truncated for dump in dumps)


def _has_unknown_members(run: Run, rank: int) -> bool:
    return any(not run.groups[position].members for position in np.unique(run.ranks[rank].operations["group"]))
