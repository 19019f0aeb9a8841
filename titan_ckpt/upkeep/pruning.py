"""Delete the checkpoints of a run that a retention policy does not keep; what the command `prune` does, as a function."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast, overload

from titan_ckpt.arguments import OnProgress, check_flag, check_type, ignore_progress
from titan_ckpt.checkpoint.open import CheckpointInfo, list_checkpoints
from titan_ckpt.errors import UsageError
from titan_ckpt.location import StrPath, run_location
from titan_ckpt.store.base import Store
from titan_ckpt.store.clients.options import Options, using
from titan_ckpt.store.open import open_store
from titan_ckpt.upkeep import retention
from titan_ckpt.upkeep.deletion import Garbage, delete, plan_removal, read_pins
from titan_ckpt.upkeep.retention import PINS, RetentionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What `prune` deleted, or would delete if not `is_deleted`.

    `kept` has a line for everything that stays although the policy would let it go. `is_blocked`: a checkpoint of the run cannot
    be opened, so nothing may be deleted; `kept` names it.
    """

    is_deleted: bool
    garbage: tuple[Garbage, ...]
    kept: tuple[str, ...]
    is_blocked: bool

    @property
    def steps(self) -> list[int]:
        """The steps of which something goes, in order."""
        return sorted({item.step for item in self.garbage})

    @property
    def size_bytes(self) -> int:
        """Total bytes of what goes."""
        return sum(item.size_bytes for item in self.garbage)


@overload
def prune(
    run: StrPath | Store,
    policy: RetentionPolicy,
    *,
    dry_run: bool = True,
    storage_options: Options = None,
    on_read: OnProgress | None = None,
    on_delete: OnProgress | None = None,
) -> PruneReport: ...


@overload
def prune(
    run: Iterable[CheckpointInfo], policy: RetentionPolicy, *, ages_s: Mapping[int, float] | None = None
) -> list[CheckpointInfo]: ...


def prune(
    run: StrPath | Store | Iterable[CheckpointInfo], policy: RetentionPolicy, *, dry_run: bool = True,
    ages_s: Mapping[int, float] | None = None, storage_options: Options = None, on_read: OnProgress | None = None,
    on_delete: OnProgress | None = None,
) -> PruneReport | list[CheckpointInfo]:  # fmt: skip
    """Delete the checkpoints of the run at a URL that `policy` does not keep. Only a preview unless `dry_run=False`.

    Never deleted: the newest whole resumable checkpoint, the steps in the run's `pins.txt`, exports, damaged checkpoints, steps
    not yet copied to a second tier, files that another checkpoint refers to, and what titan-ckpt did not write. UsageError if
    `policy.pins` names a step that the run does not have; NotCommittedError if it has none at all; StoreError, before anything is
    deleted, if something could not be listed or read. `on_read` hears how many checkpoints of how many were opened, `on_delete`
    how many objects of how many are gone.

    Given the list of `list_checkpoints` in place of a URL, returns which of them the policy would let go, and reads nothing;
    `ages_s` are then the ages of uncommitted steps in seconds.
    """
    check_type(policy, "policy", RetentionPolicy, hint="RetentionPolicy(keep_last=3)")
    check_flag(dry_run, "dry_run")
    if isinstance(run, Iterable) and not isinstance(run, str | bytes | os.PathLike | Mapping | Store):
        infos = list(run)
        for info in infos:
            check_type(info, "an item of the list", CheckpointInfo, hint="what list_checkpoints(url) returns")
        return retention.prune(infos, policy, ages_s=ages_s)
    with using(storage_options, run):
        store = run if isinstance(run, Store) else open_store(run_location(cast(StrPath, run)).url)
    return _prune_run(
        store, policy, dry_run=dry_run, on_read=on_read or ignore_progress, on_delete=on_delete or ignore_progress
    )


def _prune_run(
    store: Store, policy: RetentionPolicy, *, dry_run: bool, on_read: OnProgress, on_delete: OnProgress
) -> PruneReport:
    pins, infos = read_pins(store), list_checkpoints(store)
    _check_wanted(policy.pins, infos, store)
    plan = plan_removal(store, replace(policy, pins=pins | policy.pins), now_s=time.time(), on_read=on_read)
    absent = sorted(pins - {info.step for info in infos})
    reasons = [*plan.kept, *(f"{store.where(PINS)}: this run has no step {step}" for step in absent)]
    if not dry_run:
        reasons += delete(store, plan, on_delete=on_delete)
    return PruneReport(is_deleted=not dry_run, garbage=plan.garbage, kept=tuple(reasons), is_blocked=plan.is_blocked)


def _check_wanted(wanted: Iterable[int], infos: Iterable[CheckpointInfo], store: Store) -> None:
    """Refuse a pin that keeps nothing: it may be a slip, and the step that was meant would go."""
    steps = [info.step for info in infos]
    for step in sorted(set(wanted) - set(steps)) if steps else ():
        near = ", ".join(map(str, sorted(steps, key=lambda found: abs(found - step))[:5]))
        raise UsageError(f"keep {step}: {store} has no step {step}; nothing was deleted. The nearest steps: {near}")
