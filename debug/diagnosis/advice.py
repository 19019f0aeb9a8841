"""What to do about each kind of verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan_ckpt.debug.incident.kinds import Subtype, VerdictKind

_ADVICE: Mapping[tuple[VerdictKind, Subtype], tuple[str, ...]] = {
    (VerdictKind.RANK_DIED, Subtype.SIGNAL): (
        "look at `dmesg` and the scheduler's log of that host",
        "set ulimit -c unlimited, or faulthandler, for the next crash",
    ),
    (VerdictKind.RANK_DIED, Subtype.OOM): (
        "lower the batch or the memory of the rank's host; compare its memory with its peers'",
    ),
    (VerdictKind.RANK_DIED, Subtype.PYTHON_EXCEPTION): (
        "fix the exception at that line; the other ranks are only its victims",
    ),
    (VerdictKind.RANK_DIED, Subtype.DEVICE): (
        "drain that host; run `nvidia-smi -q` and `dcgmi diag -r 3` on it before it gets work again",
        "look at the kernel's log around the error; restart without that host from the newest checkpoint",
    ),
    (VerdictKind.RANK_DIED, Subtype.HOST): (
        "ask the scheduler what happened to that host; restart without it from the newest checkpoint",
    ),
    (VerdictKind.RANK_DIED, Subtype.NONE): (
        "read that rank's log and its host's `dmesg`",
        "if no recorder ran: turn it on, so that the next death leaves a black box",
    ),
    (VerdictKind.RANK_FROZEN, Subtype.NONE): (
        "look at /proc/PID/stat and `dmesg` on its host: stopped (T: `kill -CONT PID`), in disk sleep (D), or the host lost",
        "take the host out and restart from the newest checkpoint",
    ),
    (VerdictKind.STUCK_ON_CPU, Subtype.DATALOADER): (
        "check the storage and the worker processes behind that line",
        "give the loader a timeout (DataLoader(timeout=...))",
    ),
    (VerdictKind.STUCK_ON_CPU, Subtype.CHECKPOINT_IO): (
        "check the store that the checkpoint goes to: quota, throttling, a hung mount",
        "save asynchronously (titan_ckpt.Saver), with no barrier behind a slow write",
    ),
    (VerdictKind.STUCK_ON_CPU, Subtype.PYTHON_LOCK): (
        "find who holds the lock: the other threads of this rank's stacks",
        "acquire with a timeout; keep the order of locks fixed",
    ),
    (VerdictKind.STUCK_ON_CPU, Subtype.GIL_HELD): (
        "find the extension code at that line that keeps the GIL",
        "run `py-spy dump --native --pid PID` on the process",
    ),
    (VerdictKind.STUCK_ON_CPU, Subtype.STARVED): (
        "look for what takes that host's processors: other jobs, more threads than cores (OMP_NUM_THREADS, loader workers)",
        "look at what limits the rank: cpu.max of its cgroup (cpu.stat counts throttling), taskset, nice",
    ),
    (VerdictKind.STUCK_ON_CPU, Subtype.GC): (
        "call gc.freeze() after start-up and gc.collect() at fixed steps on all ranks at once",
    ),
    (VerdictKind.STUCK_ON_CPU, Subtype.USER_CODE): (
        "look at what that line waits for, or loops over, on this rank alone",
        "give it a timeout, or do it on all ranks",
    ),
    (VerdictKind.STUCK_ON_CPU, Subtype.NONE): ("take a stack of that rank: `py-spy dump --pid PID`",),
    (VerdictKind.SKIPPED_COLLECTIVE, Subtype.FINISHED_EARLY): (
        "give every rank the same number of batches (drop the last, or pad), or use join",
    ),
    (VerdictKind.ORDER_MISMATCH, Subtype.ACROSS_GROUPS): (
        "make every rank issue the operations of its groups in the same order",
        "look for a branch between these two operations that depends on the rank or on rank-local data",
    ),
    (VerdictKind.PG_INIT_HANG, Subtype.NEW_GROUP): ("call new_group on every rank, members or not, in the same order",),
    (VerdictKind.TEARDOWN_STUCK, Subtype.NONE): (
        "end what the exit waits for before the script returns: threads, pools, loader workers, exit handlers",
        "call torch.distributed.destroy_process_group() on every rank once all are done",
    ),
    (VerdictKind.INSUFFICIENT_DATA, Subtype.NONE): (
        "take the stack of that rank: `py-spy dump --pid PID`; it shows whether it is in a send or recv or hangs by itself",
        "turn the recorder on (titan_ckpt.debug.Recorder.start(folder, rank=..., world_size=...)) and run again",
    ),
    (VerdictKind.P2P_MISSING_PEER, Subtype.NONE): (
        "look for the peer's half of this send/recv pair: a branch that leaves it out",
    ),
}


_NEXT_TIME = "take a stack before the job is ended the next time: `py-spy dump{} --pid PID`, or a recorder's"
_SIGKILL = (
    "look at `dmesg` and the scheduler's log of that host: the kernel's OOM killer, a limit of the job, or somebody's kill -9",
    "SIGKILL leaves neither a core nor a stack: only a recorder's black box shows the last operations",
)


# What cannot be done with a process that has ended -> what to do instead.
_OF_ENDED: Mapping[str, str] = {
    _ADVICE[VerdictKind.RANK_FROZEN, Subtype.NONE][0]:
        "look at `dmesg` on its host: tasks blocked on a disk or a mount, the host lost; a SIGSTOP leaves no trace there",
    _ADVICE[VerdictKind.STUCK_ON_CPU, Subtype.GIL_HELD][1]: _NEXT_TIME.format(" --native"),
    _ADVICE[VerdictKind.STUCK_ON_CPU, Subtype.NONE][0]: _NEXT_TIME.format(""),
    _ADVICE[VerdictKind.INSUFFICIENT_DATA, Subtype.NONE][0]: _NEXT_TIME.format(""),
}  # fmt: skip


def of_ended(steps: Sequence[str]) -> tuple[str, ...]:
    """What to do once the process that it is about has ended."""
    return tuple(_OF_ENDED.get(step, step) for step in steps)


def advice(verdict: VerdictKind, subtype: Subtype, signal: str = "") -> tuple[str, ...]:
    """What to do about a verdict; `signal` is the name of what killed a rank, such as SIGKILL."""
    if signal == "SIGKILL" and subtype != Subtype.OOM:
        return _SIGKILL
    return _ADVICE.get((verdict, subtype), _ADVICE.get((verdict, Subtype.NONE), ()))
