"""The black box's ring of records: where an operation was called, of what size, when it began and when it ended.

`Ring` here is Python; `_ring.c`, built where a compiler exists, does the same at a third of the cost. `new_ring` picks
the faster. Both call `RingNames` the first time they meet a group, a dtype, a code object or a call site.
"""

from __future__ import annotations

import itertools
import mmap
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Protocol

from titan_ckpt.debug.incident.black_box import BEGIN, ENDED, ENDED_AT, HEADER_BYTES, OUTCOME_AT, RAISED, RECORD
from titan_ckpt.debug.incident.records import Splits

compiled: Any = None
with suppress(ImportError):  # installed without a compiler
    from titan_ckpt.debug.record import _ring as compiled  # type: ignore[attr-defined, no-redef]

NO_PEER, NO_DTYPE = 0xFFFFFFFF, 0xFFFF


@dataclass(slots=True, kw_only=True)
class RingGroup:
    """A process group: its index in the box's table (shifted to its bits in `what`), and the offset from torch's
    counter to the number of its next collective. With gloo, torch's counter includes sends and receives."""

    place: int
    shifted_place: int
    members: list[int]
    is_gloo: bool
    counted: Callable[[], int]
    ahead: int = 1


class RingNames(Protocol):
    """Numbers what a ring meets for the first time, and writes it into the box."""

    def add_group(self, group: Any) -> RingGroup:
        """Add a group to the dict of groups and return it."""

    def add_dtype(self, dtype: Any) -> int:
        """Add a dtype to the dict of dtypes and return its number."""

    def add_code(self, code: CodeType) -> bool:
        """Whether a code object is torch's or ours; keeps it alive as long as the ring refers to it."""

    def add_site(self, frame: FrameType) -> int:
        """Add a call site and return its number, from 1."""


class AnyRing(Protocol):
    """A ring of records. `what` packs operation, group and peer into one number; `kind` is the direction of a send."""

    @property
    def count(self) -> int:
        """Operations so far."""

    @property
    def ended_ns(self) -> int:
        """When the last operation ended."""

    def record(self, seq: int, what: int, kind: int, tensors: Any, /) -> int:
        """Write a record for the caller's caller; returns the offset of its end time."""

    def collective(
        self, original: Any, what: int, argument: int, groups: dict[Any, RingGroup], /
    ) -> Callable[..., Any]:
        """A method of ProcessGroup that writes a record before it calls `original`."""

    def await_(self, work: Any, at: int, /) -> None:
        """Remember the offset of a work's end time until it is taken."""

    def take(self, work: Any, /) -> int:
        """Remove and return the offset of a work's end time; 0 if unknown."""

    def ended(self, at: int, /) -> None:
        """Write the end time of a record."""

    def raised(self, at: int, /) -> None:
        """Mark a record's operation as raised and write its end time."""

    def forget(self) -> None:
        """Forget code objects and sites."""

    def close(self) -> None:
        """Release this ring's hold on the map."""


def splits_of(members: int, arguments: Sequence[Any]) -> Splits | None:
    """Elements that an all_to_all of a group of `members` sends to each of them, and expects of each.

    `arguments` as ProcessGroup takes them: lists of tensors to receive into and to send, or one tensor each, then for each of
    these the rows per member (none: equal parts). None for a call that torch refuses.
    """
    if len(arguments) < 2:
        return None
    output, given, *rest = arguments
    rows = rest if len(rest) > 1 and not isinstance(output, list | tuple) else ((), ())
    received, sent = _parts(output, rows[0], members), _parts(given, rows[1], members)
    return (sent, received) if len(sent) == len(received) == members else None


