"""What a rank and its upload process tell each other. No torch: the other process does without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from titan_ckpt.saving.upload import Known, RankFile, RankPart
from titan_ckpt.state.local_shard import LocalShard
from titan_ckpt.store.clients.options import StoreSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One rank's file: see `RankContents`. Item n lies at `starts[n]` in the shared memory.

    The descriptor of `memory_bytes` of new memory follows the task; where that is 0, the memory of the last task is used again.
    """

    url: str
    settings: StoreSettings
    items: Sequence[LocalShard]
    starts: Sequence[int]
    memory_bytes: int
    objects: dict[str, bytes]
    own_objects: list[str]
    target: RankFile
    codec: str
    known: Known
    bytes_per_s: float | None
    umask: int


class Command(StrEnum):
    """Sent to an upload that has begun: go on at full speed; end at the next buffer."""

    LIFT = "lift"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """So many more bytes are with the store."""

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A record of a logger, for the rank's own handlers."""

    name: str
    level: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The task's file is written."""

    part: RankPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The task failed; `text` is the traceback."""

    error: Exception
    text: str
