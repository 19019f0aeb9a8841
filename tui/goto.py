"""What is typed after `:`, as a link."""

from __future__ import annotations

import re

from titan_ckpt.tui.data.incident import Incident
from titan_ckpt.tui.rows import RowLink

_SCREENS_OF_RANKS = (2, 3, 6)


def link_to(incident: Incident, text: str, screen: int) -> RowLink | None:
    """A rank (`12`, `rank 12`), an operation of the current group (`#7`), or the first rank of a host; None if there is none.

    A rank is shown on `screen` if that lists ranks, else among the waits.
    """
    there = screen if screen in _SCREENS_OF_RANKS else 6
    if match := re.fullmatch(r"(?:rank )?(\d+)", text):
        rank = int(match[1])
        return RowLink(screen=there, rank=rank) if rank in incident.run.ranks else None
    if match := re.fullmatch(r"#(\d+)", text):
        return RowLink(screen=3, seq=int(match[1]), rank=incident.culprit)
    ranks = (rank for rank, record in incident.run.ranks.items() if text and record.host.startswith(text))
    return next((RowLink(screen=there, rank=rank) for rank in ranks), None)