def _parts(tensors: Any, rows: Any, members: int) -> tuple[int, ...]:
    if isinstance(tensors, list | tuple):
        return tuple(tensor.numel() for tensor in tensors)
    if not rows:
        return (tensors.numel() // members,) * members
    of_row = tensors.numel() // max(1, tensors.shape[0]) if tensors.dim() else 1
    return tuple(int(count) * of_row for count in rows)


def new_ring(
    map_: mmap.mmap, capacity: int, names: RingNames, dtypes: dict[Any, int], layers: Mapping[int, int]
) -> AnyRing:
    """The fastest ring that is installed."""
    if compiled is not None:
        ring: AnyRing = compiled.Ring(map_, HEADER_BYTES, capacity, names, dtypes)
        return ring
    return Ring(map_, capacity, names, dtypes, layers)


class Ring:
    """A ring in Python. `layers` maps the id of a torch function's code to the number of wrappers around it.

    The hot path is closures, which avoid attribute lookups. Code objects are compared by identity (hashing one takes as
    long as all the rest), and frames that are always present are skipped.
    """

    def __init__(
        self, map_: mmap.mmap, capacity: int, names: RingNames, dtypes: dict[Any, int], layers: Mapping[int, int]
    ) -> None:
        self._names, self._map = names, map_
        self._inside: dict[int, bool] = {}
        self._sites: dict[tuple[int, ...], int] = {}
        self._ends: dict[int, int] = {}
        self._counts, self._ended = [0], [0]
        self.record = self._recorder(capacity, dtypes, layers)
        self.ended = self._ender()
        self.await_ = lambda work, at: self._ends.__setitem__(id(work), at)

    @property
    def count(self) -> int:
        """Operations so far."""
        return self._counts[0]

    @property
    def ended_ns(self) -> int:
        """When the last operation ended."""
        return self._ended[0]

    def take(self, work: Any) -> int:
        """Remove and return the offset of a work's end time; 0 if unknown."""
        return self._ends.pop(id(work), 0)

    def raised(self, at: int) -> None:
        """Mark a record's operation as raised and write its end time."""
        self._map[at + OUTCOME_AT - ENDED_AT] = RAISED
        self.ended(at)

    def forget(self) -> None:
        """Forget code objects and sites."""
        self._inside.clear()
        self._sites.clear()

    def close(self) -> None:
        """Forget pending operations."""
        self._ends.clear()

    def collective(self, original: Any, what: int, argument: int, groups: dict[Any, RingGroup]) -> Callable[..., Any]:
        """A method of ProcessGroup that writes a record before it calls `original`."""
        record, ended, group_of, ends, names = self.record, self.ended, groups.get, self._ends, self._names

        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            known = group_of(group) or names.add_group(group)
            tensors = args[argument] if 0 <= argument < len(args) else None
            at = record(known.counted() + known.ahead, what | known.shifted_place, 0, tensors)
            work = original(group, *args, **kwargs) if kwargs else original(group, *args)
            if work is None:
                ended(at)
            else:
                ends[id(work)] = at
            return work

        return issue

    def _ender(self) -> Callable[[int], None]:
        data, last, pack, now_ns = self._map, self._ended, ENDED.pack_into, time.time_ns

        def ended(at: int) -> None:
            last[0] = now = now_ns()
            pack(data, at, now)

        return ended

    def _recorder(
        self, capacity: int, dtypes: dict[Any, int], layers: Mapping[int, int]
    ) -> Callable[[int, int, int, Any], int]:
        dtype_of, is_inside, site_of, names = dtypes.get, self._inside.get, self._sites.get, self._names
        data, layers_of, find_site, counts = self._map, layers.get, self._find_site, self._counts
        getframe, now_ns, pack = sys._getframe, time.time_ns, BEGIN.pack_into
        next_end = itertools.cycle(
            range(HEADER_BYTES + ENDED_AT, HEADER_BYTES + capacity * RECORD.size, RECORD.size)
        ).__next__

        def record(seq: int, what: int, kind: int, tensors: Any) -> int:
            while type(tensors) is list or type(tensors) is tuple:
                tensors = tensors[0] if tensors else None
            if tensors is None:
                elements = -1
                kind |= NO_DTYPE
            else:
                elements = tensors.numel()
                kind |= dtype_of(tensors.dtype) or names.add_dtype(tensors.dtype)
            frame: Any = getframe(2)
            around = layers_of(id(frame.f_code))
            if around:
                frame = getframe(3 + around)
            code, outer = id(frame.f_code), frame.f_back
            if outer is not None and is_inside(code) is False:
                site = site_of((code, frame.f_lasti, id(outer.f_code), outer.f_lasti)) or find_site(frame)
            else:
                site = find_site(frame)
            counts[0] = number = counts[0] + 1
            at = next_end()
            pack(data, at - ENDED_AT, now_ns(), 0, elements, seq, site, what, kind, number & 0xFFFFFFFF)
            return at

        return record

    def _find_site(self, frame: Any) -> int:
        """Number the first frame from `frame` outwards that is neither torch's nor ours; adds its site if new."""
        while self._is_inside(frame.f_code) and frame.f_back is not None:
            frame = frame.f_back
        code, outer = id(frame.f_code), frame.f_back
        place = (code, frame.f_lasti, id(outer.f_code), outer.f_lasti) if outer else (code, frame.f_lasti)
        site = self._sites.get(place)
        if site is None:
            site = self._sites[place] = self._names.add_site(frame)
        return site

    def _is_inside(self, code: CodeType) -> bool:
        known = self._inside.get(id(code))
        if known is None:
            known = self._inside[id(code)] = self._names.add_code(code)
        return known
