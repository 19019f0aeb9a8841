"""Writes the black box: every operation that Python code issues on any process group, before it is issued.

The methods of torch's `ProcessGroup` class are wrapped, not the functions of `torch.distributed`: so `from torch.distributed
import all_reduce`, `batch_isend_irecv`, FSDP and pipelines are all seen, whenever they were imported. (Functional
collectives are issued from C++ and stay in the Flight Recorder only; sequence numbers come from the group itself, so both
agree.) One operation costs two microseconds, its end included, one of which is to be called at all and to ask torch for the
number: so what every operation goes through are closures, which look no attribute up, and what can be said once (of a group,
a dtype, a call site) is said once.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from titan_ckpt.debug.blackbox import (
    BEGIN,
    CAPACITY,
    COUNT,
    COUNT_AT,
    ENDED,
    ENDED_AT,
    HEADER,
    HEADER_BYTES,
    HEARTBEAT,
    HEARTBEAT_AT,
    MAGIC,
    OUTCOME_AT,
    PHASES,
    RAISED,
    RECORD,
    TEXT_BYTES,
    TEXT_END,
    TEXT_USED,
    TEXT_USED_AT,
    file_size,
    pack_members,
)
from titan_ckpt.debug.records import RECV, SEND

# Method of ProcessGroup -> (name as the Flight Recorder writes it, which argument holds the tensors that ranks share).
COLLECTIVES: Mapping[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
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
POINT_TO_POINT: Mapping[str, int] = {"send": SEND, "recv": RECV}
MAX_STACK = 6
MAX_CODES = 1 << 16
_DTYPES = {  # as the Flight Recorder writes them
    torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16", torch.bool: "Bool",
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
}  # fmt: skip
_LIBRARY = os.path.dirname(dist.__file__)
_DECORATORS = (__file__, "typing_extensions.py", "contextlib.py")  # of torch's functions
_NO_PEER, _NO_DTYPE = 0xFFFFFFFF, 0xFFFF


class BoxWriter:
    """One rank's black box, mapped into memory. Single-writer per slot; safe to read at any time by anybody."""

    def __init__(self, path: Path, *, rank: int, world_size: int, capacity: int = CAPACITY) -> None:
        self.path = path
        self.capacity = capacity
        with open(path, "wb") as file:
            file.truncate(file_size(capacity))
        with open(path, "r+b") as file:  # the map keeps a descriptor of its own
            self.map = mmap.mmap(file.fileno(), file_size(capacity))
        HEADER.pack_into(self.map, 0, MAGIC, rank, world_size, os.getpid(), capacity, 0, time.time_ns())
        self._text_at = HEADER_BYTES + capacity * RECORD.size
        self._text_used = 0
        self._digest = xxhash.xxh3_128()
        self.count = 0
        self._step, self._phase, self._phase_ns, self._stopped = -1, 0, time.time_ns(), 0
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

    def set_phase(self, step: int, phase: int) -> None:
        """Where the training loop is."""
        self._step, self._phase, self._phase_ns = step, phase, time.time_ns()
        self.beat()

    @property
    def phase(self) -> tuple[int, int]:
        """The step and phase last set."""
        return self._step, self._phase

    def beat(self) -> None:
        """Say that this process still runs, and how many operations there are."""
        COUNT.pack_into(self.map, COUNT_AT, self.count)
        HEARTBEAT.pack_into(
            self.map, HEARTBEAT_AT, self._step, self._phase, self._phase_ns, time.time_ns(), self._stopped
        )

    def stop(self) -> None:
        """Mark an orderly end; the file stays."""
        self._stopped = 1
        self.beat()


@dataclass(slots=True, kw_only=True)
class _Group:
    """A process group as the hooks know it: its place in the box's table (shifted to where `what` has it), and how far the
    number of its next collective is ahead of torch's counter, which with gloo counts sends and receives too."""

    place: int
    shifted_place: int
    members: list[int]
    is_gloo: bool
    counted: Callable[[], int]
    ahead: int = 1


