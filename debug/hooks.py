"""Writes the black box: every operation that Python code issues on any process group, before it is issued.

The methods of torch's `ProcessGroup` class are wrapped, not the functions of `torch.distributed`: so `from torch.distributed
import all_reduce`, `batch_isend_irecv`, FSDP and pipelines are all seen, whenever they were imported. (Functional
collectives are issued from C++ and stay in the Flight Recorder only; sequence numbers come from the group itself, so both
agree.) One operation costs about a microsecond.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from titan_ckpt.debug.blackbox import (
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
    RETURNED,
    RUNNING,
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
_HERE = __file__


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


class Hooks:
    """The wrapped methods of ProcessGroup and Work, as long as they are installed."""

    def __init__(self, box: BoxWriter) -> None:
        self._box = box
        self._groups: dict[Any, tuple[int, list[int], list[int], bool]] = {}
        self._dtypes: dict[Any, int] = {}
        self._sites: dict[Any, int] = {}
        self._slots: dict[int, int] = {}
        self._originals: list[tuple[type, str, Any]] = []
        self._codes: list[CodeType] = []
        self._inside: dict[int, bool] = {}
        self._num_sites = 0
        self._map = box.map

    @property
    def progress(self) -> int:
        """A number that changes whenever an operation is issued or waited for."""
        return self._box.count + self._waits

    _waits = 0

    def install(self) -> None:
        """Wrap; undone by `remove`."""
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
        record, groups, slots = self._recorder(), self._groups, self._slots

        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            index, p2p_count, _, is_gloo = groups.get(group) or self._add_group(group)
            seq = group._get_sequence_number_for_group() + 1
            if is_gloo:
                seq -= p2p_count[0]
            tensor = args[argument] if 0 <= argument < len(args) else None
            slot = record(index, seq, op, 0, -1, tensor)
            work = original(group, *args, **kwargs)
            if work is None:
                self._ended(slot, RETURNED)
            else:
                slots[id(work)] = slot
            return work

        return issue

    def _point_to_point(self, method: str, op: int, direction: int) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, method)
        record, groups, slots = self._recorder(), self._groups, self._slots
        sequence: dict[tuple[int, int], int] = {}

        def issue(group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
            index, p2p_count, members, _ = groups.get(group) or self._add_group(group)
            p2p_count[0] += 1
            pair = (index, peer)
            seq = sequence[pair] = sequence.get(pair, 0) + 1
            slot = record(index, seq, op, direction, members[peer] if 0 <= peer < len(members) else -1, tensors)
            work = original(group, tensors, peer, *args, **kwargs)
            slots[id(work)] = slot
            return work

        return issue

    def _wait(self, original: Any) -> Callable[..., Any]:
        pop, ended = self._slots.pop, self._ended

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            slot = pop(id(work), -1)
            if slot < 0:
                return original(work, *args, **kwargs)
            try:
                result = original(work, *args, **kwargs)
            except BaseException:
                ended(slot, RAISED)
                raise
            ended(slot, RETURNED)
            return result

        return wait

    def _recorder(self) -> Callable[[int, int, int, int, int, Any], int]:
        """What writes one record and gives the offset of its slot. Everybody pays for it with every operation: so it is a
        closure (no attribute is looked up), and code objects are known by identity (to hash one takes as long as all the rest).
        """
        box, dtype_of, is_inside, site_of = self._box, self._dtypes.get, self._inside.get, self._sites.get
        data, capacity = box.map, box.capacity
        getframe, now_ns, pack, size = sys._getframe, time.time_ns, RECORD.pack_into, RECORD.size

        def record(group: int, seq: int, op: int, p2p: int, peer: int, tensors: Any) -> int:
            while type(tensors) is list or type(tensors) is tuple:
                tensors = tensors[0] if tensors else None
            elements = dtype = -1
            if tensors is not None:
                elements = tensors.numel()
                dtype = dtype_of(kind := tensors.dtype, -1)
                if dtype < 0:
                    dtype = self._add_dtype(kind)
            frame: Any = getframe(2)
            while True:
                code, outer = id(frame.f_code), frame.f_back
                known = is_inside(code)
                if known is None:
                    known = self._add_code(frame.f_code)
                if not known or outer is None:
                    break
                frame = outer
            place = (code, frame.f_lasti, id(outer.f_code), outer.f_lasti) if outer else (code, frame.f_lasti)
            site = site_of(place) or self._add_site(place, frame)
            count = box.count
            box.count = number = count + 1
            slot: int = HEADER_BYTES + count % capacity * size
            number &= 0xFFFFFFFF
            pack(data, slot, now_ns(), 0, elements, seq, site, peer, group, op, dtype, p2p, RUNNING, number)
            return slot

        return record

    def _ended(self, slot: int, outcome: int) -> None:
        self._waits += 1
        ENDED.pack_into(self._map, slot + ENDED_AT, time.time_ns())
        self._map[slot + OUTCOME_AT] = outcome

    def _add_code(self, code: CodeType) -> bool:
        """Whether a code object is torch's or ours."""
        if len(self._codes) >= MAX_CODES:  # a program that makes code as it goes
            self._codes.clear()
            self._inside.clear()
            self._sites.clear()
        self._codes.append(code)  # as long as it lives, no other has its id
        is_inside = self._inside[id(code)] = code.co_filename.startswith(_LIBRARY) or code.co_filename == _HERE
        return is_inside

    def _add_group(self, group: Any) -> tuple[int, list[int], list[int], bool]:
        index = len(self._groups)
        members = dist.get_process_group_ranks(group)
        is_gloo = dist.get_backend(group) == "gloo"
        self._box.add_text("group", index, [group.group_name, group.group_desc, pack_members(members)])
        # the group's counter may have been moved by P2P before we came: 0 is right as long as the recorder starts first
        known = self._groups[group] = (index, [0], list(members), is_gloo)
        return known

    def _add_dtype(self, dtype: Any) -> int:
        index = self._dtypes[dtype] = len(self._dtypes)
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


def phase_number(name: str) -> int:
    """The number of a phase in the heartbeat; unknown names are `other`."""
    return PHASES.index(name) if name in PHASES else len(PHASES) - 1


__all__ = ["BoxWriter", "Hooks", "phase_number"]
