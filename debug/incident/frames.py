"""Which thread of a process crashed, by what the interpreter's fault handler wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable

from titan_ckpt.debug.incident.records import Evidence, Frame, RankRecord, StackSnapshot

_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<|importlib|/torch/(?:distributed|utils|nn|autograd|_|optim)"
)

_WRAPPER = re.compile(r"/debug/(?:record/)?(?:hooks|recorder|ring)\.py$")


def is_library(frame: Frame) -> bool:
    """Whether a frame belongs to the interpreter or an installed package, not to the user's program."""
    return bool(_LIBRARY.search(frame.file)) or bool(_WRAPPER.search(frame.file))


def user_frame(frames: Iterable[Frame], wrappers: frozenset[tuple[str, int]] = frozenset()) -> Frame | None:
    """The innermost frame of the user's own program that is no wrapper (frames: most recent call first).

    Where all are, the innermost of the user's; where none is the user's, the innermost of all.
    """
    first = own = None
    for frame in frames:
        first = first or frame
        if not is_library(frame):
            own = own or frame
            if (frame.file, frame.line) not in wrappers:
                return frame
    return own or first


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