class Hooks:
    """The wrapped methods of ProcessGroup and Work, as long as they are installed."""

    def __init__(self, box: BoxWriter) -> None:
        self._box = box
        self._groups: dict[Any, _Group] = {}
        self._dtypes: dict[Any, int] = {}
        self._sites: dict[Any, int] = {}
        self._slots: dict[int, int] = {}
        self._originals: list[tuple[type, str, Any]] = []
        self._codes: list[CodeType] = []
        self._inside: dict[int, bool] = {}
        self._wrapped: dict[int, int] = {}
        self._num_sites = 0
        self._ended_ns = [0]
        self._record = self._recorder()

    @property
    def progress(self) -> int:
        """A number that changes whenever an operation is issued or waited for."""
        return self._box.count + self._ended_ns[0]

    def install(self) -> None:
        """Wrap; undone by `remove`."""
        self._wrapped.update({id(code): layers for code, layers in _wrapped_functions()})
        ops: dict[str, int] = {}
        for method, (name, argument) in COLLECTIVES.items():
            if hasattr(dist.ProcessGroup, method):
                self._replace(dist.ProcessGroup, method, self._collective(method, self._op(ops, name), argument))
        for method, direction in POINT_TO_POINT.items():
            self._replace(dist.ProcessGroup, method, self._point_to_point(method, self._op(ops, method), direction))
        self._replace(dist.Work, "wait", self._wait(dist.Work.wait))

    def remove(self) -> None:
        """Put the original methods back."""
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals.clear()
        self._groups.clear()
        self._slots.clear()

    def _replace(self, owner: type, name: str, wrapped: Any) -> None:
        # What stands in the class, not what getattr makes of it: a pybind11 method loses its `self` on the way.
        self._originals.append((owner, name, vars(owner).get(name, getattr(owner, name))))
        setattr(owner, name, wrapped)

    def _op(self, ops: dict[str, int], name: str) -> int:
        if name not in ops:
            ops[name] = len(ops)
            self._box.add_text("op", ops[name], name)
        return ops[name]

    def _collective(self, method: str, op: int, argument: int) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, method)
        record, group_of, slots = self._record, self._groups.get, self._slots
        what = op << 48 | _NO_PEER

        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            known = group_of(group) or self._add_group(group)
            tensors = args[argument] if 0 <= argument < len(args) else None
            at = record(known.counted() + known.ahead, what | known.shifted_place, 0, tensors)
            work = original(group, *args, **kwargs) if kwargs else original(group, *args)
            if work is None:
                self._ended(at)
            else:
                slots[id(work)] = at
            return work

        return issue

    def _point_to_point(self, method: str, op: int, direction: int) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, method)
        record, group_of, slots = self._record, self._groups.get, self._slots
        sequence: dict[tuple[int, int], int] = {}

        def issue(group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
            known = group_of(group) or self._add_group(group)
            known.ahead -= known.is_gloo
            pair = (known.place, peer)
            seq = sequence[pair] = sequence.get(pair, 0) + 1
            rank = known.members[peer] if 0 <= peer < len(known.members) else _NO_PEER
            slot = record(seq, op << 48 | known.shifted_place | rank, direction << 16, tensors)
            work = original(group, tensors, peer, *args, **kwargs)
            slots[id(work)] = slot
            return work

        return issue

    def _wait(self, original: Any) -> Callable[..., Any]:
        pop, data, ended_ns = self._slots.pop, self._box.map, self._ended_ns
        pack, now_ns, raised_at = ENDED.pack_into, time.time_ns, OUTCOME_AT - ENDED_AT

        def wait(work: Any, *timeout: Any, **named: Any) -> Any:
            at = pop(id(work), 0)
            if not at:
                return original(work, *timeout, **named)
            try:
                result = original(work, *timeout, **named) if timeout or named else original(work)
            except BaseException:
                data[at + raised_at] = RAISED
                pack(data, at, now_ns())
                raise
            ended_ns[0] = now = now_ns()
            pack(data, at, now)
            return result

        return wait

    def _recorder(self) -> Callable[[int, int, int, Any], int]:
        """What writes one record and gives the place of its end. `what` is the group, the operation and the peer in one number,
        `kind` the direction. Code objects are known by identity (to hash one takes as long as all the rest), frames that are
        always there are skipped."""
        box, dtype_of, is_inside, site_of = self._box, self._dtypes.get, self._inside.get, self._sites.get
        data, layers_of, find_site = box.map, self._wrapped.get, self._find_site
        getframe, now_ns, pack = sys._getframe, time.time_ns, BEGIN.pack_into
        ends = range(HEADER_BYTES + ENDED_AT, HEADER_BYTES + box.capacity * RECORD.size, RECORD.size)
        next_end = itertools.cycle(ends).__next__

        def record(seq: int, what: int, kind: int, tensors: Any) -> int:
            while type(tensors) is list or type(tensors) is tuple:
                tensors = tensors[0] if tensors else None
            if tensors is None:
                elements = -1
                kind |= _NO_DTYPE
            else:
                elements = tensors.numel()
                kind |= dtype_of(tensors.dtype) or self._add_dtype(tensors.dtype)
            frame: Any = getframe(2)
            layers = layers_of(id(frame.f_code))
            if layers:
                frame = getframe(3 + layers)
            code, outer = id(frame.f_code), frame.f_back
            if outer is not None and is_inside(code) is False:
                site = site_of((code, frame.f_lasti, id(outer.f_code), outer.f_lasti)) or find_site(frame)
            else:
                site = find_site(frame)
            box.count = number = box.count + 1
            at = next_end()
            pack(data, at - ENDED_AT, now_ns(), 0, elements, seq, site, what, kind, number & 0xFFFFFFFF)
            return at

        return record

    def _find_site(self, frame: Any) -> int:
        """The number of the first frame from `frame` outwards that is neither torch's nor ours, adding it."""
        is_inside = self._inside.get
        while True:
            code, outer = id(frame.f_code), frame.f_back
            known = is_inside(code)
            if known is None:
                known = self._add_code(frame.f_code)
            if not known or outer is None:
                break
            frame = outer
        place = (code, frame.f_lasti, id(outer.f_code), outer.f_lasti) if outer else (code, frame.f_lasti)
        return self._sites.get(place) or self._add_site(place, frame)

    def _ended(self, at: int) -> None:
        self._ended_ns[0] = now = time.time_ns()
        ENDED.pack_into(self._box.map, at, now)

    def _add_code(self, code: CodeType) -> bool:
        """Whether a code object is torch's, ours, or what torch decorates its functions with."""
        if len(self._codes) >= MAX_CODES:  # a program that makes code as it goes
            self._codes.clear()
            self._inside.clear()
            self._sites.clear()
        self._codes.append(code)  # as long as it lives, no other has its id
        is_inside = self._inside[id(code)] = code.co_filename.startswith(_LIBRARY) or code.co_filename.endswith(
            _DECORATORS
        )
        return is_inside

    def _add_group(self, group: Any) -> _Group:
        place = len(self._groups)
        members = dist.get_process_group_ranks(group)
        self._box.add_text("group", place, [group.group_name, group.group_desc, pack_members(members)])
        # the group's counter may have been moved by P2P before we came: 0 is right as long as the recorder starts first
        known = self._groups[group] = _Group(
            place=place, shifted_place=place << 32, members=list(members), is_gloo=dist.get_backend(group) == "gloo",
            counted=group._get_sequence_number_for_group,
        )  # fmt: skip
        return known

    def _add_dtype(self, dtype: Any) -> int:
        index = self._dtypes[dtype] = len(self._dtypes) + 1
        self._box.add_text("dtype", index, _DTYPES.get(dtype, str(dtype).removeprefix("torch.")))
        return index

    def _add_site(self, key: Any, frame: FrameType) -> int:
        self._num_sites += 1
        index = self._sites[key] = self._num_sites
        if frame.f_back is not None and id(frame.f_back.f_code) not in self._inside:
            self._add_code(frame.f_back.f_code)  # the key names it
        stack: list[list[Any]] = []
        walker: FrameType | None = frame
        while walker is not None and len(stack) < MAX_STACK:
            stack.append([walker.f_code.co_filename, walker.f_lineno, walker.f_code.co_name])
            walker = walker.f_back
        self._box.add_text("site", index, stack)
        return index


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
