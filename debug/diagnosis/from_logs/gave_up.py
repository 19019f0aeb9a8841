"""An exception by which a rank gives up a wait and does not name for whom: another process may be at fault, or what is between
the two. Pure.

Texts from ray/exceptions.py, zmq/error.py, torch/csrc/distributed/rpc (request_callback, tensorpipe_agent), grpc's status codes,
and CPython's queue, socket, asyncio and concurrent.futures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from titan_ckpt.debug.diagnosis.rank_death import own_exception
from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.contradictions import rank_list
from titan_ckpt.debug.incident.kinds import EventKind, VerdictKind
from titan_ckpt.debug.incident.records import RankRecord, Run, Verdict

# Raised for want of an answer of another process.
_FOR_ANOTHER = re.compile(
    r"(?:[\w.]{1,80}\.)?(?:GetTimeoutError\b|zmq\.error\.Again\b|\w{0,20}(?:Heartbeat|Watchdog)(?:Lost|Expired|Timeout|Missed)\w*)"
    r"|.{0,60}\bwatchdog\b.{0,60}\bdid not (?:finish|complete|arrive|respond)\b"
    r"|(?:[\w.]{1,80}: )?RPCErr:\d{1,3}:RPC ran for more than set timeout|StatusCode\.DEADLINE_EXCEEDED"
)
# Raised at the end of any wait: for another process, or for the program's own threads, files and services.
_FOR_SOMETHING = re.compile(
    r"(?:(?:asyncio|socket|queue|_queue|concurrent\.futures|multiprocessing|builtins|filelock|threading)[\w.]{0,40}\.)?"
    r"(?:TimeoutError|[Tt]imeout|Empty|CancelledError|BrokenBarrierError)\b"
)


def without_waiters(run: Run, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts; the first one names suspects alone where it rests on such an exception: its rank, and those whose logs end
    without an error."""
    first, *others = verdicts
    if first.verdict != VerdictKind.RANK_DIED or first.confidence != Basis.OWN_EXCEPTION.confidence:
        return list(verdicts)
    errors = {rank: own_exception(run.ranks[rank]) for rank in first.culprits}
    silent = tuple(sorted(rank for rank, record in run.ranks.items() if rank not in errors and _is_silent(record)))
    for error in errors.values():
        if error is None or not (_FOR_ANOTHER.match(error.text) or (silent and _FOR_SOMETHING.match(error.text))):
            return list(verdicts)
    quiet = f"; nothing more was heard of {rank_list(silent)}" if silent else ""
    waiters = tuple(sorted(errors))
    unclear = replace(
        first, culprits=(), suspects=tuple(sorted({*silent, *waiters})), victims=(), file="", line=0,
        confidence=Basis.GAVE_UP.confidence,
        headline=f"{rank_list(waiters)} gave up a wait, and the error does not name for whom{quiet}",
        next_steps=(_NEXT, *first.next_steps[1:]),
    )  # fmt: skip
    return [unclear, *others]


_NEXT = "find out from the code at that line whom or what it waited for, and what that did last"


def _is_silent(record: RankRecord) -> bool:
    """Whether the rank's log ends with no error, and nothing shows that it ended by itself."""
    has_ended = record.exit is not None and not record.exit.was_told
    if record.log is None or has_ended:
        return False
    is_told = any(e.kind.is_communication or e.kind == EventKind.WATCHDOG for e in record.events)
    return own_exception(record) is None and not is_told
