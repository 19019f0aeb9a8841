"""Every screen of every recording is what it was when somebody last looked at it, at 80 x 24 and 140 x 45."""

from __future__ import annotations

import pytest

from tests.screen_texts import COMMAND, SIZES, cases, difference, golden, texts_of


@pytest.mark.parametrize("name", sorted(cases()))
def test_the_screens_are_what_they_were(name: str) -> None:
    found = []
    for size, text in texts_of(name).items():
        before = golden(name, size).read_text(encoding="utf-8")
        found += [f"{size[0]}x{size[1]} {line}" for line in difference(before, text)]
    assert not found, "\n".join(
        [f"{name}: {len(found)} lines of the screens have changed", *found[:20], f"If that is meant: {COMMAND} {name}"]
    )


def test_a_change_is_told_in_words() -> None:
    before, now = "=== 1 ===\none\ntwo\n=== 2 ===\nthree\n", "=== 1 ===\none\n2\n=== 3 ===\nfour\n"
    assert difference(before, now) == [
        "after the keys '3': a screen that there is no text of",
        "after the keys '2': this screen is no longer shown",
        "after the keys '1', line 2:\n    was: two\n    now: 2",
    ]


def test_no_text_is_left_over_from_a_case_that_went() -> None:
    folder = golden("run", SIZES[0]).parent
    assert {path.name for path in folder.iterdir()} == {golden(name, size).name for name in cases() for size in SIZES}
