"""Tables and JSON on stdout."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from tabulate import tabulate


def write_json(value: Any, out: TextIO | None = None) -> None:
    """`value` as indented JSON on stdout. JSON has no infinity and no NaN: both are null."""
    (out or sys.stdout).write(json.dumps(_finite(value), indent=1) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def write_text(text: str, out: TextIO | None = None) -> None:
    """`text` as lines on stdout."""
    (out or sys.stdout).write(text if text.endswith("\n") else text + "\n")


def format_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[str] = ()) -> str:
    """A plain table; the columns named in `right` are aligned right, nothing is guessed from the values.

    >>> print(format_table(["step", "size"], [[20, "1.2 MB"], [1200, "9 B"]], right=["step", "size"]))
      step    size
        20  1.2 MB
      1200     9 B
    """
    align = ["right" if header in right else "left" for header in headers]
    return tabulate(rows, headers, tablefmt="plain", disable_numparse=True, colalign=align if rows else None)


def age_s(created: str, now_s: float) -> float | None:
    """Seconds since an ISO 8601 time, None where there is none."""
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return None
    return now_s - (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
