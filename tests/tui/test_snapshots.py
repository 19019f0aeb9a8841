"""Every screen of every recording equals its reviewed picture, at 80 x 24 and 140 x 45."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from tests.support.screen_pictures import COMMAND, SIZES, golden, picture_cases, pictures_of
from tests.support.screen_svg import difference, sheet


@pytest.mark.e2e
@pytest.mark.parametrize("name", sorted(picture_cases()))
def test_the_screens_equal_their_pictures(name: str, tmp_path: Path) -> None:
    found = []
    for size, svg in pictures_of(name).items():
        path = golden(name, size)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if svg != before:
            (tmp_path / path.name).write_text(svg, encoding="utf-8")
            lines = difference(before, svg) or ["the frame of the sheet has changed"]
            found += [f"current sheet: {tmp_path / path.name}", *(f"{size[0]}x{size[1]} {line}" for line in lines)]
    assert not found, "\n".join(
        [
            f"{name}: screens have changed",
            *found[:20],
            f"({len(found)} lines in all) If the change is intended: {COMMAND} {name}",
        ]
    )


def drawn(**screens: list[tuple[str, str]]) -> str:
    """A sheet of screens, each given as lines of (text, style)."""
    return sheet(
        {
            keys: [Strip([Segment(text, Style.parse(style))]) for text, style in lines]
            for keys, lines in screens.items()
        },
        (20, 4),
    )


def test_a_change_is_described_in_words() -> None:
    before = drawn(a=[("one", ""), ("a < b", "bold"), ("", ""), ("four", "red")], b=[("three", "")])
    now = drawn(a=[("one", ""), ("a > b", "bold"), ("3", ""), ("four", "blue")], c=[("four", "")])
    assert difference(before, before) == []
    assert difference(before, now) == [
        "after the keys 'c': a new screen without a picture",
        "after the keys 'b': this screen is no longer shown",
        "after the keys 'a', line 2:\n    was: a < b\n    now: a > b",
        "after the keys 'a', line 3:\n    was: \n    now: 3",
        "after the keys 'a', line 4 (its colours):\n"
        '    was: <text textLength="24"><tspan fill="#800000">four</tspan></text>\n'
        '    now: <text textLength="24"><tspan fill="#000080">four</tspan></text>',
    ]


def test_every_picture_belongs_to_a_case() -> None:
    folder = golden("run", SIZES[0]).parent
    assert {path.name for path in folder.iterdir()} == {
        golden(name, size).name for name in picture_cases() for size in SIZES
    }
