"""The closed sets of names in records and in the JSON output. Each is a `str`, so it prints and compares as its value."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

STALL, DEMAND = "stall", "demand"  # why a recorder dumped: its stall time passed without progress; somebody asked


class VerdictKind(StrEnum):
    """What went wrong; `docs/hangs.md` explains each."""

    HEALTHY = "HEALTHY"
    RUNNING = "RUNNING"
    INSUFFICIENT_DATA = "INSUFFICIENT_DATA"
    SKIPPED_COLLECTIVE = "SKIPPED_COLLECTIVE"
    ORDER_MISMATCH = "ORDER_MISMATCH"
    OP_MISMATCH = "OP_MISMATCH"
    SIZE_MISMATCH = "SIZE_MISMATCH"
    DTYPE_MISMATCH = "DTYPE_MISMATCH"
    CALLSITE_DIVERGENCE = "CALLSITE_DIVERGENCE"
    WRONG_GROUP = "WRONG_GROUP"
    RANK_DIED = "RANK_DIED"
    RANK_FROZEN = "RANK_FROZEN"
    STUCK_ON_CPU = "STUCK_ON_CPU"
    P2P_MISSING_PEER = "P2P_MISSING_PEER"
    P2P_SIZE_MISMATCH = "P2P_SIZE_MISMATCH"
    P2P_CYCLE = "P2P_CYCLE"
    SCHEDULED_NOT_STARTED = "SCHEDULED_NOT_STARTED"
    STARTED_NOT_COMPLETED = "STARTED_NOT_COMPLETED"
    STRAGGLER = "STRAGGLER"
    PG_CONFIG_CONFLICT = "PG_CONFIG_CONFLICT"
    PG_INIT_HANG = "PG_INIT_HANG"
    TEARDOWN_STUCK = "TEARDOWN_STUCK"
    WAIT_CHAIN = "WAIT_CHAIN"


class Subtype(StrEnum):
    """What kind of its verdict it is, where there are several."""

    NONE = ""
    # SKIPPED_COLLECTIVE
    EXTRA_COLLECTIVE = "extra_collective"
    FINISHED_EARLY = "finished_early"
    # ORDER_MISMATCH
    ACROSS_GROUPS = "across_groups"
    # OP_MISMATCH
    ROOT = "root"
    # RANK_DIED
    SIGNAL = "signal"
    PYTHON_EXCEPTION = "python_exception"
    OOM = "oom"
    DEVICE = "device"
    EXIT_CODE = "exit_code"
    HOST = "host"
    # STUCK_ON_CPU
    DATALOADER = "dataloader"
    CHECKPOINT_IO = "checkpoint_io"
    PYTHON_LOCK = "python_lock"
    GIL_HELD = "gil_held"
    GC = "gc"
    USER_CODE = "user_code"
    STARVED = "starved"
    # PG_INIT_HANG
    NEW_GROUP = "new_group"


class RankState(StrEnum):
    """What a rank was doing when the evidence was taken."""

    IN_COLLECTIVE = "in_collective"
    IN_P2P = "in_p2p"
    IN_INIT = "in_init"
    IN_TEARDOWN = "in_teardown"
    IN_TORCH = "in_torch"  # in C++ below a call of torch, which may wait for a pending operation
    ON_CPU = "on_cpu"
    DEAD = "dead"
    FROZEN = "frozen"
    GIL_HELD = "gil_held"
    FINISHED = "finished"
    SILENT = "silent"  # left nothing
    UNKNOWN = "unknown"  # left operations, but nothing that shows what its main thread did

    @property
    def is_waiting(self) -> bool:
        """Whether it waited for other ranks."""
        return self in (RankState.IN_COLLECTIVE, RankState.IN_P2P, RankState.IN_INIT)

    @property
    def may_wait(self) -> bool:
        """Whether it waited for other ranks, or was where a wait leaves no frame of its own."""
        return self.is_waiting or self == RankState.IN_TORCH


class OperationState(StrEnum):
    """How far the device got, in the order of the codes in the column `state`."""

    SCHEDULED = "scheduled"
    STARTED = "started"
    COMPLETED = "completed"


WORDS: Mapping[RankState, str] = {  # what a rank does, in words for people
    RankState.DEAD: "dead",
    RankState.FROZEN: "frozen",
    RankState.GIL_HELD: "GIL held",
    RankState.ON_CPU: "in host code",
    RankState.IN_TORCH: "inside torch, such as backward()",
    RankState.SILENT: "no wait seen",
    RankState.IN_INIT: "in init",
    RankState.IN_P2P: "in send/recv",
    RankState.IN_COLLECTIVE: "in a collective",
    RankState.IN_TEARDOWN: "shutting down",
    RankState.FINISHED: "finished",
    RankState.UNKNOWN: "no stack",
}


class FlagKind(StrEnum):
    """Defects of the evidence itself."""

    RING_TRUNCATED = "RING_TRUNCATED"
    DUMP_MISSING = "DUMP_MISSING"
    EARLIER_ATTEMPT = "EARLIER_ATTEMPT"
    DUMP_CORRUPT = "DUMP_CORRUPT"
    VERSION_MIX = "VERSION_MIX"
    PG_CONFIG_UNUSABLE = "PG_CONFIG_UNUSABLE"
    PG_CONFIG_CONFLICT = "PG_CONFIG_CONFLICT"
    DUMP_SKEW = "DUMP_SKEW"
    CLOCK_SKEW = "CLOCK_SKEW"
    RANK_UNKNOWN = "RANK_UNKNOWN"
    NEWEST_FIRST = "NEWEST_FIRST"
    WENT_ON = "WENT_ON"


class DumpKind(StrEnum):
    """Where a rank's operations were read from."""

    FLIGHT_RECORDER = "flight_recorder"
    BLACK_BOX = "black_box"


