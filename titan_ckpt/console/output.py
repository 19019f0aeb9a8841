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
    """Write `value` as indented JSON to stdout; infinity and NaN become null."""
    (out or sys.stdout).write(json.dumps(_finite(value), indent=1) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def write_text(text: str, out: TextIO | None = None) -> None:
    """Write `text` as lines to stdout."""
    (out or sys.stdout).write(text if text.endswith("\n") else text + "\n")


def format_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[str] = ()) -> str:
    """A plain table; the columns named in `right` are right-aligned; no alignment is guessed from values.

    >>> print(format_table(["step", "size"], [[20, "1.2 MB"], [1200, "9 B"]], right=["step", "size"]))
      step    size
        20  1.2 MB
      1200     9 B
    """
    align = ["right" if header in right else "left" for header in headers]
    return tabulate(rows, headers, tablefmt="plain", disable_numparse=True, colalign=align if rows else None)


def age_s(created: str, now_s: float) -> float | None:
    """Seconds since an ISO 8601 time; None if it cannot be parsed."""
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return None
    return now_s - (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
