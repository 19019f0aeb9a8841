"""The line at which the logs open, and the one that is marked as the first error."""

from __future__ import annotations

import pytest

from tests.support.screen_pictures import screen_text
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screens.logs import LogsPane
from titan_ckpt.tui.screenshot import settled
from tools.paths import INCIDENTS


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("exception", "02:18:55.771 [rank1] ERROR exception: ValueError: tokenizer: bad utf-8 in shard 17"),
        ("pginit", "02:10:05.332 [rank1] INFO rank 1 stuck before init"),
    ],
)
async def test_logs_open_at_what_the_program_said_first(case: str, text: str) -> None:
    """Not at the traceback of an error that a dated record told before; not at what a signal handler wrote after the stop."""
    app = TitanApp(find_content(str(INCIDENTS / case)), first_screen=5)
    async with app.run_test(size=(140, 45)) as pilot:
        await settled(app, pilot)
        assert isinstance(app.pane, LogsPane)
        assert app.pane.copied_text() == f"2026-11-21 {text}"
        marked = [line for line in screen_text(app).splitlines() if "FIRST ERROR" in line]
        assert len(marked) == (case == "exception")
        assert all(text in line for line in marked)
