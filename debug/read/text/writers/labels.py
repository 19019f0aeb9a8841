"""The rank behind a launcher's label: `[default0]:2026-11-27 ... INFO [rank4] step 3` says whose the lines without a rank are."""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from titan_ckpt.debug.read.text.streams import Stream
from titan_ckpt.debug.read.text.writers.log_records import TRACEBACK

# What kind of number, where it counts, the number: ("rank", "", 3), ("local", host, 0), ("pid", host, 12).
Writer: TypeAlias = tuple[str, str, int]
_SEVERAL = -1  # ranks: the label is no rank's


@dataclass(slots=True)
class Labels:
    """Of one file: the rank that lines with a label named, for those that named one rank alone."""

    known: dict[Writer, int] = field(default_factory=dict)

    def note(self, label: Writer, rank: int, text: str, writers: MutableMapping[Writer, Stream]) -> None:
        """A line with this label named a rank: what the label wrote before is that rank's, too. Behind `[rank4]:` torch writes
        the traceback that ends a process; after it another one may have the label, as torchrun starts all again."""
        known = self.known.setdefault(label, rank)
        if known != rank or text.startswith(TRACEBACK):
            self.known[label] = _SEVERAL
        elif label in writers and ("rank", "", rank) not in writers:
            writers[("rank", "", rank)] = _adopted(writers.pop(label), rank)

    def owner(self, label: Writer) -> Writer:
        """Who wrote a line that has a label and no rank."""
        rank = self.known.get(label, _SEVERAL)
        return label if rank == _SEVERAL else ("rank", "", rank)


def _adopted(stream: Stream, rank: int) -> Stream:
    """The stream as a rank's."""
    again = {id(event): replace(event, rank=rank) for event in (*stream.first, *stream.last, *stream.open_errors)}
    stream.rank, stream.first = rank, [again[id(event)] for event in stream.first]
    stream.last = deque((again[id(event)] for event in stream.last), maxlen=stream.last.maxlen)
    stream.open_errors = deque((again[id(event)] for event in stream.open_errors), maxlen=stream.open_errors.maxlen)
    return stream
