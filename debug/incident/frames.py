"""What a stack shows: the user's frame, the thread that crashed, the call that the main thread waits in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from titan_ckpt.debug.incident.kinds import DEMAND, IN_LOG, STALL, RankState
from titan_ckpt.debug.incident.records import Evidence, Frame, RankRecord, StackSnapshot, Thread

_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<|importlib|(?:^|/)torch/(?:distributed|utils|nn|autograd|_|optim)"
    r"|\.so(?:\.\d+)*$|^(?:torch|numpy|deepspeed|accelerate|transformers|lightning|pytorch_lightning|ray|triton)/"
)
# py-spy leaves out the folder that a module was found in: `threading.py`, `multiprocessing/queues.py`, `torch/nn/...`.
_STANDARD = re.compile(
    r"^(?:(?:threading|queue|socket|selectors|subprocess|ssl|contextlib|functools|runpy|weakref|signal|pickle|tempfile|shutil)\.py$"
    r"|(?:multiprocessing|concurrent|asyncio|logging|json|http|urllib|collections)/)"
)
# Files of the recorder itself, also where releases before 0.2 had them.
_WRAPPER = re.compile(r"/debug/(?:record/)?(?:hooks|recorder|ring)\.py$")
_RECORDER = ("/debug/record/recorder.py", "/debug/recorder.py", "debug\\recorder.py")
_HOOKS = ("/debug/record/hooks.py", "/debug/hooks.py")

INIT = ("init_process_group", "_new_process_group_helper", "_store_based_barrier", "rendezvous", "new_group",
        "_new_group_with_tag", "split_group", "_create_tcp_store", "next_rendezvous")  # fmt: skip
_TEARDOWN = ("destroy_process_group", "_shutdown", "_exit_function", "_python_exit")
_P2P = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py", "_symmetric_memory/__init__.py")
_WAITS_FOR_WORK = re.compile(r"\w*work\w*(?:\[\w+\])?\.wait\(", re.IGNORECASE)
# Calls into C++ that leave no frame of their own; each may wait for what is pending on the device or in a process group.
_WAITS = re.compile(r"\b(synchronize|item|cpu|tolist|numpy|nonzero|run_backward)\(")
_TORCH = re.compile(r"(?:^|/)(?:torch|transformer_engine|deepspeed|triton/runtime)/")
# Parts of torch that work in Python or read files: a thread in these computes, or waits for something else than ranks.
_TORCH_ON_CPU = re.compile(
    r"(?:^|/)torch/(?:utils/data|multiprocessing|_dynamo|_inductor|_functorch|fx|export|jit|onnx|hub|package|serialization\.py|storage\.py"
    r"|distributed/(?:checkpoint|elastic|rendezvous|launcher)|profiler|testing|compiler|library\.py|_library)"
)
_NATIVE_WAITS = re.compile(
    r"cu(?:da)?(?:Stream|Event|Device|Ctx)Synchronize|cu(?:da)?Memcpy|hip\w+(?:Synchronize|Memcpy)|\bnccl\w+|gloo::|c10d::"
    r"|autograd::Engine::|_local_scalar_dense"
)
# Of torch's own waits, those for other ranks alone.
_AWAITS_RANKS = re.compile(
    r"c10d::(?:\w+::)*\w*(?:[wW]ait|synchronize)\w*(?:$|[(<])|c10d::ProcessGroup\w+::\w*[bB]arrier|gloo::|\bncclGroup"
)
_STORE = re.compile(r"c10d::\w*Store")
_OF_DEVICES = re.compile(r"\blib(?:cuda|cudart|nccl|rccl|amdhip64|hsa-runtime64)\.so")
_OF_TORCH = re.compile(r"\blib(?:torch\w*|c10\w*)\.so")
_NATIVE = re.compile(r"<(?:native|.*\.(?:so[\d.]*|dylib|S|c|cc|cpp|cxx|cu|h|hpp|inl))>$")
_KNOWN_CALLS = frozenset(
    {
        "backward",
        "forward",
        "step",
        "clip_grad_norm_",
        "item",
        "synchronize",
        "cpu",
        "tolist",
        "numpy",
        "all_reduce",
        "wait",
    }
)
MAX_FRAMES = 64


def is_library(frame: Frame) -> bool:
    """Whether a frame belongs to the interpreter or an installed package, not to the user's program."""
    return _is_library_file(frame.file)


