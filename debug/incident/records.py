"""The records of the debugger: the evidence (Run and its parts) and the conclusions (Situation, Verdict).

Operations are columns, not objects: a job of 1,024 ranks leaves two million of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from titan_ckpt.debug.incident.kinds import (
    DumpKind,
    EventKind,
    FlagKind,
    OperationState,
    RankState,
    Subtype,
    VerdictKind,
)  # fmt: skip

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

SCHEDULED, STARTED, COMPLETED = 0, 1, 2
STATES = tuple(OperationState)  # by code
SEND, RECV = 1, 2
MAX_RANK = 131_072  # a larger number in a file is damage
Splits: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # elements sent to, and expected of, each member of a group

# One operation. group, op, sizes, dtypes and frames are positions in Run.groups and Run.names. `seq` counts collectives per
# group, P2P per pair. `p2p` is 0, SEND or RECV; `peer` is a global rank (-1: unknown): of P2P the other half, of a collective
# its root. `retired`: the work object is gone, which is all that gloo records, also after a failure. Times: 0 if unknown.
OPERATION = np.dtype(
    [
        ("group", "i4"), ("seq", "i4"), ("op", "i2"), ("p2p", "i1"), ("state", "i1"), ("retired", "?"),
        ("dtypes", "i2"), ("sizes", "i4"), ("frames", "i4"), ("peer", "i4"), ("timeout_ms", "i4"),
        ("created_ns", "i8"), ("started_ns", "i8"), ("completed_ns", "i8"),
    ]
)  # fmt: skip

NO_OPERATIONS: Array = np.zeros(0, OPERATION)
TIMER = "timer"  # why a stack was written: `faulthandler.dump_traceback_later` of the program


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of a call stack; `text` is the source line if it was recorded (equal frames may differ in it)."""

    file: str
    line: int
    function: str
    text: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        """`file:line`."""
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """Frames of one thread, most recent call first. `is_current`: it wrote the dump. `state`: such as "Garbage-collecting"."""

    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False
    is_current: bool = False
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSnapshot:
    """All threads of a rank at one moment; `reason` comes from the file's name or first line (stall, sigterm, gil ...)."""

    source: str
    reason: str
    threads: tuple[Thread, ...]

    @property
    def main(self) -> Thread | None:
        """The thread that runs the training script."""
        return next((thread for thread in self.threads if thread.is_main), None)

    @property
    def current(self) -> Thread | None:
        """The thread that wrote the dump or crashed; None if it runs no Python (a thread of gloo, NCCL or CUDA)."""
        return next((thread for thread in self.threads if thread.is_current), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """A line of a log that was recognized; rank -1: unknown. Values: `names` (ranks in it, "2,3"), `host`, `pid` of a process."""

    kind: EventKind
    rank: int
    text: str
    source: str
    line: int
    time_s: float | None = None
    frame: Frame | None = None  # the program's line
    values: Mapping[str, str] = field(default_factory=dict)
    calls: tuple[Frame, ...] = ()  # of a traceback, most recent call first


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """What was recognized in a rank's log. `tail`: its last lines; `last_step_line`, `done_line`: of its last step, its end."""

    source: str
    events: tuple[LogEvent, ...] = ()
    tail: tuple[str, ...] = ()
    tail_line: int = 0
    last_step: int | None = None
    last_step_line: int = 0
    done_line: int = 0
    last_time_s: float | None = None
    step_times: Mapping[int, float] = field(default_factory=dict)
    error_end: str | None = None  # the last line of its standard error; None where that was not collected
    is_done_elsewhere: bool = False  # another file of the rank ends with a word that it is done


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended; a negative code is the signal that killed it. `was_told`: a launcher had sent it SIGTERM before."""

    rank: int
    code: int
    source: str
    line: int = 0
    pid: int | None = None
    time_s: float | None = None
    was_told: bool = False
    is_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The recorder's last entry: where the training loop was, and when its watching thread last ran (ns since epoch).

    `moves` counts the ticks at which the process had come further since the tick before, `moved_ns` is when the last of these
    was (0: not recorded). `ran_ns` and `queued_ns`: for how long since then its main thread ran, and was ready to run without a
    processor (0: not known). `status` is what the process gave to exit(3) at its end, None if it did not, or it is not known."""

    step: int
    phase: str
    phase_ns: int
    alive_ns: int
    source: str
    is_stopped: bool = False
    moves: int = 0
    moved_ns: int = 0
    ran_ns: int = 0
    queued_ns: int = 0
    status: int | None = None
    is_leaving: bool = False  # it stopped, and the status that the process must leave at its end is not there


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """One Flight Recorder dump or black box that was read."""

    source: str
    kind: DumpKind
    reason: str
    version: str
    num_operations: int
    first_record_id: int = 0
    time_s: float | None = None
    is_truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group, identified by name and members. `members` is () if not recorded."""

    name: str
    description: str = ""
    members: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.description or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One row of a rank's operations with its codes resolved."""

    group: Group
    seq: int
    op: str
    p2p: int
    peer: int
    sizes: str
    dtypes: str
    state: OperationState
    retired: bool
    frames: tuple[Frame, ...]
    created_ns: int
    started_ns: int
    completed_ns: int
    timeout_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """Everything known of one rank. `groups`: the process groups that its process knew, where its recorder wrote that down.
    `splits`: of its newest all_to_all operations, by group and sequence number."""

    rank: int
    host: str = ""
    pid: int | None = None
    coordinates: Mapping[str, int] = field(default_factory=dict)
    operations: Array = field(default_factory=lambda: NO_OPERATIONS)
    dumps: tuple[Dump, ...] = ()
    stacks: tuple[StackSnapshot, ...] = ()
    log: RankLog | None = None
    exit: Exit | None = None
    heartbeat: Heartbeat | None = None
    process_state: str = ""
    has_recorder: bool = False
    is_gone: bool = False  # the kernel of the machine on which it ran has no such process any more
    groups: tuple[Group, ...] = ()
    splits: Mapping[tuple[int, int], Splits] = field(default_factory=dict)

    @property
    def events(self) -> tuple[LogEvent, ...]:
        """The events of its log."""
        return self.log.events if self.log else ()

    @property
    def has_flight_recorder(self) -> bool:
        """Whether a Flight Recorder dump of it was read."""
        return any(dump.kind == DumpKind.FLIGHT_RECORDER for dump in self.dumps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The tables that the codes of an operation index."""

    ops: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    frames: tuple[tuple[Frame, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A defect of the evidence that limits what can be concluded."""

    flag: FlagKind
    text: str
    ranks: tuple[int, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How torchrun (or a drill) ended, if that is shown. `is_shared`: all processes write to its console, without prefixes."""

    source: str
    code: int | None = None
    first_rank: int | None = None
    num_unmoved: int = 0  # workers that SIGTERM did not end
    is_shared: bool = False
    is_torchrun: bool = False
    has_finished: bool = False  # torchrun says that its workers ended with 0; a shell's code may hide theirs
    is_called_good: bool = False  # by a scheduler, a service or a shell: of what it started, which may hide an end


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One incident of a job. `wrappers`: lines of helpers around torch.distributed, never to blame. `job_log`: what no rank is
    known to have written (schedulers, kernels, consoles). `read_ns`: when the evidence was read (0: not known)."""

    url: str
    incident: str
    world_size: int
    ranks: Mapping[int, RankRecord]
    groups: tuple[Group, ...]
    names: Names
    flags: tuple[Flag, ...] = ()
    launcher: Launcher | None = None
    incidents: tuple[str, ...] = ()
    wrappers: frozenset[tuple[str, int]] = frozenset()
    job_log: RankLog | None = None
    read_ns: int = 0

    def members(self, group: int) -> tuple[int, ...]:
        """Ranks of a group: as recorded, else all that used it."""
        known = self.groups[group].members
        return known or tuple(
            r for r, record in self.ranks.items() if bool((record.operations["group"] == group).any())
        )

    def step_of(self, rank: int) -> int | None:
        """The training step a rank was in: its heartbeat's, else the last in its log."""
        record = self.ranks.get(rank)
        if record is None:
            return None
        if record.heartbeat and record.heartbeat.step >= 0:
            return record.heartbeat.step
        return record.log.last_step if record.log else None

    def operation(self, rank: int, row: int) -> Operation:
        """Operation `row` (may be negative) of `rank`, with its codes resolved."""
        entry = self.ranks[rank].operations[row]
        return Operation(
            group=self.groups[entry["group"]],
            seq=int(entry["seq"]),
            op=self.names.ops[entry["op"]],
            p2p=int(entry["p2p"]),
            peer=int(entry["peer"]),
            sizes=self.names.sizes[entry["sizes"]],
            dtypes=self.names.dtypes[entry["dtypes"]],
            state=STATES[entry["state"]],
            retired=bool(entry["retired"]),
            frames=self.names.frames[entry["frames"]],
            created_ns=int(entry["created_ns"]),
            started_ns=int(entry["started_ns"]),
            completed_ns=int(entry["completed_ns"]),
            timeout_ms=int(entry["timeout_ms"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One fact behind a verdict. `file` and `line` are the user's code; `source` is the file the fact was read from."""

    text: str
    rank: int | None = None
    source: str = ""
    file: str = ""
    line: int = 0

    @classmethod
    def at(cls, frame: Frame | None, *, text: str, rank: int | None, source: str = "") -> Evidence:
        """A fact about the code at `frame`, if that is known."""
        file, line = (frame.file, frame.line) if frame else ("", 0)
        return cls(text=text, rank=rank, source=source, file=file, line=line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What one rank was doing, at the user's line `frame`. `detail` is the subtype of a verdict on it."""

    rank: int
    kind: RankState
    detail: Subtype = Subtype.NONE
    frame: Frame | None = None
    call: str = ""  # of a library, in which it waits
    signal: str = ""  # which killed it
    evidence: tuple[Evidence, ...] = ()
    confidence: float = 0.0

    @property
    def where(self) -> str:
        """` at file:line`, or nothing."""
        return f" at {self.frame.place}" if self.frame else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A possible cause. `chain` holds pairs (waiting rank, rank it waits for); `confidence` is between 0 and 1.

    Of a rank that died: `signal` that killed it, `file` and `line` of the code that ended it. `suspects` are ranks that the
    evidence points at, but not enough to accuse them: `culprits` is empty then.
    """

    verdict: VerdictKind
    subtype: Subtype = Subtype.NONE
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    group: str = ""
    seq: int | None = None
    op: str = ""
    step: int | None = None
    confidence: float = 0.5
    headline: str = ""
    evidence: tuple[Evidence, ...] = ()
    chain: tuple[tuple[int, int], ...] = ()
    next_steps: tuple[str, ...] = ()
    signal: str = ""
    file: str = ""
    line: int = 0
    suspects: tuple[int, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether it is shown that nothing is wrong."""
        return self.verdict == VerdictKind.HEALTHY

    @property
    def is_undecided(self) -> bool:
        """Whether the evidence shows a fault, or may, but neither who nor what is at fault."""
        return self.verdict in (VerdictKind.INSUFFICIENT_DATA, VerdictKind.WAIT_CHAIN) and not self.culprits
