"""Which thread of a process crashed, by what the interpreter's fault handler wrote."""

from __future__ import annotations

from titan_ckpt.debug.logs import user_frame
from titan_ckpt.debug.records import Evidence, Frame, RankRecord, StackSnapshot


def crash_frame(stack: StackSnapshot | None) -> Frame | None:
    """The user's frame in the thread that crashed, in the main thread where that one runs no Python."""
    thread = (stack.current or stack.main) if stack else None
    return user_frame(thread.frames) if thread else None


def crashed_thread(record: RankRecord, stack: StackSnapshot | None) -> tuple[Evidence, ...]:
    """Which thread crashed, where it was not the main one."""
    if stack is None or not stack.threads or (stack.current is not None and stack.current.is_main):
        return ()
    text = "the thread that crashed runs no Python (gloo, NCCL, CUDA, a library's own): the line is where the main thread was"
    if stack.current is not None:
        text = f"it crashed in the thread {stack.current.name}"
    return (Evidence(text=text, rank=record.rank, source=stack.source),)
