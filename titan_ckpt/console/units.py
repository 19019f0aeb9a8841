"""Parse and format sizes and durations."""

from __future__ import annotations

import re

from titan_ckpt.errors import UsageError

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_LONG_HOURS = 48  # from here on a duration is in days
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in `text`; decimal (kB, MB) and binary (KiB, MiB) units.

    >>> parse_size("512MB"), parse_size("1.5 GiB"), parse_size("4096")
    (512000000, 1610612736, 4096)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a size; write for example 512MB, 1.5GiB or 4096")
    number, unit = match.groups()
    return int(float(number) * _FACTORS[(unit or "").lower()])


def format_size(size_bytes: float) -> str:
    """`size_bytes` with three significant digits and a decimal unit.

    >>> format_size(0), format_size(999), format_size(1_234_000)
    ('0 B', '999 B', '1.23 MB')
    """
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """`seconds` with two units at most.

    >>> format_duration(0.0123), format_duration(75), format_duration(7260), format_duration(300_000)
    ('12 ms', '1 min 15 s', '2 h 1 min', '3 d 11 h')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < _LONG_HOURS else f"{hours // 24} d {hours % 24} h"


def format_age(seconds: float) -> str:
    """How long ago something was: whole seconds, from a minute on whole minutes.

    >>> format_age(0.4), format_age(59.7), format_age(190), format_age(7260)
    ('0 s', '59 s', '3 min', '2 h 1 min')
    """
    if seconds < 60:
        return f"{int(max(seconds, 0))} s"
    return f"{seconds // 60:.0f} min" if seconds < 3600 else format_duration(seconds)
