"""What the kernel of this machine says of the ranks of a live job that run here: stopped, or gone."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from titan_ckpt.debug.incident.records import RankRecord, Run
from titan_ckpt.debug.live.processes import GONE, STATES, Process, find_processes
from titan_ckpt.location import local_path, scheme

RECENT_S = 600.0
TICK_S = (
    3.0  # recorders tick every 0.25 s: that of a process in another container, which is not seen from here, ticks on
)
MOST_RANKS = 1024  # whose sidecars are read at every look


def with_kernel_states(run: Run, url: str, now_s: float) -> Run:
    """The run with the kernel's word on the processes on this machine that are stopped (T) or gone.

    A black box cannot tell a stopped or a killed rank from a busy one before it has been silent for some time.
    """
    beats = [record.heartbeat for record in run.ranks.values() if record.heartbeat is not None]
    sources = {beat.source for beat in beats if not beat.is_stopped and now_s - beat.alive_ns / 1e9 < RECENT_S}
    is_here = any(record.host == socket.gethostname() for record in run.ranks.values())
    if scheme(url) != "file" or not is_here or not 0 < len(sources) <= MOST_RANKS:
        return run
    folders = {(Path(local_path(url)) / source).parent for source in sources}
    found = [process for folder in folders for process in _found(folder, run)]
    known = {p.rank: p for p in found if run.ranks[p.rank].pid in (None, p.pid)}
    changed = {rank: _as_seen(run.ranks[rank], process, now_s) for rank, process in known.items()}
    return replace(run, ranks={**run.ranks, **changed}) if changed else run


def _found(folder: Path, run: Run) -> list[Process]:
    """The processes of a folder, but for ranks that gave no sign of life after a collection noted their states: it may be a copy,
    which shows the job as it was then."""
    noted_s = max((path.stat().st_mtime for path in folder.glob(f"{STATES}.*.json")), default=0.0)
    beats = {rank: record.heartbeat for rank, record in run.ranks.items()}
    return [p for p in find_processes(folder) if (b := beats.get(p.rank)) and b.alive_ns / 1e9 > noted_s + TICK_S]


def _as_seen(record: RankRecord, process: Process, now_s: float) -> RankRecord:
    """The record with what is known of its process. That it is gone does not tell why."""
    beat = record.heartbeat
    if process.state.startswith("T"):
        return replace(record, process_state=process.state)
    if process.state == GONE and beat is not None and now_s - beat.alive_ns / 1e9 > TICK_S:
        return replace(record, is_gone=True)
    return record
