"""Writes the black box: every operation that Python code issues on any process group, before it is issued.

The methods of torch's `ProcessGroup` class are wrapped, not the functions of `torch.distributed`: so `from torch.distributed
import all_reduce`, `batch_isend_irecv`, FSDP and pipelines are all seen, whenever they were imported. (Functional
collectives are issued from C++ and stay in the Flight Recorder only; sequence numbers come from the group itself, so both
agree.) What every operation goes through is in `debug.record.ring`, in C if it was compiled; what happens
once (for a group, a dtype, a call site) is here.
"""

from __future__ import annotations

import itertools
import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from titan_ckpt.debug.incident.black_box import (
    CAPACITY,
    COUNT,
    COUNT_AT,
    ENDED_AT,
    EXIT,
    EXIT_AT,
    HEADER,
    HEADER_BYTES,
    HEARTBEAT,
    HEARTBEAT_AT,
    MAGIC,
    NO_STATUS,
    NUMBER,
    NUMBER_AT,
    PHASES,
    PROGRESS,
    PROGRESS_AT,
    RECORD,
    SCHEDULE,
    SCHEDULE_AT,
    SPLITS_BYTES,
    SPLITS_HALF,
    SPLITS_USED,
    SPLITS_USED_AT,
    STATUS_AT,
    TEXT_BYTES,
    TEXT_END,
    TEXT_USED,
    TEXT_USED_AT,
    file_size,
    pack_members,
    pack_splits,
    splits_at,
)
from titan_ckpt.debug.incident.records import RECV, SEND, Splits
from titan_ckpt.debug.record.exit_status import write_status_at_exit
from titan_ckpt.debug.record.ring import NO_PEER, RingGroup, new_ring, splits_of
from titan_ckpt.errors import TitanError
from titan_ckpt.private_files import PrivateFolder

log = logging.getLogger(__name__)

# Method of ProcessGroup -> (name as the Flight Recorder writes it, which argument holds the tensors that ranks share).
COLLECTIVES: Mapping[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "all_to_all_single": ("all_to_all", 1),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", 1),
    "allgather_coalesced": ("all_gather_coalesced", 1),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "barrier": ("barrier", -1),
    "monitored_barrier": ("monitored_barrier", -1),
}
UNNUMBERED = ("monitored_barrier",)  # made of sends and receives: torch's counter does not count it
ROOT_ARGUMENT: Mapping[str, int] = {"broadcast": 1, "reduce": 1, "gather": 2, "scatter": 2}
WITH_SPLITS = ("all_to_all_single", "alltoall", "alltoall_base")
POINT_TO_POINT: Mapping[str, int] = {"send": SEND, "recv": RECV}
MAX_STACK = 6
MAX_OF_PACKAGES = 3  # frames of one call site: between torch and the program there may be a framework of many layers
MAX_CODES = 1 << 16
_DTYPES = {  # as the Flight Recorder writes them
    torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16", torch.bool: "Bool",
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
}  # fmt: skip
_LIBRARY = os.path.join(os.path.dirname(torch.__file__), "")
_PACKAGES = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_RING = os.path.join(os.path.dirname(__file__), "ring.py")
_DECORATORS = (__file__, _RING, "typing_extensions.py", "contextlib.py")  # the last two: of torch's functions


