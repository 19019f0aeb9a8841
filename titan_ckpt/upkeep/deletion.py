"""Delete checkpoints so that a crash at any moment leaves each one either whole or not there: its COMMIT goes first.

Files that a checkpoint which stays refers to are kept, whichever step's folder they are in.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from titan_ckpt.checkpoint.checkpoint import Checkpoint, CheckpointInfo, open_checkpoint
from titan_ckpt.errors import CheckpointError, NotFoundError
from titan_ckpt.format.commit import commit_path
from titan_ckpt.format.names import COMMIT, METADATA, is_attempt, step_folder
from titan_ckpt.store.base import ObjectInfo, Store
from titan_ckpt.upkeep.retention import PINS, parse_pins

_START = re.compile(r"a-(\d{8}T\d{6}Z)-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """Objects of one folder that would go. `what` is for people."""

    what: str
    step: int
    entries: tuple[ObjectInfo, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes in all."""
        return sum(entry.size_bytes for entry in self.entries)


def read_pins(store: Store) -> frozenset[int]:
    """The steps in the run's pins file, none where there is no such file."""
    try:
        text = store.read(PINS).decode(errors="replace")
    except NotFoundError:
        return frozenset()
    return parse_pins(text, where=store.where(PINS))


def check_whole(store: Store, url: str, info: CheckpointInfo) -> tuple[CheckpointInfo, Checkpoint | None]:
    """`info` with the state "damaged" where its manifest or a file is missing, and the opened checkpoint where it is not."""
    if info.state != "committed":
        return info, None
    try:
        return info, open_checkpoint(url, step=info.step, store=store)
    except CheckpointError as error:
        return replace(info, state="damaged", problem=str(error)), None


def referred(checkpoints: Iterable[Checkpoint]) -> frozenset[str]:
    """Paths of all data files that these checkpoints need."""
    return frozenset(checkpoint.path(file.path) for checkpoint in checkpoints for file in checkpoint.manifest.files)


def age_of_step_s(store: Store, step: int, now_s: float) -> float:
    """Seconds since anything happened in an uncommitted step: since its newest object, or the start in an attempt's name."""
    return _age_s(list(store.list(step_folder(step))), now_s)


def step_garbage(store: Store, info: CheckpointInfo, kept: frozenset[str]) -> Garbage:
    """Everything in a step's folder but what other checkpoints need; COMMIT first, the rest in order of path."""
    entries = [entry for entry in store.list(step_folder(info.step)) if entry.path not in kept]
    entries.sort(
        key=lambda entry: (entry.path != commit_path(info.step), not entry.path.endswith(METADATA), entry.path)
    )
    return Garbage(what=f"{step_folder(info.step)} ({info.state})", step=info.step, entries=tuple(entries))


def attempt_garbage(
    store: Store, info: CheckpointInfo, kept: frozenset[str], *, older_than_s: float, now_s: float
) -> list[Garbage]:
    """Attempts in a committed step's folder that its COMMIT does not name, once they are old enough."""
    assert info.commit is not None
    folder = step_folder(info.step)
    found = []
    for name in store.folders(folder):
        if is_attempt(name) and name != info.commit.attempt:
            entries = list(store.list(f"{folder}/{name}"))
            free = tuple(entry for entry in entries if entry.path not in kept)
            if free and _age_s(entries, now_s) > older_than_s:
                found.append(Garbage(what=f"{folder}/{name} (attempt never committed)", step=info.step, entries=free))
    return found


def delete(store: Store, garbage: Garbage) -> None:
    """Remove it, a COMMIT before everything else and in a call of its own."""
    paths = [entry.path for entry in garbage.entries]
    first = [path for path in paths if path.endswith(f"/{COMMIT}")]
    store.delete(first)
    store.delete(path for path in paths if path not in first)


def _age_s(entries: list[ObjectInfo], now_s: float) -> float:
    starts = [
        calendar.timegm(time.strptime(m.group(1), "%Y%m%dT%H%M%SZ")) for e in entries if (m := _START.search(e.path))
    ]
    newest = max([*starts, *(entry.modified_s for entry in entries)], default=now_s)
    return now_s - newest
