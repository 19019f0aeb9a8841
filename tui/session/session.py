"""State shared by the screens: loaded data, load errors, and the selection."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from titan_ckpt.tui.data.content import Content
from titan_ckpt.tui.data.incident import Incident, log_ranks
from titan_ckpt.tui.data.logs.index import LogIndex
from titan_ckpt.tui.data.metrics import Metrics
from titan_ckpt.tui.data.run_folders import Runs
from titan_ckpt.tui.data.runs import CopyKey, RunSteps
from titan_ckpt.tui.data.standing import is_saving

T = TypeVar("T")


@dataclass(slots=True)
class Loadable(Generic[T]):
    """Data that is absent, loading, loaded, or failed with `error`. `version` grows with each load.

    `share` tells how much of it is read; "" while nothing is known of that.
    """

    what: str
    value: T | None = None
    error: str = ""
    is_loading: bool = False
    share: str = ""
    version: int = 0

    @property
    def reading(self) -> str:
        """What is read, and how much of it is."""
        return f"{self.what}, {self.share}" if self.share else self.what

    @property
    def text(self) -> str:
        """Placeholder to show while there is no value."""
        if self.is_loading:
            return f"reading {self.reading} ..."
        return self.error or f"no {self.what} here"


@dataclass(slots=True)
class Session:
    """State of one run or incident. `lane` is the selected group (an index into incident.lanes), `seq` the operation."""

    content: Content
    clock: Callable[[], float] = time.time
    incident: Loadable[Incident] = field(default_factory=lambda: Loadable("dumps, stacks or logs"))
    checkpoints: Loadable[RunSteps] = field(default_factory=lambda: Loadable("checkpoints"))
    runs: Loadable[Runs] = field(default_factory=lambda: Loadable("runs"))
    logs: Loadable[LogIndex] = field(default_factory=lambda: Loadable("logs"))
    metrics: Loadable[Metrics] = field(default_factory=lambda: Loadable("metrics.jsonl"))
    story: int = 0  # how often the verdict has become another one
    lane: int = 0
    seq: int | None = None
    pinned: int | None = None
    is_following: bool = False
    looked_s: float = 0.0
    damage: dict[CopyKey, str] = field(default_factory=dict)
    checked: set[CopyKey] = field(default_factory=set)
    judged: dict[str, str] = field(default_factory=dict)  # verdicts on runs, by their `key`

    @property
    def seen_s(self) -> float:
        """The time of what is shown: of the last look at the job, else now."""
        return self.looked_s or self.clock()

    @property
    def empty_screens(self) -> frozenset[int]:
        """Numbers of the screens for which nothing was found."""
        needs: dict[int, tuple[Loadable[Any], ...]] = {
            2: (self.incident,), 3: (self.incident,), 4: (self.incident,), 5: (self.logs,), 6: (self.incident,),
            7: (self.checkpoints, self.runs), 8: (self.metrics,),
        }  # fmt: skip
        empty = {number for number, parts in needs.items() if all(p.value is None and not p.is_loading for p in parts)}
        incident = self.incident.value
        has_operations = incident is None or bool(incident.lanes)
        has_save = incident is not None and is_saving(incident)
        return frozenset((empty if has_operations else empty | {2, 3, 4}) - ({7} if has_save else set()))

    def name_logs(self) -> None:
        """Tell the logs whose they are where only their lines name a rank."""
        if self.logs.value is not None and self.incident.value is not None:
            self.logs.value.files.told = log_ranks(self.incident.value.run)

    def note_damage(self, found: Mapping[CopyKey, str]) -> None:
        """Keep what a verification found, "" for an intact copy, and mark the listed steps."""
        self.damage.update(found)
        self.mark_damage()
        self.checkpoints.version += 1

    def note_checked(self, found: Mapping[CopyKey, str]) -> None:
        """Keep what a look at the files of copies found: it may find damage, but does not refute what a verification found."""
        self.checked |= set(found)
        if damage := {key: text for key, text in found.items() if text}:
            self.note_damage(damage)

    def note_verdicts(self, found: Mapping[str, str]) -> None:
        """Keep the verdicts on silent runs, "" where nothing is known, and mark the listed runs."""
        self.judged.update(found)
        self.mark_verdicts()
        self.runs.version += 1

    def mark_verdicts(self) -> None:
        """Mark the runs of a new listing."""
        if self.runs.value is not None:
            self.runs.value = self.runs.value.with_verdicts(self.judged)

    def mark_damage(self) -> None:
        """Mark the steps of a new listing."""
        if self.checkpoints.value is not None:
            self.checkpoints.value = self.checkpoints.value.with_damage(self.damage)

    def select(self, group: str | None, seq: int | None) -> None:
        """Select an operation; None keeps the current group, and its operation."""
        former = self.lane
        if self.incident.value is not None and group is not None:
            self.lane = self.incident.value.lane_of(group)
        if seq is not None or self.lane != former:
            self.seq = seq