@lru_cache(maxsize=4096)  # of thousands of ranks, whose frames are in the same few files
def _is_library_file(file: str) -> bool:
    return bool(_LIBRARY.search(file) or _STANDARD.match(file) or _WRAPPER.search(file))


def is_native(frame: Frame) -> bool:
    """Whether a frame is of C or C++: readers put its file or library in angle brackets, with line 0 where it has none."""
    return frame.file.startswith("<") and (frame.line == 0 or _NATIVE.match(frame.file) is not None)


def user_frame(frames: Iterable[Frame], wrappers: frozenset[tuple[str, int]] = frozenset()) -> Frame | None:
    """The innermost frame of the user's program that is no wrapper (frames: most recent call first).

    If all of the user's frames are wrappers, the innermost of them; if no frame is the user's, the innermost frame.
    """
    first = own = None
    for frame in frames:
        first = first or frame
        if not is_library(frame):
            own = own or frame
            if (frame.file, frame.line) not in wrappers:
                return frame
    return own or first


def program_frames(thread: Thread) -> tuple[Frame, ...]:
    """A thread's frames without those of our recorder that wrote them down (most recent call first)."""
    own = [place for place, frame in enumerate(thread.frames) if is_recorders(frame)]
    return thread.frames[own[-1] + 1 :] if own else thread.frames


def is_recorders(frame: Frame) -> bool:
    """Whether it is a call of our recorder, such as its handler of a signal."""
    return frame.file.endswith((*_RECORDER, "/debug/record/signal_reader.py"))


def program_folder(frames: Iterable[Frame]) -> str:
    """The folder of the program that was started: that of its outermost frame (frames: most recent call first)."""
    outer = next((frame for frame in reversed([*frames]) if frame.function == "<module>"), None)
    return outer.file.rpartition("/")[0] if outer is not None and not is_library(outer) else ""


def main_frame(stack: StackSnapshot | None) -> Frame | None:
    """The user's frame in the main thread."""
    return user_frame(stack.main.frames) if stack and stack.main else None


def crash_frame(stack: StackSnapshot | None) -> Frame | None:
    """The user's frame in the thread that crashed, or in the main thread if that thread runs no Python."""
    thread = (stack.current or stack.main) if stack else None
    return user_frame(thread.frames) if thread else None


def crashed_thread(record: RankRecord, stack: StackSnapshot | None) -> tuple[Evidence, ...]:
    """Which thread crashed, if it was not the main one."""
    if stack is None or not stack.threads or (stack.current is not None and stack.current.is_main):
        return ()
    text = "the thread that crashed runs no Python (gloo, NCCL, CUDA, a library's own): the line is where the main thread was"
    if stack.current is not None:
        text = f"it crashed in the thread {stack.current.name}"
    return (Evidence(text=text, rank=record.rank, source=stack.source),)


def abort_stack(record: RankRecord) -> StackSnapshot | None:
    """What Python wrote when SIGABRT ended the process."""
    return next((stack for stack in record.stacks if stack.reason == "fatal abort"), None)


def when_aborted(record: RankRecord) -> tuple[Evidence, ...]:
    """Where the main thread was when a library's own thread aborted the process."""
    stack = abort_stack(record)
    frame = main_frame(stack)
    if stack is None or frame is None:
        return ()
    return (Evidence.at(frame, text=f"aborted while in {frame.function}", rank=record.rank, source=stack.source),)


