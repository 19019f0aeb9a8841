"""A pattern that may search for ever is refused: `re` cannot be stopped, and holds up the whole program."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screens.logs import _ENDLESS, LogsPane


@pytest.mark.parametrize(
    ("pattern", "is_endless"),
    [
        ("(a+)+$", True), (r"(\w*)*x", True), ("(?:.+?){2,}", True),
        (r"(\w+ )+x", False), (r"a+b*", False), (r"(\d+)", False), (r"(c\+)+", False),
    ],
)  # fmt: skip
def test_repetitions_at_the_end_of_repeated_groups(pattern: str, is_endless: bool) -> None:
    assert (_ENDLESS.search(pattern) is not None) is is_endless


async def test_such_a_pattern_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("step 1\n" + "a" * 40 + "!\n")
    app = TitanApp(find_content(str(tmp_path)), first_screen=5)
    async with app.run_test(size=(120, 24)) as pilot:
        pane = app.query_one(LogsPane)
        pane.set_filter("(a+)+$")
        await pilot.pause()
        assert pane.filter_text == ""
        pane.set_filter("step")
        await pilot.pause()
        assert pane.filter_text == "step"
