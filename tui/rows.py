"""Lines of text as data: spans with a role, and the item that enter opens. Knows nothing of Textual.

A role is the meaning of a span (`BAD`, `DIM`, ...); only `tui.widgets.line_view` maps roles to colours. A word or a glyph always
carries the same meaning, so the screens can be read without colour.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Protocol, TypeAlias

from rich.cells import cell_len

from titan_ckpt.console.ranks import ranks_text
from titan_ckpt.location import redact_text


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
    SPOT_BAD = "spot_bad"

    @property
    def chosen(self) -> Role:
        """The role of a cell of this role in the selected column."""
        return Role.SPOT_BAD if self == Role.BAD else Role.SPOT


TextSpan: TypeAlias = tuple[str, Role]
_DIGITS = "0123456789.,"
# The start of a number or of sizes (64x32) before a cut, and their rest after it.
_BEGUN, _GOES_ON = re.compile(r"(?:[\d.,]|(?<=\d)x)+$"), re.compile(r"[.,x]?\d")
CULPRIT = "!"  # marks a rank at fault on every screen

# Whole escape sequences first (colours, titles), then other control and bidirectional characters.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
    r"|[\U000e0000-\U000e0fff]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyph:
    """A character that stands for a state, with its role and its label."""

    char: str
    role: Role
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLink:
    """What enter on a row opens: a screen, and the item to select there."""

    screen: int
    rank: int | None = None
    group: str | None = None
    seq: int | None = None
    step: int | None = None
    source: str = ""
    line: int = 0
    name: str = ""


class Piece(str):
    """A text that was cut or wrapped to fit. `whole` is all of it, which `y` copies."""

    __slots__ = ("whole",)
    whole: str


def piece(text: str, whole: str) -> str:
    """`text` as a piece of `whole`, or of what that is itself a piece of."""
    made = Piece(text)
    made.whole = clean(whole_of(whole))
    return made


def whole_of(text: str) -> str:
    """All of a text that may be a piece."""
    return text.whole if isinstance(text, Piece) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line. `n` and `N` stop at rows with `is_problem`; `at` is the line of code (file, line) that `e` opens."""

    spans: tuple[TextSpan, ...] = ()
    link: RowLink | None = None
    is_problem: bool = False
    at: tuple[str, int] | None = None

    @property
    def whole(self) -> str:
        """The text that `y` copies: of all spans, with what was cut off, and in one line what was wrapped."""
        return "".join(whole_of(text) for text, _ in self.spans).strip()

    @property
    def text(self) -> str:
        """The text of all spans."""
        return "".join(text for text, _ in self.spans)


class Rows(Protocol):
    """A list of rows of any length, each built when it is painted."""

    def __len__(self) -> int: ...

    def row(self, index: int, width: int) -> Row: ...

    def next_problem(self, index: int, direction: int) -> int | None:
        """The nearest problem after (+1) or before (-1) `index`."""
        ...


class RowList:
    """Rows kept in memory."""

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
        """The rows that contain `text`, ignoring case."""
        wanted = text.casefold()
        return RowList(row for row in self._rows if wanted in row.text.casefold())


def row(
    *spans: str | TextSpan, link: RowLink | None = None, is_problem: bool = False, at: tuple[str, int] | None = None
) -> Row:
    """Build a row of cleaned spans; a bare string is a plain span."""
    cleaned = tuple((clean(p), Role.PLAIN) if isinstance(p, str) else (clean(p[0]), p[1]) for p in spans)
    return Row(spans=cleaned, link=link, is_problem=is_problem, at=at)


def placeholder(text: str) -> Row:
    """What stands where something is still read, searched or drawn; `y` copies nothing of it."""
    return Row(spans=((piece(clean(text), ""), Role.DIM),))


def head(text: str) -> Row:
    """A heading row."""
    return row((text, Role.HEAD))


def clean(text: str) -> str:
    """One line without control sequences: logs, names and dumps are untrusted input.

    >>> clean("a\\tb\\x1b[31mred\\x07")
    'a   bred'
    """
    if text.isprintable():
        return text
    text = text.replace("\t", "   ").replace("\n", " ")
    return _CONTROL.sub("", text)


@lru_cache(4096)
def shown(text: str) -> str:
    """`text` without secrets: what is painted, copied or cut goes through here."""
    return str(redact_text(text))


def without_secrets(row: Row) -> Row:
    """The row as it is painted; a secret that is spread over spans makes it one span."""
    text = shown(row.text)
    if text == row.text:
        return row
    spans = tuple((shown(part), role) for part, role in row.spans)
    if "".join(part for part, _ in spans) != text:
        spans = ((text, max(row.spans, key=lambda span: len(span[0]))[1]),)
    return replace(row, spans=spans)


def without_number(text: str, rest: str) -> str:
    """`text` before a cut, `rest` after it: without the number or sizes through which the cut goes.

    >>> without_number("add 64x3", "2 Float"), without_number("add 64", "x32"), without_number("add 64", " Float")
    ('add ', 'add ', 'add 64')
    """
    return _BEGUN.sub("", text) if _GOES_ON.match(rest) else text


