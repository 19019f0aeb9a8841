"""Which ranks of a live job the kernel has stopped, for the ranks that run on this machine."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from titan_ckpt.debug.incident.records import Run
from titan_ckpt.debug.live.processes import find_processes
from titan_ckpt.location import local_path, scheme

RECENT_S = 600.0
MOST_RANKS = 1024  # whose sidecars are read at every look


def with_stopped(run: Run, url: str, now_s: float) -> Run:
    """The run with the kernel's state of the processes on this machine that are stopped (T).

    A black box cannot tell a stopped rank from a busy one before it has been silent for some time.
    """
    beats = [record.heartbeat for record in run.ranks.values() if record.heartbeat is not None]
    sources = {beat.source for beat in beats if not beat.is_stopped and now_s - beat.alive_ns / 1e9 < RECENT_S}
    is_here = any(record.host == socket.gethostname() for record in run.ranks.values())
    if scheme(url) != "file" or not is_here or not 0 < len(sources) <= MOST_RANKS:
        return run
    folders = {(Path(local_path(url)) / source).parent for source in sources}
    found = [process for folder in folders for process in find_processes(folder) if process.state.startswith("T")]
    stopped = {p.rank: p.state for p in found if p.rank in run.ranks and run.ranks[p.rank].pid in (None, p.pid)}
    if not stopped:
        return run
    return replace(run, ranks={
        rank: replace(record, process_state=stopped.get(rank, record.process_state)) for rank, record in run.ranks.items()
    })  # fmt: skip
