"""Ranks in text."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_text(ranks: Sequence[int], limit: int = 12) -> str:
    """Ranks as ranges, of many the first `limit`.

    >>> ranks_text([0, 1, 2, 5, 7, 8]), ranks_text(range(0, 100, 2), limit=3)
    ('0-2,5,7-8', '0,2,4,... (50 ranks)')
    """
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    shown = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:limit])
    return shown if len(spans) <= limit else f"{shown},... ({len(ranks)} ranks)"
