"""Of a recorder's folder that was used again: what belongs to the newest attempt. The earlier ones are history.

A recorder moves aside what an earlier process of its rank left (`debug.record.earlier`). Here is what that leaves: ranks that
have not started again, or that the newest attempt does not have; and folders of older recorders, whose files stayed in place.
"""

from __future__ import annotations

import math

from titan_ckpt.debug.incident.kinds import FlagKind
from titan_ckpt.debug.incident.records import Array, Dump, Flag
from titan_ckpt.debug.read.assemble import RankEvidence, RunEvidence
from titan_ckpt.debug.read.discovery import IncidentFolders
from titan_ckpt.debug.read.recorder_files import Sidecar, read_sidecar
from titan_ckpt.errors import CheckpointError, StoreError
from titan_ckpt.parsing.json_values import JsonValue, parse_json
from titan_ckpt.store.base import Store

LEAST_AGE_S = 1.0  # a file's time may be that coarse
ERROR_FILE, EXCEPTION = ".error.json", "exception"
_ON_ALL, _ON_A_HOST = ("run", "master", "job"), ("restart", "parent")


def keep_newest_attempt(evidence: RunEvidence) -> None:
    """Drop what earlier attempts left: of ranks that began before the newest attempt, and of the ranks' own earlier processes."""
    known = [found.sidecar for found in evidence.ranks.values() if found.sidecar and found.sidecar.began_s is not None]
    if not known:
        return
    newest = max(known, key=lambda side: side.began_s or 0.0)
    old = [rank for rank, found in evidence.ranks.items() if _is_of_earlier(found, newest)]
    for rank in old:
        evidence.ranks[rank] = RankEvidence()
        if rank >= newest.world_size:
            del evidence.ranks[rank]
    missing = tuple(sorted(rank for rank in old if rank < newest.world_size))
    if old:
        evidence.world_size = evidence.recorded_ranks = newest.world_size
    if missing:
        text = "all that these ranks left is of an earlier attempt"
        evidence.flags.append(Flag(flag=FlagKind.EARLIER_ATTEMPT, text=text, ranks=missing))
    for found in evidence.ranks.values():
        _drop_older(found)


def next_began_s(store: Store, place: IncidentFolders) -> float:
    """When the first recorder of a run's incident after this one started, by the clock of the logs that they share; inf if there
    is none."""
    if not place.incident or len(place.folders) < 2:
        return math.inf
    later = place.incidents[place.incidents.index(place.incident) + 1 :]
    above = place.folders[0].removesuffix(place.incident)
    for entry in (entry for name in later for entry in store.list(f"{above}{name}")):
        if entry.path.endswith(".sidecar.json"):
            try:
                document = JsonValue(parse_json(store.read(entry.path), entry.path), entry.path)
                started_s = read_sidecar(document).started_s
            except (CheckpointError, StoreError):  # it becomes a flag where it is read
                continue
            if started_s is not None:
                return started_s
    return math.inf


def _is_of_earlier(found: RankEvidence, newest: Sidecar) -> bool:
    """Whether a rank's process had ended before `newest` began, and was started by another launch."""
    mine, beat = found.sidecar, found.heartbeat
    if mine is None or beat is None or not (mine.launch and newest.launch):
        return False
    is_other = any(mine.launch.get(key) != newest.launch.get(key) for key in _ON_ALL)
    if mine.host == newest.host:
        is_other = is_other or any(mine.launch.get(key) != newest.launch.get(key) for key in _ON_A_HOST)
    return is_other and beat.alive_ns / 1e9 < (newest.began_s or 0.0)


def _drop_older(found: RankEvidence) -> None:
    """Drop the error and the dumps that were written before a rank's process began."""
    began_s = found.sidecar.began_s if found.sidecar else None
    if found.sidecar is None or began_s is None:
        return
    errors = [
        log for log in found.logs if log.source.endswith(ERROR_FILE) and _is_before(log.events[0].time_s, began_s)
    ]
    found.logs = [log for log in found.logs if log not in errors]
    reasons = {dump.reason for dump, table in found.dumps if _is_older(dump, table, began_s)}
    reasons |= {EXCEPTION} if errors else set()
    found.dumps = [(dump, table) for dump, table in found.dumps if dump.reason not in reasons]
    found.stacks = [stack for stack in found.stacks if stack.reason not in reasons]
    if found.process_pid not in (None, found.sidecar.pid):
        found.process_state = ""


def _is_older(dump: Dump, table: Array, began_s: float) -> bool:
    """Whether a dump was written before, and all in it was issued before. (A recorder may start late, a copy be younger.)"""
    return _is_before(dump.time_s, began_s - LEAST_AGE_S) and int(table["created_ns"].max(initial=0)) < began_s * 1e9


def _is_before(time_s: float | None, limit_s: float) -> bool:
    return time_s is not None and 0 < time_s < limit_s
