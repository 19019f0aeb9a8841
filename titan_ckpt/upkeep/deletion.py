"""Delete checkpoints so that a crash at any moment leaves each one either whole or uncommitted: COMMIT goes first.

Files that a remaining checkpoint refers to are kept, whichever step's folder they are in.
"""

from __future__ import annotations

import calendar
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.kinds import CheckpointState
from titan_ckpt.checkpoint.open import CheckpointInfo, list_checkpoints, open_checkpoint
from titan_ckpt.errors import CheckpointError, NotFoundError
from titan_ckpt.format.commit import commit_path
from titan_ckpt.format.names import COMMIT, METADATA, is_attempt, step_folder
from titan_ckpt.store.base import ObjectInfo, Store
from titan_ckpt.upkeep.retention import PINS, RetentionPolicy, parse_pins, prune

log = logging.getLogger(__name__)
_START = re.compile(r"a-(\d{8}T\d{6}Z)-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """Objects of one folder to delete. `what` describes them to the user."""

    what: str
    step: int
    entries: tuple[ObjectInfo, ...]

    @property
    def size_bytes(self) -> int:
        """Total bytes."""
        return sum(entry.size_bytes for entry in self.entries)


def read_pins(store: Store) -> frozenset[int]:
    """The steps in the run's pins file; empty if there is no such file."""
    try:
        text = store.read(PINS).decode(errors="replace")
    except NotFoundError:
        return frozenset()
    return parse_pins(text, where=store.where(PINS))


def check_whole(store: Store, url: str, info: CheckpointInfo) -> tuple[CheckpointInfo, Checkpoint | None]:
    """Open a committed checkpoint: (info, checkpoint), or (info with state "damaged", None) if anything is missing."""
    if info.state != CheckpointState.COMMITTED:
        return info, None
    try:
        return info, open_checkpoint(url, step=info.step, store=store)
    except CheckpointError as error:
        return replace(info, state=CheckpointState.DAMAGED, problem=str(error)), None


def referred(checkpoints: Iterable[Checkpoint]) -> frozenset[str]:
    """Paths of all data files that these checkpoints refer to."""
    return frozenset(checkpoint.path(file.path) for checkpoint in checkpoints for file in checkpoint.manifest.files)


def age_of_step_s(store: Store, step: int, now_s: float) -> float:
    """Seconds since the newest object of an uncommitted step, or since the start time in an attempt's name if that is later."""
    return _age_s(list(store.list(step_folder(step))), now_s)


def step_garbage(store: Store, info: CheckpointInfo, kept: frozenset[str]) -> Garbage:
    """Everything in a step's folder except `kept`; COMMIT first, then `.metadata`, then the rest by path."""
    entries = [entry for entry in store.list(step_folder(info.step)) if entry.path not in kept]
    entries.sort(
        key=lambda entry: (entry.path != commit_path(info.step), not entry.path.endswith(METADATA), entry.path)
    )
    return Garbage(what=f"{step_folder(info.step)} ({info.state})", step=info.step, entries=tuple(entries))


def attempt_garbage(
    store: Store, info: CheckpointInfo, kept: frozenset[str], *, older_than_s: float, now_s: float
) -> list[Garbage]:
    """Attempts in a committed step's folder that its COMMIT does not name and that are older than `older_than_s`."""
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
    """Delete the objects; a COMMIT goes first, in a call of its own."""
    paths = [entry.path for entry in garbage.entries]
    first = [path for path in paths if path.endswith(f"/{COMMIT}")]
    store.delete(first)
    store.delete(path for path in paths if path not in first)


def apply_retention(store: Store, policy: RetentionPolicy, *, keep: frozenset[int] = frozenset()) -> list[int]:
    """Delete what `policy`, the run's pins and `keep` let go; returns the deleted steps. A failure is logged, never raised."""
    try:
        return _apply(store, replace(policy, pins=policy.pins | keep | read_pins(store)))
    except Exception as error:  # noqa: BLE001  (must not fail the save that triggered it)
        log.warning("old checkpoints of %s were not deleted: %s", store, error)
        return []


def _apply(store: Store, policy: RetentionPolicy) -> list[int]:
    infos = list_checkpoints(store)
    if not prune(infos, policy):
        return []
    checked = [check_whole(store, store.url, info) for info in infos]
    gone = prune([info for info, _ in checked], policy)
    going = {info.step for info in gone}
    kept = referred(opened for info, opened in checked if opened is not None and info.step not in going)
    for info in gone:
        delete(store, step_garbage(store, info, kept))
        log.info("deleted %s@%d: the policy keeps newer ones", store, info.step)
    return sorted(going)


def _age_s(entries: list[ObjectInfo], now_s: float) -> float:
    starts = [
        calendar.timegm(time.strptime(m.group(1), "%Y%m%dT%H%M%SZ")) for e in entries if (m := _START.search(e.path))
    ]
    newest = max([*starts, *(entry.modified_s for entry in entries)], default=now_s)
    return now_s - newest
