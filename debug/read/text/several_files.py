"""What several files say of one rank, together: stdout and stderr, a console that repeats them, restarts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import Exit, LogEvent, RankLog
from titan_ckpt.debug.read.text.streams import MAX_EVENTS


def merge_logs(logs: Iterable[RankLog]) -> RankLog | None:
    """One log of several files of the same rank (stdout and stderr, or restarts); the newest one gives its end."""
    known = sorted(logs, key=lambda log: (log.last_time_s or 0.0, bool(log.events and log.tail), len(log.tail)))
    if not known:
        return None
    last = known[-1]
    steps = [log.last_step for log in known if log.last_step is not None]
    times: dict[int, float] = {}
    for log in known:
        times.update(log.step_times)
    events = sorted(_distinct(known), key=lambda event: event.time_s or 0.0)
    return RankLog(
        source=last.source,
        events=tuple(events if len(events) <= MAX_EVENTS else events[: MAX_EVENTS // 2] + events[-MAX_EVENTS // 2 :]),
        tail=last.tail,
        tail_line=last.tail_line,
        last_step=max(steps, default=None),
        last_step_line=max((log.last_step_line for log in known if log.source == last.source), default=0),
        done_line=max((log.done_line for log in known if log.source == last.source), default=0),
        last_time_s=last.last_time_s,
        step_times=times,
        is_done_elsewhere=any(log.done_line > log.last_step_line for log in known if log.source != last.source),
        error_end=max((log.error_end for log in known if log.error_end is not None), key=bool, default=None),
    )


def with_error_end(log: RankLog, *, is_console: bool) -> RankLog:
    """The log with the end of its standard error, if that is what the file holds; a launcher's console does."""
    if not is_console and not _ERRORS.search(log.source):
        return log
    return replace(log, error_end=log.tail[-1].strip() if log.tail else "")


_ERRORS = re.compile(r"stderr[^/]*$|\.err(?:\.gz|\.zst)?$")


def _distinct(logs: Sequence[RankLog]) -> list[LogEvent]:
    """Events of several files; one that a console repeats from a rank's own file counts once."""
    if len(logs) == 1:
        return list(logs[0].events)
    seen: dict[tuple[EventKind, str, float | None, str], tuple[str, int]] = {}
    kept: list[LogEvent] = []
    for log in sorted(logs, key=lambda log: log.source.count("/"), reverse=True):
        for event in log.events:
            key = event.kind, event.text, event.time_s, event.values.get("at", "")
            source, place = seen.setdefault(key, (log.source, len(kept)))
            if source == log.source:
                kept.append(event)
            elif "went_on" in event.values:  # as the console shows, where steps stand beside errors
                kept[place] = replace(kept[place], values={**kept[place].values, "went_on": "1"})
    return kept


def group_by_rank(exits: Iterable[Exit]) -> dict[int, Exit]:
    """The last exit of each rank."""
    by_rank: defaultdict[int, list[Exit]] = defaultdict(list)
    for exit_ in exits:
        by_rank[exit_.rank].append(exit_)
    return {rank: found[-1] for rank, found in by_rank.items()}
