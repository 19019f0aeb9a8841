"""What is said of one process's end, or of a host."""

from __future__ import annotations

from dataclasses import dataclass, field
from signal import Signals

from titan_ckpt.debug.incident.kinds import EventKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One process's end, by what was said of it. `is_task`: `rank` counts the tasks of srun or mpirun. `may_be_launchers`: a
    launcher of several ranks ends so too, when one of these fails or is out of memory."""

    code: int
    line: int
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    host: str = ""
    place: str = ""  # in which local ranks count, where lines are labelled with it: a host, or `task 1`
    time_s: float | None = None
    is_task: bool = False
    may_be_launchers: bool = False
    is_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something about a host or process that is no exit code: a lost node, a kill, a time limit."""

    kind: EventKind
    text: str
    line: int
    values: dict[str, str] = field(default_factory=dict)


def signal_number(name: str) -> int:
    """A signal's number; SIGTERM's where the name is damaged."""
    return int(Signals[name]) if name in Signals.__members__ else int(Signals.SIGTERM)
