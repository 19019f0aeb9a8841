"""Retention behind a commit: delete what the policy lets go, and say what went. A failure here never fails the save."""

from __future__ import annotations

import logging
from dataclasses import replace

from titan_ckpt.checkpoint.checkpoint import list_checkpoints
from titan_ckpt.store.base import Store
from titan_ckpt.upkeep.deletion import check_whole, delete, read_pins, referred, step_garbage
from titan_ckpt.upkeep.retention import RetentionPolicy, prune

log = logging.getLogger(__name__)


def retire(store: Store, policy: RetentionPolicy, *, keep: frozenset[int] = frozenset()) -> list[int]:
    """Apply `policy`, the run's pins and `keep`; the steps that went. Files that a kept checkpoint refers to stay."""
    try:
        return _retire(store, replace(policy, pins=policy.pins | keep | read_pins(store)))
    except Exception as error:  # noqa: BLE001  (the save stands, whatever a store says to this)
        log.warning("old checkpoints of %s were not deleted: %s", store, error)
        return []


def _retire(store: Store, policy: RetentionPolicy) -> list[int]:
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