def hang_stack(record: RankRecord) -> StackSnapshot | None:
    """The earliest snapshot that shows where the main thread hung; not one that the main thread wrote itself."""
    usable = [
        s
        for s in record.stacks
        if s.main and s.main.frames and not _wrote_itself(s, s.main) and not _is_dumping(s.main, s)
    ]
    return min(usable, key=lambda s: (_lateness(s.reason), s.source), default=None)


def _wrote_itself(stack: StackSnapshot, main: Thread) -> bool:
    """Whether the main thread wrote the dump; but in a log, where it stands in a library, a signal made it write (faulthandler's
    `register`), and it was there."""
    return main.is_current and not (stack.reason == IN_LOG and is_library(main.frames[0]))


def _is_dumping(main: Thread, stack: StackSnapshot) -> bool:
    """Whether the main thread is past what it died of: in our recorder, in an excepthook, or in the function from which
    another thread wrote this file."""
    if any(frame.file.endswith(_RECORDER) for frame in main.frames):
        return True
    if any(frame.function.endswith(("excepthook", "_exitfunc")) for frame in main.frames):
        return True
    if "term" in stack.reason and _is_at_exit(main):
        return True
    writer = next((thread for thread in stack.threads if thread.is_current), None)
    inner = main.frames[0]
    return writer is not None and not is_library(inner) and any(_is_alike(f, inner) for f in writer.frames[:4])


_ENTRIES = ("<module>", "_run_module_as_main", "_run_code")


def _is_at_exit(main: Thread) -> bool:
    """Whether the interpreter runs a library's exit function: no frame of the program is below it."""
    entry = main.frames[-1]
    if entry.function in (*_ENTRIES, *_TEARDOWN) or len(main.frames) >= MAX_FRAMES:
        return False
    return all(is_library(frame) for frame in main.frames)


def _is_alike(a: Frame, b: Frame) -> bool:
    return (a.file, a.function) == (b.file, b.function)


def _lateness(reason: str) -> int:
    """How late in a hang a snapshot of this reason is taken."""
    if not reason or reason.startswith(STALL):
        return 0
    return 1 if "gil" in reason or "term" in reason.lower() or DEMAND in reason else 2


def without_loaders(stacks: Sequence[StackSnapshot]) -> tuple[StackSnapshot, ...]:
    """The stacks without those of a data loader's workers, which share their rank's environment and are not the rank; all, if
    there is no other."""
    own = tuple(stack for stack in stacks if stack.main is None or not any(map(_is_loader, stack.main.frames)))
    return own or tuple(stacks)


def _is_loader(frame: Frame) -> bool:
    return frame.function.endswith("_worker_loop") and frame.file.endswith("data/_utils/worker.py")


def main_thread_state(main: Thread) -> tuple[RankState, str]:
    """What a main thread is in, and the name of the library call it waits in."""
    within = _library_frames(main)
    inside = tuple(frame for frame in within if not is_native(frame))
    if is_importing(inside):
        return RankState.ON_CPU, ""
    is_waiting = any(frame.function == "wait" and frame.file.endswith(_HOOKS) for frame in inside)
    found = next((call for frame in inside if (call := _library_call(main, frame)) is not None), None)
    if found is not None:
        return found
    user = main.frames[len(within)] if len(within) < len(main.frames) else None
    if not inside and user is None:
        return _without_python(within)
    if is_waiting or (not inside and user and _WAITS_FOR_WORK.search(user.text)):
        return RankState.IN_COLLECTIVE, "wait"
    if (inside and _runs_torch(inside[0])) or any(map(_waits_natively, within[: _num_native(within)])):
        return RankState.IN_TORCH, _spoken_call(inside or within)
    near = inside[0] if inside else user
    waits = _WAITS.search(near.text) if near else None
    return (RankState.IN_TORCH, waits.group(1)) if waits else (RankState.ON_CPU, "")