REQUESTED_ENDS = (
    "SignalException",
    "SIGTERMException",
    "KeyboardInterrupt",
    "SystemExit",
)  # how a process answers a launcher that ends it

IN_LOG = "end of log"  # where a stack was found: a log ends with it
USAGE_ERROR = "UsageError"  # the type that is given to a program's refusal of its command line, which is no exception


class EventKind(StrEnum):
    """What a line of a log means."""

    EXCEPTION = "exception"  # a Python exception of the program's own
    COMM_CLOSED = "comm_closed"  # a peer went away
    COMM_TIMEOUT = "comm_timeout"  # a peer did not come
    COMM_MISMATCH = "comm_mismatch"  # the data that arrived has the wrong size
    COMM_ERROR = "comm_error"  # any other error of the communication library
    STORE_WAIT = "store_wait"  # a rank waits for a key of the rendezvous store
    FATAL_SIGNAL = "fatal_signal"  # the interpreter's fault handler
    OOM = "oom"
    WATCHDOG = "watchdog"  # NCCL's watchdog: group, sequence number, operation
    SIGTERM = "sigterm"
    HEARTBEAT = "heartbeat"  # NCCL's heartbeat monitor: the watchdog itself is stuck, or another rank asked for dumps
    DESYNC = "desync"  # torch's report of ranks that lag behind; they are in the value `names`
    DEVICE_ERROR = "device_error"  # a GPU or its driver failed
    DEVICE_SLOW = "device_slow"  # a GPU lowered its clock: heat or power
    UNREACHABLE = "unreachable"  # NCCL's RAS got no answer of a process; the ranks are in the value `names`
    KILLED = "killed"  # a kernel, scheduler or shell says that a process was killed
    EXITED = "exited"  # a process ended with an error, as its launcher or cluster manager says
    NODE_LOST = "node_lost"  # a scheduler lost a host
    PREEMPTED = "preempted"  # this and the next two: ends that are no fault of the job
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"

    @property
    def is_communication(self) -> bool:
        """Whether the communication library reported it: mostly the trouble of a peer."""
        return self.value.startswith("comm_")