class BoxWriter:
    """One rank's black box, mapped into memory. Single-writer per slot; safe to read at any time by anybody."""

    def __init__(self, path: Path, *, rank: int, world_size: int, capacity: int = CAPACITY) -> None:
        self.path = path
        self.capacity = capacity
        self.map = _map_file(path, file_size(capacity))
        HEADER.pack_into(self.map, 0, MAGIC, rank, world_size, os.getpid(), capacity, 0, time.time_ns())
        self._text_at = HEADER_BYTES + capacity * RECORD.size
        self._text_used = self._splits_used = 0
        self._digest = xxhash.xxh3_128()
        self.count = 0
        self._step, self._phase, self._phase_ns, self._stopped = -1, 0, time.time_ns(), 0
        self._moves = 0
        self.beat()

    def add_text(self, kind: str, key: int, value: Any) -> None:
        """Append one entry of a table; dropped when the text area is full (readers then show "not known")."""
        line = json.dumps([kind, key, value]).encode() + b"\n"
        if self._text_used + len(line) > TEXT_BYTES:
            return
        at = self._text_at + self._text_used
        self.map[at : at + len(line)] = line
        self._text_used += len(line)
        self._digest.update(line)
        self.map[TEXT_USED_AT:TEXT_END] = TEXT_USED.pack(self._text_used) + self._digest.digest()

    def add_splits(self, at: int, splits: Splits) -> None:
        """Keep what the all_to_all whose record has its end at `at` sends and expects; dropped in a group of over 2,000 ranks."""
        number = NUMBER.unpack_from(self.map, at + NUMBER_AT - ENDED_AT)[0]
        begin, packed = pack_splits(self._splits_used, number, splits)
        if len(packed) > SPLITS_HALF:
            return
        place = splits_at(self.capacity) + begin % SPLITS_BYTES
        self.map[place : place + len(packed)] = packed
        self._splits_used = begin + len(packed)
        SPLITS_USED.pack_into(self.map, SPLITS_USED_AT, self._splits_used)

    def set_phase(self, step: int, phase: int) -> None:
        """Where the training loop is."""
        self._step, self._phase, self._phase_ns = step, phase, time.time_ns()
        self.beat()

    @property
    def phase(self) -> tuple[int, int]:
        """The step and phase last set."""
        return self._step, self._phase

    def write_status_at_exit(self) -> None:
        """Have the exit status of this process written into the box."""
        try:
            is_written = write_status_at_exit(self.path, STATUS_AT)
        except OSError as error:
            log.debug("no exit status in %s: %s", self.path, error)
            is_written = False
        EXIT.pack_into(self.map, EXIT_AT, is_written, NO_STATUS)

    def beat(self) -> None:
        """Record that this process still runs, and its number of operations."""
        COUNT.pack_into(self.map, COUNT_AT, self.count)
        HEARTBEAT.pack_into(
            self.map, HEARTBEAT_AT, self._step, self._phase, self._phase_ns, time.time_ns(), self._stopped
        )

    def move(self) -> None:
        """Record that this process has come further since the last tick."""
        self._moves += 1
        PROGRESS.pack_into(self.map, PROGRESS_AT, self._moves, time.time_ns())

    def schedule(self, ran_ns: int, queued_ns: int) -> None:
        """Record for how long the main thread ran, and waited for a processor, since this process last came further."""
        SCHEDULE.pack_into(self.map, SCHEDULE_AT, ran_ns, queued_ns)

    def stop(self) -> None:
        """Mark an orderly end; the file stays."""
        self._stopped = 1
        self.beat()


def _map_file(path: Path, size_bytes: int) -> mmap.mmap:
    """A new file, mapped; memory that is lost with the process if the file cannot be made, since training must go on."""
    try:
        descriptor = PrivateFolder(path.parent).create(path.name, size_bytes)
    except (OSError, TitanError) as error:
        log.error("no black box, so a killed process leaves no record: %s", error)
        return mmap.mmap(-1, size_bytes)
    with open(descriptor, "r+b") as file:  # the map keeps a descriptor of its own
        return mmap.mmap(file.fileno(), size_bytes)