def truncate(text: str, width: int) -> str:
    """Cut `text` at the end to at most `width` characters, never within a number: a part of one is another number.

    >>> truncate("a long line", 6), truncate("short", 6), truncate("at x.py:104", 10)
    ('a lon…', 'short', 'at x.py:…')
    """
    text = (
        text if len(text) <= width else shown(text)
    )  # before it is cut: half a URL does not show where its password ends
    if len(text) <= width:
        return text
    kept = text[: max(width - 1, 0)]
    return piece(f"{without_number(kept, text[len(kept) :])}…", text)


def fitted(text: str, width: int) -> str:
    """`text`, cut or filled up to `width` cells of a terminal: a wide character takes two.

    >>> fitted("a long line", 6), fitted("short", 6), fitted("日本語", 5), fitted("a", 0)
    ('a lon…', 'short ', '日…  ', '…')
    """
    text = clean(text)
    return piece(in_cells(truncate, text, width), in_cells(truncate, shown(text), max(width, cell_len(shown(text)))))


def in_cells(cut: Callable[[str, int], str], text: str, width: int) -> str:
    """`text`, cut by `cut` or filled up to `width` cells."""
    length = width
    while cell_len(made := cut(text, length)) > width and length > 0:
        length -= 1
    return made + " " * (width - cell_len(made))


def ranks_named(ranks: Sequence[int], limit: int = 12) -> str:
    """Format ranks as ranges after the word `rank` or `ranks`.

    >>> ranks_named([3]), ranks_named([0, 1])
    ('rank 3', 'ranks 0-1')
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks, limit)}"


def ranks_begun(ranks: Sequence[int], limit: int) -> str:
    """The first ranges of ranks whose number stands beside them.

    >>> ranks_begun(range(0, 100, 2), 3)
    '0,2,4,...'
    """
    return ranks_text(ranks, limit).removesuffix(f" ({len(ranks)} ranks)")


def counted(number: int, noun: str) -> str:
    """Format a number and its noun, with a plain plural.

    >>> counted(1, "rank"), counted(4096, "rank")
    ('1 rank', '4,096 ranks')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def truncate_start(text: str, width: int) -> str:
    """Cut `text` at the start to at most `width` characters, never within a number: the end of a path is the specific part.

    >>> truncate_start("/data/runs/tiny", 8), truncate_start("short", 6), truncate_start("run-1234/a", 6)
    ('…ns/tiny', 'short', '…/a')
    """
    text = text if len(text) <= width else shown(text)
    if len(text) <= width:
        return text
    kept = text[len(text) - max(width - 1, 0) :]
    is_within = text[len(text) - len(kept) - 1] in _DIGITS
    return piece(f"…{kept.lstrip(_DIGITS) if is_within else kept}", text)


def place_text(place: str, width: int) -> str:
    """A `path:line` in at most `width` characters: without its folders, else cut at the start, never its number; else nothing.

    >>> [place_text("/srv/job/faults.py:104", width) for width in (22, 20, 10, 4)]
    ['/srv/job/faults.py:104', 'faults.py:104', '…ts.py:104', '']
    """
    if len(place) <= width:
        return place
    name = place.rpartition("/")[2]
    if len(name) <= width:
        return piece(name, place)
    return piece(truncate_start(name, width), place) if len(name.rpartition(":")[2]) + 3 <= width else ""


def with_place(parts: Sequence[tuple[str, int]], place: str, width: int) -> str:
    """Parts of a line and the `path:line` at its end in at most `width` characters, so that the line's number stays.

    First the folders go, then the parts from the highest number down, then the start of the file's name; parts of number 0 stay.

    >>> parts = [("waits in all_reduce #7", 0), (" · default_pg", 1), (" (inferred)", 2)]
    >>> with_place(parts, "/srv/job/faults.py:104", 50)
    'waits in all_reduce #7 · default_pg  faults.py:104'
    """
    name, whole = place.rpartition("/")[2], "".join(text for text, _ in parts)
    for limit in sorted({number for _, number in parts} | {0}, reverse=True):
        text = "".join(text for text, number in parts if number <= limit)
        for at in (place, name) if place else ("",):
            between = "  " * bool(text and at)
            if len(text + between + at) <= width:
                return piece(f"{text}{between}{at}", f"{whole}{'  ' * bool(at)}{place}")
    text, rest = truncate(text, width), place_text(place, width - len(text) - 2)
    return piece(f"{text}{'  ' * bool(rest)}{rest}", f"{whole}  {place}".rstrip())


def parse_ranks(text: str) -> tuple[int, ...] | None:
    """Parse the format of `ranks_text`; None if `text` is not a set of ranks.

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
    """Wrap `text` to `width`, at spaces where possible; lines after the first begin with `indent`."""
    text = clean(shown(text))
    words = text.lstrip(" ")
    lines, line, width = [], " " * (len(text) - len(words)), max(width, len(indent) + 8)
    for word in words.split(" "):
        while len(word) > width - len(indent):
            room = max(width - len(line) - 1, 0) if line.strip() else width - len(line)
            if room < 8 and line.strip():
                lines.append(line)
                line = indent
                continue
            joint = " " if line.strip() else ""
            begun = without_number(word[:room], word[room:]) or word[:room]  # a part of a number is another one
            lines.append(line + joint + begun)
            word, line = word[len(begun) :], indent
        joint = " " if line.strip() else ""
        if len(line) + len(joint) + len(word) > width:
            lines.append(line)
            line, joint = indent, ""
        line += joint + word
    lines += [line] if line.strip() or not lines else []
    return lines if len(lines) == 1 else [piece(each, text) for each in lines]
