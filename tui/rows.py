"""Lines of text as the screens' data: parts with a role, and where enter leads. Knows nothing of Textual.

Roles say what a part means (`bad`, `dim`, ...); only `tui.widgets.line_view` turns them into colours, and no role is the
only carrier of its meaning: there is always a word or a glyph as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias


class Role(StrEnum):
    """Meaning of a text span."""

    PLAIN = ""
    DIM = "dim"
    BOLD = "bold"
    HEAD = "head"
    BAD = "bad"
    WARN = "warn"
    GOOD = "good"
    NOTE = "note"
    SPOT = "spot"


TextSpan: TypeAlias = tuple[str, Role]

# Whole escape sequences first (colours, titles), then what else steers a terminal or turns its text around.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyph:
    """One character that stands for a state, with its role and its name in words."""

    char: str
    role: Role
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLink:
    """Where enter on a row leads: a screen, and what to select there."""

    screen: int
    rank: int | None = None
    group: str | None = None
    seq: int | None = None
    step: int | None = None
    source: str = ""
    line: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line. `is_problem` is where `n` and `N` stop."""

    spans: tuple[TextSpan, ...] = ()
    link: RowLink | None = None
    is_problem: bool = False

    @property
    def text(self) -> str:
        """The line without roles."""
        return "".join(text for text, _ in self.spans)


class Rows(Protocol):
    """Any number of rows, made only when they are looked at."""

    def __len__(self) -> int: ...

    def row(self, index: int, width: int) -> Row: ...

    def next_problem(self, index: int, direction: int) -> int | None:
        """The nearest problem after (+1) or before (-1) `index`."""
        ...


class RowList:
    """Rows that stand in memory."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int, width: int) -> Row:  # noqa: ARG002 (the protocol's)
        return self._rows[index]

    def next_problem(self, index: int, direction: int) -> int | None:
        places = range(index + 1, len(self._rows)) if direction > 0 else range(index - 1, -1, -1)
        return next((place for place in places if self._rows[place].is_problem), None)

    def matching(self, text: str) -> RowList:
        """The rows that hold `text`, in any case."""
        wanted = text.casefold()
        return RowList(row for row in self._rows if wanted in row.text.casefold())


def row(*spans: str | TextSpan, link: RowLink | None = None, is_problem: bool = False) -> Row:
    """A row of parts; a bare string is a part without a role."""
    cleaned = tuple((clean(p), Role.PLAIN) if isinstance(p, str) else (clean(p[0]), p[1]) for p in spans)
    return Row(spans=cleaned, link=link, is_problem=is_problem)


def head(text: str) -> Row:
    """A heading."""
    return row((text, Role.HEAD))


def clean(text: str) -> str:
    """`text` without what could steer a terminal: logs and dumps are other people's bytes.

    >>> clean("a\\tb\\x1b[31mred\\x07")
    'a   bred'
    """
    text = text.replace("\t", "   ")
    return _CONTROL.sub("", text) if not text.isprintable() else text


def ranks_text(ranks: Sequence[int], limit: int = 12) -> str:
    """Ranks as ranges.

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


def truncate(text: str, width: int) -> str:
    """`text` in at most `width` characters.

    >>> truncate("a long line", 6), truncate("short", 6)
    ('a lon…', 'short')
    """
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def ranks_named(ranks: Sequence[int], limit: int = 12) -> str:
    """
    >>> ranks_named([3]), ranks_named([0, 1])
    ('rank 3', 'ranks 0-1')
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks, limit)}"


def counted(number: int, what: str) -> str:
    """
    >>> counted(1, "rank"), counted(4096, "rank")
    ('1 rank', '4,096 ranks')
    """
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def truncate_start(text: str, width: int) -> str:
    """`text` in at most `width` characters, of which the last are kept: a path's end tells more than its beginning.

    >>> truncate_start("/data/runs/tiny", 8), truncate_start("short", 6)
    ('…ns/tiny', 'short')
    """
    return text if len(text) <= width else "…" + text[len(text) - max(width - 1, 0) :]


def parse_ranks(text: str) -> tuple[int, ...] | None:
    """The inverse of `ranks_text`; None where `text` is no set of ranks.

    >>> parse_ranks("0-2,5"), parse_ranks("five")
    ((0, 1, 2, 5), None)
    """
    found: set[int] = set()
    for item in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", item)
        if match is None:
            return None
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """`text` in lines of at most `width`, broken at spaces where possible; later lines begin with `indent`."""
    lines, line, width = [], "", max(width, len(indent) + 8)
    for word in clean(text).split(" "):
        while len(word) > width - len(indent):
            room = max(width - len(line) - 1, 0) if line.strip() else width - len(line)
            if room < 8 and line.strip():
                lines.append(line)
                line = indent
                continue
            joint = " " if line.strip() else ""
            lines.append(line + joint + word[:room])
            word, line = word[room:], indent
        joint = " " if line.strip() else ""
        if len(line) + len(joint) + len(word) > width:
            lines.append(line)
            line, joint = indent, ""
        line += joint + word
    return [*lines, line] if line.strip() or not lines else lines
