"""How sure each verdict is, and what that number rests on. All confidences of the project are in this table.

`docs/hangs.md` shows it; a test compares the two. A number orders the verdicts of one incident; it is a judgement checked against
recorded incidents, not a measured frequency.
"""

from __future__ import annotations

from enum import Enum

from titan_ckpt.debug.incident.kinds import VerdictKind as V

LEVELS = (
    (
        0.9,
        "recorded directly: an exit code, the kernel's process state, an exception, a stack, or operations that disagree",
    ),
    (0.7, "the records agree on one reading, but one step of it is inferred"),
    (0.6, "the evidence fits this verdict and at least one other: look here first, and check before you act"),
    (0.5, "one of several readings: collect what the advice names"),
    (0.0, "a lead, or the statement that the evidence does not decide"),
)


class Basis(Enum):
    """What a verdict rests on: its confidence, the verdicts that use it, and the reason in words."""

    confidence: float
    verdicts: tuple[V, ...]
    text: str

    def __init__(self, confidence: float, verdicts: tuple[V, ...], text: str) -> None:
        self.confidence, self.verdicts, self.text = confidence, verdicts, text

    # ranks that died, froze or are stuck
    PROCESS_STOPPED = 0.97, (V.RANK_FROZEN,), "the kernel's state of the process is `T` (stopped)"
    OWN_EXCEPTION = 0.95, (V.RANK_DIED,), "its log holds an exception of its own"
    COMMAND_LINE = 0.85, (V.RANK_DIED,), "the program refused the command line that all ranks share"
    KILLED = 0.95, (V.RANK_DIED,), "its exit code is a signal"
    REPORTED = (
        0.85,
        (V.RANK_DIED,),
        "a kernel, driver or scheduler reports its process killed, its GPU failed or its host lost",
    )
    GIL_STACK = 0.95, (V.STUCK_ON_CPU,), "the C timer took a stack while Python could not run"
    STARVED = (
        0.85,
        (V.STUCK_ON_CPU,),
        "the kernel counts that its main thread was ready to run, without a processor, since it last came further",
    )
    INTERRUPTED = 0.85, (V.RANK_DIED,), "KeyboardInterrupt ended it alone, before any launcher told it to end"
    FATAL_LOG = 0.9, (V.RANK_DIED,), "its log holds the interpreter's fatal error"
    FATAL_STACK = 0.9, (V.RANK_DIED,), "the interpreter's fault handler wrote its stack"
    IGNORED_SIGTERM = 0.9, (V.RANK_FROZEN,), "no dump, no reaction to SIGTERM: the launcher needed SIGKILL"
    MAIN_STACK = 0.9, (V.STUCK_ON_CPU,), "the stack of its main thread is outside of any collective"
    VANISHED = 0.75, (V.RANK_DIED,), "its recorder did not end in order, and it alone left no sign of SIGTERM"
    PROCESS_GONE = 0.8, (V.RANK_DIED,), "its process is gone without an orderly end"
    TICKS_STOPPED_CLOSED = 0.85, (V.RANK_DIED,), "its recorder stopped ticking and its connections closed"
    TICKS_STOPPED_OPEN = 0.8, (V.RANK_FROZEN,), "its recorder stopped ticking and its connections stayed open"
    ENDED_NORMALLY = 0.85, (V.SKIPPED_COLLECTIVE,), "it ended with exit code 0 while others wait for it"
    OUTLASTED = (
        0.75,
        (V.SKIPPED_COLLECTIVE,),
        "the few that failed in a call for want of the many that ended with exit code 0",
    )
    ENDED_AS_MANY = (
        0.4,
        (V.SKIPPED_COLLECTIVE,),
        "it ended with exit code 0, as did no fewer ranks of the group than wait: either party may be wrong",
    )
    GONE_TOGETHER = (
        0.4,
        (V.RANK_DIED,),
        "several ranks fell silent while their peers' connections closed: a launcher may have ended all but one of them",
    )
    ENDED_WITHOUT_IT = (
        0.8,
        (V.P2P_MISSING_PEER,),
        "its send or recv names a rank that ended normally, and another rank waits for it",
    )
    STACK_IN_INIT = 0.75, (V.PG_INIT_HANG,), "its stack is in the creation of a process group"
    CAME_TOO_LATE = 0.75, (V.STUCK_ON_CPU,), "it issued the operation only when the others' timeout had passed"
    STACK_IN_TEARDOWN = 0.7, (V.TEARDOWN_STUCK,), "its stack is in the shutdown of the process"
    PHASE = 0.7, (V.STUCK_ON_CPU,), "no stack; the recorder's phase of the training loop"
    CONNECTIONS_CLOSED = 0.7, (V.RANK_DIED,), "no stack; its peers' connections to it closed and none timed out"
    ABORTED = 0.75, (V.RANK_DIED,), "SIGABRT ended it, and it had nothing pending that a library aborts for"
    TOLD_BY_ANOTHER = 0.75, (V.RANK_DIED,), "SIGTERM ended it first, and its launcher sent that to the others alone"
    EXIT_STATUS = (
        0.85,
        (V.RANK_DIED,),
        "its black box holds an exit code other than 0, and it neither waited nor was told to end",
    )
    NO_END = 0.6, (V.RANK_DIED,), "its recorder left no end of the process, all others did"
    GAVE_UP = 0.4, (V.RANK_DIED,), "it raised at the end of a wait, and its error does not name for whom"
    ORDER_UNKNOWN = 0.4, (V.RANK_DIED,), "several ranks raised exceptions of their own at about the same time"
    DUMPED_FOR_EXCEPTION = 0.6, (V.RANK_DIED,), "its recorder dumped for an exception whose text is missing"
    OTHER_CALL = (
        0.6,
        (V.SKIPPED_COLLECTIVE,),
        "its stack is in another collective than the one it is awaited in; no dump",
    )
    OVERTOOK = (
        0.8,
        (V.ORDER_MISMATCH,),
        "it issued an operation of another group that the others issue only after the one they wait in",
    )
    STACK_IN_TORCH = (
        0.6,
        (V.STUCK_ON_CPU,),
        "its stack is in a call of torch, and it has nothing pending that could hold it",
    )
    STACK_IN_P2P = 0.6, (V.P2P_MISSING_PEER,), "its stack is in a send or recv whose peer nobody recorded"
    CONNECTIONS_OPEN = 0.6, (V.RANK_FROZEN,), "left nothing; its peers' connections to it timed out instead of closing"
    WAITS_FOR_UNRECORDED = 0.5, (V.P2P_MISSING_PEER,), "waits for something that its dump does not hold"
    TICKS_STOPPED = 0.5, (V.RANK_FROZEN,), "its recorder stopped ticking; frozen, dead or without the GIL"
    NOT_ISSUED = 0.5, (V.STUCK_ON_CPU,), "did not issue the operation; no stack"
    NOT_ISSUED_TO_ONE = 0.4, (V.STUCK_ON_CPU,), "the same, and one rank alone waits for it: either may be at fault"
    UNKNOWN_WAIT = 0.5, (V.WAIT_CHAIN,), "waits itself, the evidence does not show for whom"
    LEFT_NOTHING = 0.4, (V.RANK_DIED,), "left no dump and no stack"
    NOT_ISSUED_GLOO = 0.4, (V.INSUFFICIENT_DATA,), "did not issue the operation; gloo's dumps hold no send or recv"

    # operations that do not match
    CLEAR_MAJORITY = (
        0.95,
        (V.SKIPPED_COLLECTIVE, V.ORDER_MISMATCH, V.OP_MISMATCH, V.SIZE_MISMATCH, V.DTYPE_MISMATCH),
        "most ranks agree with each other, the culprits do not (`CALLSITE_DIVERGENCE`: times 0.95)",
    )
    ONE_MORE = (
        0.75,
        (V.SKIPPED_COLLECTIVE,),
        "it waits in an operation from a line of its own, where all others had stopped",
    )
    OUT_OF_STEP = (
        0.85,
        (V.SKIPPED_COLLECTIVE,),
        "all other ranks used their groups in one order, the culprit in another",
    )
    BROKE_HISTORY = 0.85, CLEAR_MAJORITY[1], "equal parties; one broke with its own earlier operations"
    PLURALITY = 0.75, CLEAR_MAJORITY[1], "the largest party agrees, but it is no majority"
    TIE = 0.4, CLEAR_MAJORITY[1], "equal parties, and neither broke with its history: all are suspects"

    # circles of waits
    WAIT_CYCLE = 0.9, (V.P2P_CYCLE, V.P2P_MISSING_PEER), "the pending halves of send/recv pairs, recorded on both sides"
    BROKE_ROUTINE = (
        0.85,
        (V.P2P_MISSING_PEER, V.SKIPPED_COLLECTIVE),
        "a circle of waits; one rank left the order that it had repeated",
    )
    ALONE_ON_GROUP = 0.85, (V.WRONG_GROUP,), "the same operation, pending alone on another group"
    CYCLE_MINORITY = 0.75, (V.ORDER_MISMATCH,), "a circle across groups; fewer ranks wait on the culprits' group"
    CYCLE_TIE = 0.4, (V.ORDER_MISMATCH,), "a circle across groups of equal parties: all are suspects"
    UNMET = (
        0.8,
        (V.P2P_MISSING_PEER,),
        "both halves of a send/recv pair are pending, recorded on both sides: both are suspects",
    )
    ALL_IN_P2P = (
        0.7,
        (V.P2P_CYCLE,),
        "every rank is in a send or recv, or in a recv by its traceback; the pairs are not recorded",
    )

    BY_SOURCE_LINE = (
        0.65,
        (V.P2P_MISSING_PEER, V.WRONG_GROUP, V.P2P_CYCLE),
        "the source lines in tracebacks name the peer, or the lack of a group",
    )
    BY_SOURCE_LINE_TIE = (
        0.4,
        (V.P2P_MISSING_PEER,),
        "the source line of one names another as its peer, which is past it: either may be at fault",
    )

    # process groups
    INIT_AWAITED = 0.95, (V.PG_INIT_HANG,), "the store key of the rank was waited for, or it alone is seen elsewhere"
    INIT_ABSENT = 0.75, (V.PG_INIT_HANG,), "several ranks are not where the others wait"
    INIT_ALL = 0.5, (V.PG_INIT_HANG,), "all ranks wait, or nothing was collected of the missing ones"
    GROUP_MINORITY = 0.9, (V.PG_CONFIG_CONFLICT,), "fewer ranks use the culprits' member list"
    GROUP_TIE = (
        0.4,
        (V.PG_CONFIG_CONFLICT, V.PG_INIT_HANG),
        "equally many ranks use each member list, or ranks make groups out of step: all are suspects",
    )

    # device and network
    P2P_SIZE_NEW = 0.9, (V.P2P_SIZE_MISMATCH,), "the two halves differ, and one side never used that size before"
    P2P_SIZE = 0.7, (V.P2P_SIZE_MISMATCH,), "the two halves differ, and history does not show whose size is new"
    NOT_STARTED = 0.8, (V.SCHEDULED_NOT_STARTED,), "all ranks issued it alike; these devices did not start it"
    FEW_NOT_COMPLETED = (
        0.7,
        (V.STARTED_NOT_COMPLETED,),
        "all ranks issued it alike; at most half of the devices did not end it",
    )
    MANY_NOT_COMPLETED = (
        0.6,
        (V.STARTED_NOT_COMPLETED,),
        "all ranks issued it alike; most devices did not end it: nobody named",
    )

    # logs and stacks without dumps
    WITNESSES_AND_LINE = 0.75, (V.STUCK_ON_CPU,), "no dumps; the others waited and its stack shows another line"
    WITNESSES = (
        0.6,
        (V.STUCK_ON_CPU, V.SKIPPED_COLLECTIVE, V.TEARDOWN_STUCK, V.RANK_FROZEN, V.RANK_DIED),
        "no dumps; the others waited, it did not",
    )
    OTHER_WAIT = 0.65, (V.SKIPPED_COLLECTIVE, V.STUCK_ON_CPU), "no dumps; all waited, a small minority in another call"
    ODD_ONE = (
        0.65,
        (V.SKIPPED_COLLECTIVE,),
        "gloo's error of a wrong size; all others are in one backward pass, or one rank alone counts its steps otherwise",
    )
    FURTHER_STEP = (
        0.4,
        (V.SKIPPED_COLLECTIVE,),
        "gloo's error of a wrong size; one rank alone logged a further step, which an evaluator does as well: a suspect",
    )
    LEFT_ROOTED = (
        0.4,
        (V.SKIPPED_COLLECTIVE,),
        "no dumps; most wait in a broadcast or scatter, which others may leave first, or a call is unknown: all are suspects",
    )
    LEFT_ROUTINE = (
        0.6,
        (V.SKIPPED_COLLECTIVE,),
        "no dumps; all waited, equal parties: one in the backward pass, one not",
    )
    NAMED_BY_PEERS = (
        0.75,
        (V.STUCK_ON_CPU, V.SKIPPED_COLLECTIVE, V.OP_MISMATCH, V.SIZE_MISMATCH, V.DTYPE_MISMATCH),
        "error texts of other ranks name it, and it names none of them",
    )
    WATCHDOGS = (
        0.75,
        (V.SIZE_MISMATCH, V.STUCK_ON_CPU),
        "NCCL's watchdogs: its size differs from most others', or it enqueued less than they wait for",
    )
    EXIT_CODE = 0.75, (V.RANK_DIED,), "its launcher lists it first, with an exit code of its own, and no text shows why"
    EXIT_CODE_ALONE = 0.55, (V.RANK_DIED,), "the same, and the output of that rank is not there"
    RAISED_BEFORE = (
        0.75,
        (V.RANK_DIED,),
        "no dumps; unlike the others it waited while it handled an exception of its own",
    )
    NO_ANSWER = (
        0.6,
        (V.RANK_DIED, V.RANK_FROZEN),
        "NCCL's RAS got no answer of its process, and nothing else shows what it does",
    )
    BEHIND_TWICE = (
        0.6,
        (V.STUCK_ON_CPU,),
        "two reports of NCCL's RAS show it behind the others, at the same operations",
    )
    SIZE_IN_LOG = 0.75, (V.SIZE_MISMATCH,), "gloo's error in the log of a rank that received the wrong size; no culprit"

    # no hang
    STRAGGLER_DONE = 0.9, (V.STRAGGLER,), "one rank came last again and again; the job did not hang"
    STRAGGLER_RUNNING = (
        0.45,
        (V.STRAGGLER,),
        "the same in a job that may hang; up to 0.85 if the others waited most of the time",
    )
    ALL_DONE = 0.9, (V.HEALTHY,), "the job went on or ended well, and every rank left a dump"
    ALL_AGREE = (
        0.75,
        (V.RUNNING, V.HEALTHY),
        "all ranks issued and completed the same operations, with no sign of trouble",
    )
    QUIET_LOGS = 0.6, (V.HEALTHY,), "logs only: the job ended well"
    ONE_LOOK = 0.5, (V.RUNNING,), "one look at a job without a sign of trouble: it runs, or has just stopped"
    UNDECIDED = 0.3, (V.INSUFFICIENT_DATA,), "no verdict fits"


