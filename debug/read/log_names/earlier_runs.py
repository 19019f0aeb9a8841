"""Logs of an earlier run of the job in the same folder: a rank counts its steps again in a later log.

Runs follow each other so in `slurm-771.out` and `slurm-772.out`, `console.1.log`, `run_1/`, `train.log.1` of a script that moves
the old log away. A log that was merely rotated goes on with the steps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from titan_ckpt.debug.incident.kinds import FlagKind
from titan_ckpt.debug.incident.records import Flag
from titan_ckpt.debug.read.text.job_text import JobText
from titan_ckpt.debug.read.text.writers.labels import Writer

_ENDING = re.compile(r"\.(?:out|err|log|txt|stdout|stderr)(?=\.|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The steps of one rank in one log."""

    text: JobText
    begin_s: float
    end_s: float
    first: int
    last: int


def forget_earlier_runs(texts: list[JobText]) -> Iterator[Flag]:
    """Drop the logs that ended before the newest run began, and what lies beside them under the same name or in their folder."""
    spans: defaultdict[Writer, list[_Span]] = defaultdict(list)
    for text in texts:
        for writer, stream in text.writers.items():
            if writer[0] == "rank" and (times := stream.step_times):
                spans[writer].append(
                    _Span(
                        text=text,
                        begin_s=min(times.values()),
                        end_s=max(times.values()),
                        first=min(times),
                        last=max(times),
                    )
                )
    newest = {writer: max(found, key=lambda span: span.begin_s) for writer, found in spans.items()}
    kept = {id(span.text) for span in newest.values()}
    old = {
        id(span.text): newest[writer]
        for writer, found in spans.items()
        for span in found
        if span.end_s < newest[writer].begin_s
        and newest[writer].first <= span.last
        and id(span.text) not in kept
        and _ended_before(span.text, newest[writer].begin_s)
    }
    places = {(part, part(text.source)): old[id(text)] for text in texts if id(text) in old for part in _PARTS}
    for text in [text for text in texts if id(text) not in old and id(text) not in kept]:
        beside = next((span for part in _PARTS if (span := _newer(places, part, text.source))), None)
        if beside is not None and _ended_before(text, beside.begin_s):
            old[id(text)] = beside
    dropped = [text for text in texts if id(text) in old]
    texts[:] = [text for text in texts if id(text) not in old]
    for text in dropped:
        words = f"{text.source} is of an earlier run: the job counts its steps again in {old[id(text)].text.source}"
        yield Flag(flag=FlagKind.EARLIER_ATTEMPT, text=words, source=text.source)


def _ended_before(text: JobText, time_s: float) -> bool:
    return all(stream.time_s is None or stream.time_s < time_s for stream in text.writers.values())


def _stem(source: str) -> str:
    return _ENDING.sub("", source)


def _folder(source: str) -> str:
    return source.rpartition("/")[0]


_Part: TypeAlias = Callable[[str], str]
_PARTS: tuple[_Part, ...] = (_stem, _folder)  # `slurm-771.err` goes with `slurm-771.out`, all logs of `run_1/` together


def _newer(places: Mapping[tuple[_Part, str], _Span], part: _Part, source: str) -> _Span | None:
    """What follows the old log beside which this one lies, unless that lies there as well."""
    found = places.get((part, part(source)))
    return found if found is not None and part(found.text.source) != part(source) else None