class Hooks:
    """The wrapped methods of ProcessGroup and Work, as long as they are installed."""

    def __init__(self, box: BoxWriter) -> None:
        self._box = box
        self._groups: dict[Any, RingGroup] = {}
        self._dtypes: dict[Any, int] = {}
        self._originals: list[tuple[type, str, Any]] = []
        self._codes: dict[int, CodeType] = {}
        self._num_sites = 0
        self._ended_ns = self._raised_ns = 0
        layers = {id(code): layers for code, layers in _wrapped_functions()}
        self._ring = new_ring(box.map, box.capacity, self, self._dtypes, layers)

    def progress(self) -> int:
        """A number that changes whenever an operation is issued or ends well; updates the box's count. (A wait that times out is
        no progress: the dump of the stall before it stays.)"""
        self._box.count = self._ring.count
        if self._ring.ended_ns != self._raised_ns:
            self._ended_ns = self._ring.ended_ns
        return self._box.count + self._ended_ns

    def install(self) -> None:
        """Wrap; undone by `remove`."""
        ops: dict[str, int] = {}
        for method, (name, argument) in COLLECTIVES.items():
            if hasattr(dist.ProcessGroup, method):
                op = self._op(ops, name) << 48
                if method in (*ROOT_ARGUMENT, *UNNUMBERED, *WITH_SPLITS):
                    self._replace(dist.ProcessGroup, method, self._rare(method, op, argument))
                    continue
                wrapped = self._ring.collective(
                    getattr(dist.ProcessGroup, method), op | NO_PEER, argument, self._groups
                )
                self._replace(dist.ProcessGroup, method, wrapped)
        for method, direction in POINT_TO_POINT.items():
            self._replace(dist.ProcessGroup, method, self._point_to_point(method, self._op(ops, method), direction))
        self._replace(dist.Work, "wait", self._wait(dist.Work.wait))

    def remove(self) -> None:
        """Put the original methods back."""
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals.clear()
        self._groups.clear()
        self.progress()
        self._ring.close()

    def _replace(self, owner: type, name: str, wrapped: Any) -> None:
        # What stands in the class, not what getattr makes of it: a pybind11 method loses its `self` on the way.
        self._originals.append((owner, name, vars(owner).get(name, getattr(owner, name))))
        setattr(owner, name, wrapped)

    def _op(self, ops: dict[str, int], name: str) -> int:
        if name not in ops:
            ops[name] = len(ops)
            self._box.add_text("op", ops[name], name)
        return ops[name]

    def _rare(self, method: str, what: int, argument: int) -> Callable[..., Any]:
        """As `collective` of the ring, with the root, as a rank of the job, in the place of a peer, and with splits."""
        original, at_root = getattr(dist.ProcessGroup, method), ROOT_ARGUMENT.get(method, 0)
        record, await_, ended = self._ring.record, self._ring.await_, self._ring.ended
        group_of = self._unnumbered if method in UNNUMBERED else self._numbered

        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            known = group_of(group)
            options = args[at_root] if 0 < at_root < len(args) else kwargs.get("opts", kwargs.get("root"))
            root = options if isinstance(options, int) else getattr(options, "rootRank", -1)
            peer = known.members[root] if 0 <= root < len(known.members) else NO_PEER
            tensors = args[argument] if 0 <= argument < len(args) else None
            splits = splits_of(len(known.members), args) if method in WITH_SPLITS else None
            at = record(known.counted() + known.ahead, what | known.shifted_place | peer, 0, tensors)
            if at and splits is not None:
                self._box.add_splits(at, splits)
            work = original(group, *args, **kwargs)
            if work is None:
                ended(at)
            else:
                await_(work, at)
            return work

        return issue

    def _point_to_point(self, method: str, op: int, direction: int) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, method)
        record, await_, group_of = self._ring.record, self._ring.await_, self._groups.get
        sequence: dict[tuple[int, int], int] = {}

        def issue(group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
            known = group_of(group) or self.add_group(group)
            known.ahead -= known.is_gloo
            pair = (known.place, peer)
            seq = sequence[pair] = sequence.get(pair, 0) + 1
            rank = known.members[peer] if 0 <= peer < len(known.members) else NO_PEER
            at = record(seq, op << 48 | known.shifted_place | rank, direction << 16, tensors)
            work = original(group, tensors, peer, *args, **kwargs)
            await_(work, at)
            return work

        return issue

    def _wait(self, original: Any) -> Callable[..., Any]:
        # In Python, and by this name: `titan_ckpt.debug.incident.frames` finds a rank that waits by this frame in its stack.
        ring, take, ended, raised = self._ring, self._ring.take, self._ring.ended, self._ring.raised

        def wait(work: Any, *timeout: Any, **named: Any) -> Any:
            at = take(work)
            if not at:
                return original(work, *timeout, **named)
            try:
                result = original(work, *timeout, **named) if timeout or named else original(work)
            except BaseException:
                raised(at)
                self._raised_ns = ring.ended_ns
                raise
            ended(at)
            return result

        return wait

    def add_code(self, code: CodeType) -> bool:
        """Whether a code object is torch's, ours, or what torch decorates its functions with."""
        if len(self._codes) >= MAX_CODES:  # a program that makes code as it goes
            self._codes.clear()
            self._ring.forget()
        self._codes[id(code)] = code  # as long as it lives, no other has its id
        return code.co_filename.startswith(_LIBRARY) or code.co_filename.endswith(_DECORATORS)

    def add_group(self, group: Any) -> RingGroup:
        """A process group, when it is used for the first time."""
        # the group's counter may have been moved by P2P before we came: 0 is right as long as the recorder starts first
        return self._add_group(group, group, group.group_name, group._get_sequence_number_for_group, 1)

    def _numbered(self, group: Any) -> RingGroup:
        return self._groups.get(group) or self.add_group(group)

    def _unnumbered(self, group: Any) -> RingGroup:
        """The operations of a group that torch does not number, as a group of their own: we number them."""
        known = self._groups.get((group, UNNUMBERED))
        name = f"{group.group_name} (unnumbered)"
        return known or self._add_group((group, UNNUMBERED), group, name, itertools.count(1).__next__, 0)

    def _add_group(self, key: Any, group: Any, name: str, counted: Callable[[], int], ahead: int) -> RingGroup:
        place, members = len(self._groups), dist.get_process_group_ranks(group)
        self._box.add_text("group", place, [name, group.group_desc, pack_members(members)])
        known = self._groups[key] = RingGroup(
            place=place, shifted_place=place << 32, members=list(members), is_gloo=dist.get_backend(group) == "gloo",
            counted=counted, ahead=ahead,
        )  # fmt: skip
        return known

    def add_dtype(self, dtype: Any) -> int:
        """A dtype, when it is used for the first time."""
        index = self._dtypes[dtype] = len(self._dtypes) + 1
        self._box.add_text("dtype", index, _DTYPES.get(dtype, str(dtype).removeprefix("torch.")))
        return index

    def add_site(self, frame: FrameType) -> int:
        """A call site, when it is met for the first time; the code of the frame around it names it too."""
        self._num_sites += 1
        if frame.f_back is not None:
            self._codes[id(frame.f_back.f_code)] = frame.f_back.f_code
        stack: list[list[Any]] = []
        walker: FrameType | None = frame
        while walker is not None and len(stack) < MAX_STACK:
            file = walker.f_code.co_filename
            if len(stack) < MAX_OF_PACKAGES or not any(folder in file for folder in _PACKAGES):
                stack.append([file, walker.f_lineno, walker.f_code.co_name])
            walker = walker.f_back
        self._box.add_text("site", self._num_sites, stack)
        return self._num_sites


def _wrapped_functions() -> Iterator[tuple[CodeType, int]]:
    """The code of each function of torch.distributed that callers reach through wrappers only, and through how many."""
    for function in vars(dist.distributed_c10d).values():
        inner, layers = function, 0
        while type(inner) is FunctionType and (within := getattr(inner, "__wrapped__", None)) is not None:
            inner, layers = within, layers + 1
        if layers and _is_logged(function):
            yield inner.__code__, layers


def _is_logged(function: Any) -> bool:
    return bool(function.__code__.co_filename.endswith("c10d_logger.py"))


def phase_number(name: str) -> int:
    """The number of a phase in the heartbeat; unknown names are `other`."""
    return PHASES.index(name) if name in PHASES else len(PHASES) - 1


__all__ = ["BoxWriter", "Hooks", "phase_number"]
