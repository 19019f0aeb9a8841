"""What a reshard will cost, before it moves a byte: the same schedule that the executor runs, walked without reading."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import islice
from typing import Any

from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.resharding.reshard import ReshardPlan
from titan_ckpt.resharding.target import DEFAULT, RECORDED, RULE, TABLE
from titan_ckpt.rewrite.memory import Budget
from titan_ckpt.rewrite.schedule import Limits, schedule
from titan_ckpt.rewrite.work_unit import Fill, PieceKey, Read, Unit
from titan_ckpt.store.base import Store

NUM_LARGEST = 5
MAX_UNITS = 3000
MAX_WAVES = 64
MAX_REGIONS = 100_000
_ATTEMPT = "a-00000000T000000Z-00000000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A store as a time estimate sees it: bytes per second each way, and seconds before the first byte of a request."""

    bytes_per_s: float = 1e9
    latency_s: float = 0.0
    requests_at_once: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Sizes in bytes. Of a large plan only some reads are walked (for `walked_bytes` of the tensors' bytes), and scaled."""

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
    num_waves: int
    peak_memory_bytes: int
    smallest_file_bytes: int
    largest_file_bytes: int
    largest_reads: tuple[tuple[str, int, int], ...]
    seconds: float
    placements: dict[str, int]
    guessed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        content = {name: getattr(self, name) for name in self.__slots__}
        content["largest_reads"] = [{"object": o, "start": s, "length": n} for o, s, n in self.largest_reads]
        return content | {"guessed": list(self.guessed)}


def estimate(
    plan: ReshardPlan, store: Store, *, memory_bytes: int, is_checked: bool = True, link: Link | None = None
) -> Estimate:
    """Walk the plan's schedule and add up."""
    link = link or Link()
    budget = Budget.of(memory_bytes, plan.checkpoint.store, store, num_files=len(plan.target.ranks_with_files()))
    waves = plan.waves(budget.max_open_files)
    at_most = min(MAX_WAVES, max(1, len(waves) * MAX_REGIONS // max(len(plan.target.rank), 1)))
    walked = waves[:: -(-len(waves) // at_most)]
    reads = _Reads()
    checked: set[PieceKey] | None = set() if is_checked else None
    for ranks in walked:
        units = schedule(plan.source, plan.wave(ranks, _ATTEMPT), Limits(slab_bytes=budget.slab_bytes), checked=checked)
        for unit in islice(units, MAX_UNITS // len(walked)):
            reads.add(unit)
    needed = sum(tensor.size_bytes for tensor in plan.source.tensors.values())
    sizes, files = plan.target.file_bytes(), [rank for wave in waves for rank in wave]
    scale = needed / reads.filled_bytes if reads.filled_bytes else 1.0
    read_bytes, requests = round(reads.size_bytes * scale), round(reads.requests * scale)
    written = int(sizes.sum())
    source_mesh = plan.checkpoint.manifest.mesh
    waiting_s = requests / link.requests_at_once * link.latency_s
    return Estimate(
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
        num_waves=len(waves),
        peak_memory_bytes=budget.total_bytes(store, max(map(len, waves))),
        smallest_file_bytes=int(sizes[files].min()),
        largest_file_bytes=int(sizes[files].max()),
        largest_reads=tuple((plan.source.objects[r.object], r.start, r.length) for r in reads.largest()),
        seconds=max(read_bytes, written) / link.bytes_per_s + waiting_s,
        placements=_origins(plan),
        guessed=tuple(name for name, placed in plan.placed.items() if TABLE in placed.origins)[:NUM_LARGEST],
    )


class _Reads:
    """Sums over the units of a schedule."""

    def __init__(self) -> None:
        self.size_bytes = self.requests = self.filled_bytes = 0
        self._largest: list[tuple[int, int, Read]] = []

    def add(self, unit: Unit) -> None:
        """Count a unit's reads, and the source bytes that its fills are made of."""
        for action in unit.actions:
            if isinstance(action, Fill):
                self.filled_bytes += action.part.num_elements * ELEMENT_SIZE[action.dtype]
        for read in unit.reads:
            self.size_bytes += read.length
            self.requests += 1
            item = (read.length, -self.requests, read)
            if len(self._largest) < NUM_LARGEST:
                heapq.heappush(self._largest, item)
            else:
                heapq.heappushpop(self._largest, item)

    def largest(self) -> list[Read]:
        """The largest reads, largest first."""
        return [read for _, _, read in sorted(self._largest, reverse=True)]


def _origins(plan: ReshardPlan) -> dict[str, int]:
    """How many tensors are cut as recorded, by a rule, by the model table, by FSDP's default."""
    return {
        origin: sum(origin in placed.origins for placed in plan.placed.values())
        for origin in (RECORDED, RULE, TABLE, DEFAULT)
    }
