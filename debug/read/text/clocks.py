"""Times at the beginning of a log line, in the styles that loggers, container runtimes, kernels and schedulers use."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache

_MONTHS = {
    name: number
    for number, name in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1
    )
}
WORDS = frozenset((*_MONTHS, "Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"))
_CLOCK = r"(?P<clock>\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)"
_MONTH = rf"(?P<word>{'|'.join(_MONTHS)})"
_ZONE = r"(?P<zone>Z\b|[+-]\d\d:?\d\d\b| ?UTC\b)?"

# What may stand before a text, most usual first; an opening bracket is optional and closed again.
_STYLES = (
    rf"(?P<year>\d{{4}})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _]{_CLOCK}{_ZONE}",
    rf"(?P<month>\d\d)/(?P<day>\d\d)/(?P<year>\d{{2,4}})[ T]+{_CLOCK}",
    rf"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? )?{_MONTH} +(?P<day>\d{{1,2}}) {_CLOCK}(?: (?P<year>\d{{4}}))?",
    rf"{_CLOCK}",
)
LEADING = tuple(re.compile(rf"[\[(]?{style}[\])]?(?:[ \t]|:(?= )|(?=[\[<]))[ \t]?") for style in _STYLES)
KERNEL = re.compile(r"\[\s{0,8}(?P<uptime>\d{1,9}\.\d{1,9})\](?:\[\s*[TC]?\d+\])? ")
GLOG = re.compile(rf"\[?[EWIF](?P<month>\d{{1,2}})(?P<day>\d\d) {_CLOCK}")
ANYWHERE = re.compile(rf"(?P<year>\d{{4}})-(?P<month>\d\d)-(?P<day>\d\d)[T _]{_CLOCK}")


def seconds(match: re.Match[str], year: int) -> float | None:
    """The moment that a match of a pattern above gives, in seconds since the epoch, read as UTC; None where it has no date.

    `year` is used where the text has none (glog, syslog).
    """
    names = match.re.groupindex
    if "day" not in names:
        return None
    month = match["word"] if "word" in names else match["month"]
    begin = _day((match["year"] if "year" in names else None) or str(year), month, match["day"])
    clock = match["clock"]
    hour, minute, second = int(clock[:2]), int(clock[3:5]), int(clock[6:8])
    if begin is None or hour > 23 or minute > 59 or second > 60:
        return None
    return begin + 3600 * hour + 60 * minute + second + (float(f"0.{clock[9:]}") if len(clock) > 9 else 0.0)


def zone_of(match: re.Match[str]) -> str:
    """The time zone that a match of a pattern above gives, as seconds east of Greenwich; "" where it gives none.

    >>> zone_of(LEADING[0].match("2026-11-25T10:00:00+09:00 step 1"))
    '32400'
    """
    zone = (match["zone"] or "").strip() if "zone" in match.re.groupindex else ""
    if zone[:1] not in ("+", "-"):
        return "0" if zone else ""
    east = 3600 * int(zone[1:3]) + 60 * int(zone[-2:])
    return str(east if zone[0] == "+" else -east)


@lru_cache(maxsize=1024)
def _day(year: str, month: str, day: str) -> float | None:
    """When a day begins; `month` is a number or its name's first letters."""
    number = int(year)
    try:
        return datetime(
            number + 2000 * (number < 100), _MONTHS.get(month) or int(month), int(day), tzinfo=UTC
        ).timestamp()
    except ValueError:
        return None