ACCUSING = 0.45  # what rests on less accuses nobody: its ranks are suspects

# What a second finding does to a confidence.
EXPLAINED = 0.5  # its culprits are victims of the top verdict
OTHER_FAULT = 0.5  # a straggler in a job that hangs for another reason
DIED_FIRST = 0.8  # the culprit of a mismatch had raised an exception before
NAMED_TOGETHER = 0.9  # several ranks of which only the absence is known
CONTRADICTED = 0.45  # other evidence speaks against it: then it accuses nobody
IN_FLIGHT = 0.5  # ranks that have nothing to do with one another show the same: a job that goes on looks so
MET = 0.45  # all ranks completed the operation in which they disagreed: it held nobody, and nothing else is known
SHIFTED = 0.95  # a mismatch traced back to an earlier line

# Used only to order verdicts: a cause goes first, and mismatched operations end in dead or waiting ranks.
WEIGHTS = {
    V.SKIPPED_COLLECTIVE: 1.4, V.ORDER_MISMATCH: 1.4, V.OP_MISMATCH: 1.4, V.SIZE_MISMATCH: 1.4, V.DTYPE_MISMATCH: 1.4,
    V.CALLSITE_DIVERGENCE: 1.4, V.P2P_SIZE_MISMATCH: 1.4, V.PG_INIT_HANG: 1.3, V.WRONG_GROUP: 1.4, V.WAIT_CHAIN: 0.5,
    V.PG_CONFIG_CONFLICT: 1.4,
}  # fmt: skip


def straggling(basis: Basis, share: float) -> float:
    """The confidence of `basis`, raised by the share of the time that the others waited where it exceeds 0.6."""
    return basis.confidence + 0.4 * min(share, 1.0) * (share > 0.6)


def confidence_table() -> str:
    """The levels in words and the table, as Markdown, most certain first."""
    levels = ["| at least | means |", "|---|---|", *(f"| {least:.1f} | {text} |" for least, text in LEVELS)]
    rows = sorted(Basis, key=lambda basis: -basis.confidence)
    bases = ["| confidence | it rests on | verdicts |", "|---|---|---|"]
    bases += [f"| {basis.confidence:.2f} | {basis.text} | {_names(basis)} |" for basis in rows]
    return "\n".join([*levels, "", *bases])


def _names(basis: Basis) -> str:
    return ", ".join(f"`{verdict}`" for verdict in basis.verdicts)
