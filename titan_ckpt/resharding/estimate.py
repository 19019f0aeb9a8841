"""The cost of a reshard before it moves a byte: walk the executor's schedule without reading."""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.resharding.reshard import ReshardPlan
from titan_ckpt.resharding.target import CutOrigin
from titan_ckpt.rewrite.memory import Budget
from titan_ckpt.rewrite.schedule import Limits, schedule
from titan_ckpt.rewrite.work_unit import ChunkKey, ReadRequest, Unit, WriteRegion
from titan_ckpt.store.base import Store

NUM_LARGEST = 5
MAX_UNITS = 3000
MAX_GROUPS = 64
MAX_REGIONS = 100_000
_ATTEMPT = "a-00000000T000000Z-00000000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A store's speed for the time estimate: bytes per second each way, seconds until the first byte of a request."""

    bytes_per_s: float = 1e9
    latency_s: float = 0.0
    requests_at_once: int = 4


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """`length` bytes of an object from `start`."""

    object: str
    start: int
    length: int


# Fields whose JSON key has another name.
_JSON_KEYS = {"num_groups": "num_waves"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardEstimate:
    """The cost of a reshard, in bytes and requests.

    Of a large plan only a part of the schedule is walked, for `walked_bytes` of `needed_bytes`; reads are scaled up from it.
    """

    source: str
    source_mesh: str | None
    mesh: str
    num_tensors: int
    written_bytes: int
    read_bytes: int
    needed_bytes: int
    read_requests: int
    num_source_files: int
    num_files: int
    walked_bytes: int
    num_groups: int
    peak_memory_bytes: int
    smallest_file_bytes: int
    largest_file_bytes: int
    largest_reads: tuple[ObjectRange, ...]
    seconds: float
    placements: dict[str, int]
    guessed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        content = {_JSON_KEYS.get(name, name): getattr(self, name) for name in self.__slots__}
        content["largest_reads"] = [asdict(read) for read in self.largest_reads]
        return content | {"guessed": list(self.guessed)}


def estimate_reshard(
    plan: ReshardPlan, store: Store, *, memory_bytes: int, is_checked: bool = True, link: Link | None = None
) -> ReshardEstimate:
    """Estimate the plan's reads, writes, memory and time."""
    link = link or Link()
    budget = Budget.of(memory_bytes, plan.checkpoint.store, store, num_files=len(plan.target.ranks_with_files()))
    groups = plan.file_groups(budget.max_open_files)
    at_most = min(MAX_GROUPS, max(1, len(groups) * MAX_REGIONS // max(len(plan.target.rank), 1)))
    walked = groups[:: -(-len(groups) // at_most)]
    reads = _Reads()
    checked: set[ChunkKey] | None = set() if is_checked else None
    for ranks in walked:
        units = schedule(
            plan.source, plan.file_group(ranks, _ATTEMPT), Limits(buffer_bytes=budget.buffer_bytes), checked=checked
        )
        for unit in islice(units, MAX_UNITS // len(walked)):
            reads.add(unit)
    needed = sum(tensor.size_bytes for tensor in plan.source.tensors.values())
    sizes, files = plan.target.file_bytes(), [rank for group in groups for rank in group]
    scale = needed / reads.filled_bytes if reads.filled_bytes else 1.0
    read_bytes, requests = round(reads.size_bytes * scale), round(reads.requests * scale)
    written = int(sizes.sum())
    source_mesh = plan.checkpoint.manifest.mesh
    waiting_s = requests / link.requests_at_once * link.latency_s
    return ReshardEstimate(
        source=str(plan.checkpoint),
        source_mesh=None if source_mesh is None else str(source_mesh),
        mesh=str(plan.target.mesh),
        num_tensors=len(plan.target.tensors),
        written_bytes=written,
        read_bytes=read_bytes,
        needed_bytes=needed,
        read_requests=requests,
        num_source_files=len(plan.source.objects),
        num_files=len(files),
        walked_bytes=min(reads.filled_bytes, needed),
        num_groups=len(groups),
        peak_memory_bytes=budget.total_bytes(store, max(map(len, groups))),
        smallest_file_bytes=int(sizes[files].min()),
        largest_file_bytes=int(sizes[files].max()),
        largest_reads=tuple(ObjectRange(plan.source.objects[r.object], r.start, r.length) for r in reads.largest()),
        seconds=max(read_bytes, written) / link.bytes_per_s + waiting_s,
        placements=_origins(plan),
        guessed=tuple(name for name, placed in plan.placed.items() if CutOrigin.TABLE in placed.origins)[:NUM_LARGEST],
    )


class _Reads:
    """Totals over the units of a schedule."""

    def __init__(self) -> None:
        self.size_bytes = self.requests = self.filled_bytes = 0
        self._largest: list[tuple[int, int, ReadRequest]] = []

    def add(self, unit: Unit) -> None:
        """Count a unit's read requests and the source bytes that its writes consume."""
        for action in unit.actions:
            if isinstance(action, WriteRegion):
                self.filled_bytes += action.part.num_elements * ELEMENT_SIZE[action.dtype]
        for read in unit.reads:
            self.size_bytes += read.length
            self.requests += 1
            item = (read.length, -self.requests, read)
            if len(self._largest) < NUM_LARGEST:
                heapq.heappush(self._largest, item)
            else:
                heapq.heappushpop(self._largest, item)

    def largest(self) -> list[ReadRequest]:
        """The largest reads, largest first."""
        return [read for _, _, read in sorted(self._largest, reverse=True)]


def _origins(plan: ReshardPlan) -> dict[str, int]:
    """How many tensors get a cut from each origin."""
    return {origin.value: sum(origin in placed.origins for placed in plan.placed.values()) for origin in CutOrigin}
