"""The records of the debugger: what was read (Run and below) and what was concluded (Verdict).

Operations are columns, not objects: a job of 1,024 ranks leaves two million of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

SCHEDULED, STARTED, COMPLETED = 0, 1, 2
STATES = ("scheduled", "started", "completed")
SEND, RECV = 1, 2
MAX_RANK = 131_072  # a larger number in a file is damage

# One operation. group, op, sizes, dtypes and frames are positions in Run.groups and Run.names.
# seq counts collectives per group (P2P: per pair); `p2p` is 0, SEND or RECV and then `peer` is a global rank (-1 unknown).
# `retired` is what gloo knows: the work object is gone, which is also so after a failure. Times are 0 where unknown.
OPERATION = np.dtype(
    [
        ("group", "i4"), ("seq", "i4"), ("op", "i2"), ("p2p", "i1"), ("state", "i1"), ("retired", "?"),
        ("dtypes", "i2"), ("sizes", "i4"), ("frames", "i4"), ("peer", "i4"), ("timeout_ms", "i4"),
        ("created_ns", "i8"), ("started_ns", "i8"), ("completed_ns", "i8"),
    ]
)  # fmt: skip

NO_OPERATIONS: Array = np.zeros(0, OPERATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of a call stack; `text` is the source line where somebody saved it."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """Frames of one thread, most recent call first; `is_current` = it wrote the dump; `state`: "Garbage-collecting" ..."""

    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False
    is_current: bool = False
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSnapshot:
    """All threads of a rank at one moment; `reason` is what the file's name or head says (stall, sigterm, gil ...)."""

    source: str
    reason: str
    threads: tuple[Thread, ...]

    @property
    def main(self) -> Thread | None:
        """The thread that runs the training script."""
        return next((thread for thread in self.threads if thread.is_main), None)

    @property
    def current(self) -> Thread | None:
        """The thread that wrote it, or crashed; None where that runs no Python, as those of gloo, NCCL and CUDA do not."""
        return next((thread for thread in self.threads if thread.is_current), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """A line of a log that means something; `kind` is one of `titan_ckpt.debug.read.logs.KINDS`."""

    kind: str
    rank: int
    text: str
    source: str
    line: int
    time_s: float | None = None
    frame: Frame | None = None
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """What a rank's own log says."""

    source: str
    events: tuple[LogEvent, ...] = ()
    tail: tuple[str, ...] = ()
    tail_line: int = 0
    last_step: int | None = None
    last_time_s: float | None = None
    step_times: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended: negative code = killed by that signal. `was_told` = a launcher had sent it SIGTERM before."""

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
    """The recorder's last words: where the training loop was, and when its watching thread last ran (ns since epoch)."""

    step: int
    phase: str
    phase_ns: int
    alive_ns: int
    source: str
    is_stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """One Flight Recorder dump or black box that was read."""

    source: str
    kind: str
    reason: str
    version: str
    num_operations: int
    first_record_id: int = 0
    time_s: float | None = None
    is_truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group; it is the same group only if name and members agree. `members` is () where nobody says."""

    name: str
    description: str = ""
    members: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.description or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation spelled out, for people."""

    group: Group
    seq: int
    op: str
    p2p: int
    peer: int
    sizes: str
    dtypes: str
    state: str
    retired: bool
    frames: tuple[Frame, ...]
    created_ns: int
    started_ns: int
    completed_ns: int
    timeout_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """Everything known of one rank."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The tables that an operation's integers point into."""

    ops: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    frames: tuple[tuple[Frame, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Something about the evidence itself that limits what can be concluded."""

    flag: str
    text: str
    ranks: tuple[int, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What torchrun (or our injector) said at the end; `code` is None when its log does not tell."""

    source: str
    code: int | None = None
    first_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One incident of one job. `wrappers` are (file, line) of the program's that call several kinds of operations: a
    decorator or helper around torch.distributed, never the line to blame."""

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

    def members(self, group: int) -> tuple[int, ...]:
        """Ranks of a group: as recorded, else everybody who ever used it."""
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
        """Operation `row` (may be negative) of `rank`, spelled out."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A possible cause. `chain` holds (waiting rank, rank it waits for); `confidence` is between 0 and 1."""

    verdict: str
    subtype: str = ""
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