def thread_that_waits(stack: StackSnapshot) -> Thread | None:
    """The thread of the program's, beside the main one, that waits for other ranks: the main thread may wait for it, or for a
    lock that it holds."""
    for thread in stack.threads:
        if not thread.is_main and any(not is_library(frame) for frame in thread.frames):
            kind, call = main_thread_state(thread)
            if kind in (RankState.IN_COLLECTIVE, RankState.IN_P2P) and call:
                return thread
    return None


def _without_python(frames: Sequence[Frame]) -> tuple[RankState, str]:
    """What a thread is in of which only frames of C and C++ are known, as gdb shows them without CPython's extension."""
    entry = next((place for place, f in enumerate(frames) if f.function.startswith("_PyEval_EvalFrame")), len(frames))
    below = frames[:entry]
    if any(_AWAITS_RANKS.search(frame.function) and not _STORE.search(frame.function) for frame in below):
        return RankState.IN_COLLECTIVE, "wait"
    named = (frame for frame in below if _NATIVE_WAITS.search(frame.function))
    torch = next(named, None) or next(
        (f for f in below if _OF_DEVICES.search(f.file) or _OF_TORCH.search(f.file)), None
    )
    if torch is not None:
        return RankState.IN_TORCH, torch.function
    # Without the interpreter below, nothing shows what called: symbols are missing, or the stack is cut off.
    return (RankState.ON_CPU if entry < len(frames) else RankState.UNKNOWN), ""


def _library_frames(main: Thread) -> tuple[Frame, ...]:
    """The frames further in than the user's innermost one."""
    count = next((i for i, frame in enumerate(main.frames[:MAX_FRAMES]) if not is_library(frame)), None)
    return main.frames[: MAX_FRAMES if count is None else count]


def is_importing(frames: Sequence[Frame]) -> bool:
    """Whether a module is being imported: what its body calls is no wait for other ranks."""
    return any(frame.file.startswith("<frozen importlib") for frame in frames)


def _runs_torch(innermost: Frame) -> bool:
    """Whether below this frame there is C++ of torch, or of what it calls, that may wait for a pending operation."""
    return bool(_TORCH.search(innermost.file)) and not _TORCH_ON_CPU.search(innermost.file)


def _num_native(frames: Sequence[Frame]) -> int:
    """How many frames of C and C++ there are below the innermost one of Python."""
    return next((place for place, frame in enumerate(frames) if not is_native(frame)), len(frames))


def _waits_natively(frame: Frame) -> bool:
    return bool(_NATIVE_WAITS.search(frame.function) or _OF_DEVICES.search(frame.file))


def _spoken_call(inside: Sequence[Frame]) -> str:
    """The function of torch that the user's program called, by a name that users know."""
    names = [frame.function for frame in inside]
    return next((name for name in reversed(names) if name in _KNOWN_CALLS), names[-1])


def _library_call(main: Thread, frame: Frame) -> tuple[RankState, str] | None:
    name, file = frame.function, frame.file
    if name in _TEARDOWN and ("torch/" in file or "threading" in file or "concurrent" in file):
        return RankState.IN_TEARDOWN, name
    if name in INIT:
        return RankState.IN_INIT, _outermost(main, INIT) or name
    if "torch/distributed" in file and name in _P2P:
        return RankState.IN_P2P, name
    if file.endswith(_COLLECTIVES) and name not in ("wrapper", "<module>"):
        return RankState.IN_COLLECTIVE, name
    return None


def _outermost(main: Thread, names: Sequence[str]) -> str:
    return next((frame.function for frame in reversed(main.frames) if frame.function in names), "")


def torch_call(frames: Iterable[Frame]) -> str:
    """The function of torch.distributed that a traceback (innermost call first) went through, "" if none."""
    for frame in frames:
        if frame.file.endswith(_COLLECTIVES) and frame.function not in ("wrapper", "<module>"):
            return frame.function
    return ""
