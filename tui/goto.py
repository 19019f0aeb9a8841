"""What is typed after `:` or into the palette, as a link: a rank, an operation, a step, a host; times are the logs' affair."""

from __future__ import annotations

import re
from collections.abc import Iterator

from titan_ckpt.tui.data.incident import Incident
from titan_ckpt.tui.rows import RowLink
from titan_ckpt.tui.session.session import Session

HINT = "go to a rank (12), an operation (#7), a step (step 40), a host (node3) or a time (14:05:30)"
_SCREENS_OF_RANKS = (2, 3, 6)
_MOST_HOSTS, _MOST_RANKS = 8, 16
_TIME = re.compile(r"(?:\d{4}-\d\d-\d\d[ T])?(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d*)?)?(?: UTC)?")


def is_time(text: str) -> bool:
    """Whether `text` is a time, such as 14:05, or 2026-11-21 14:05:30 UTC as the screens write it."""
    return _TIME.fullmatch(text) is not None


def link_to(session: Session, text: str, screen: int) -> RowLink | None:
    """A rank (`12`, `rank 12`), an operation of the current group (`#7`), a step (`step 40`), or the first rank of a host.

    None if there is none. A rank is shown on `screen` if that lists ranks, else among the waits.
    """
    if match := re.fullmatch(r"step (\d{1,18})", text):
        return _link_to_step(session, int(match[1]))
    incident = session.incident.value
    if incident is None:
        return None
    there = screen if screen in _SCREENS_OF_RANKS else 6
    if match := re.fullmatch(r"(?:rank ?)?(\d{1,18})", text):
        rank = int(match[1])
        return RowLink(screen=there, rank=rank) if rank in incident.run.ranks else None
    if match := re.fullmatch(r"#(\d{1,18})", text):
        return _link_to_operation(session, incident, int(match[1]))
    host = text.removeprefix("host ")
    ranks = (rank for rank, record in incident.run.ranks.items() if host and record.host.startswith(host))
    return next((RowLink(screen=there, rank=rank) for rank in ranks), None)


def _link_to_operation(session: Session, incident: Incident, seq: int) -> RowLink | None:
    """A collective of that number: of the current group, else of the first that has one. Sends and receives count per pair."""
    if not incident.lanes:
        return None
    lanes = (incident.lanes[session.lane % len(incident.lanes)], *incident.lanes)
    for lane in lanes:
        if not incident.is_p2p(lane) and lane.first_seq <= seq < lane.first_seq + lane.row.shape[1]:
            return RowLink(screen=3, group=incident.name_of(lane), seq=seq, rank=incident.foremost)
    return None


def _link_to_step(session: Session, step: int) -> RowLink | None:
    """A step's checkpoint, else its values among the metrics, else its line in a log."""
    steps, metrics = session.checkpoints.value, session.metrics.value
    if steps is not None and steps.find(step) is not None:
        return RowLink(screen=7, step=step)
    if metrics is not None and len(metrics.steps) and metrics.steps[0] <= step <= metrics.steps[-1]:
        return RowLink(screen=8, step=step)
    incident = session.incident.value
    is_logged = incident is not None and session.logs.value is not None and incident.logged_step(step) is not None
    return RowLink(screen=5, step=step) if is_logged else None


def places(session: Session, query: str) -> Iterator[tuple[str, str]]:
    """The places that `query` may mean: what to type after `:`, and a description."""
    incident = session.incident.value
    number = query.removeprefix("#").removeprefix("rank ").removeprefix("step ")
    if number.isascii() and number.isdigit():
        kinds = (f"rank {number}", f"#{number}", f"step {number}")
        names = ("rank", "operation", "step")
        for text, name in zip(kinds, names, strict=True):
            is_meant = not query.startswith(("#", "rank", "step")) or text == query
            if is_meant and link_to(session, text, 0) is not None:
                yield text, f"go to {name} {text.removeprefix(f'{name} ')}"
    elif incident is not None and len(query) > 1 and (query in "rank" or query in "culprit"):
        yield from ((f"rank {rank}", f"go to rank {rank}") for rank in _first_ranks(incident))
    if is_time(query) and session.logs.value is not None:
        yield query, f"go to the log lines of {query}"
    if incident is not None and query:
        yield from ((host, f"go to host {host}") for host in _hosts(incident, query))


def _first_ranks(incident: Incident) -> list[int]:
    """The ranks at fault, then the others from the first on."""
    others = (rank for rank in sorted(incident.states) if rank not in incident.top.culprits)
    return [*incident.top.culprits, *others][:_MOST_RANKS]


def state_of(session: Session, text: str) -> str:
    """What the rank that `text` names was doing; "" if it names none."""
    incident, match = session.incident.value, re.fullmatch(r"rank (\d{1,18})", text)
    state = incident.states.get(int(match[1])) if incident is not None and match else None
    if incident is None or state is None:
        return ""
    mark = "culprit: " if state.rank in incident.top.culprits else ""
    return f"{mark}{incident.doing(state.rank)}{state.where}"


def _hosts(incident: Incident, start: str) -> list[str]:
    hosts = {record.host: None for record in incident.run.ranks.values() if start in record.host}
    return list(hosts)[:_MOST_HOSTS]
