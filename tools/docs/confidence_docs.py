"""The table of confidences in docs/hangs.md, written from `titan_ckpt.debug.incident.confidence`."""

from __future__ import annotations

import re

from titan_ckpt.debug.incident.confidence import confidence_table

_BLOCK = re.compile(r"(<!-- begin confidence -->\n).*?(<!-- end confidence -->)", re.DOTALL)


def with_table(page: str) -> str:
    """`page` with the table between its markers."""
    return _BLOCK.sub(lambda markers: f"{markers[1]}{confidence_table()}\n{markers[2]}", page)
