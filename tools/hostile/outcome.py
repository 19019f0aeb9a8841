"""What every part of the hostile campaign reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Results of one part. `failures` must stay empty; `counts` are figures for the table in docs/reliability.md."""

    part: str
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
