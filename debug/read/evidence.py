"""What `open_run` has read so far: by rank, and of the job as a whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_ckpt.debug.incident.records import (
    Array,
    Dump,
    Exit,
    Flag,
    Group,
    Heartbeat,
    Launcher,
    RankLog,
    StackSnapshot,
)
from titan_ckpt.debug.read.black_boxes import Box, BoxReader
from titan_ckpt.debug.read.name_tables import Interner
from titan_ckpt.store.base import Store

MAX_RANK = 131_072


@dataclass(slots=True)
class RankEvidence:
    """What was read of one rank so far."""

    dumps: list[tuple[Dump, Array]] = field(default_factory=list)
    known_groups: dict[str, Group] = field(default_factory=dict)
    stacks: list[StackSnapshot] = field(default_factory=list)
    logs: list[RankLog] = field(default_factory=list)
    box: Box | None = None
    box_source: str = ""
    heartbeat: Heartbeat | None = None
    sidecar: Mapping[str, Any] = field(default_factory=dict)
    process_state: str = ""


@dataclass(slots=True)
class Reading:
    """State of one `open_run`."""

    store: Store
    interner: Interner = field(default_factory=Interner)
    ranks: defaultdict[int, RankEvidence] = field(default_factory=lambda: defaultdict(RankEvidence))
    flags: list[Flag] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    launcher: Launcher | None = None
    world_size: int = 0
    read_stems: set[tuple[int, str]] = field(default_factory=set)
    num_evidence: int = 0
    recorded_ranks: int = 0
    boxes: BoxReader = field(init=False)
    first_record: dict[int, int] = field(default_factory=dict)
    unusable_groups: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.boxes = BoxReader(self.interner)

    def flag(self, name: str, text: str, source: str, rank: int | None = None) -> None:
        self.flags.append(Flag(flag=name, text=text, ranks=() if rank is None else (rank,), source=source))
