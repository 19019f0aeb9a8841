"""Ranks over time: what is left of the window, how long the last rank waited, and ranks that shut down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screenshot import settled
from tools.paths import DATA, INCIDENTS


async def shown(path: Path, keys: str, size: tuple[int, int] = (120, 36)) -> str:
    app = TitanApp(find_content(str(path)), clock=lambda: 1.8e9)
    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        await press(app, pilot, keys)
        await settled(app, pilot)
        return screen_text(app)


@pytest.mark.parametrize(
    ("path", "keys", "words"),
    [
        (INCIDENTS / "dataloader", "2", ("‹0", "for 14.0 s")),  # the timeout, not how long the culprit was stuck
        (INCIDENTS / "exception", "2", ("for 9.2 s",)),
        (DATA / "injected" / "teardown", "2", ("tttttttt", "t shuts down")),
        (DATA / "injected" / "p2p_missing", "1", ("rank 1: itself waits in barrier",)),
        (INCIDENTS / "sigkill", "3", ("operation #7", "failed", "pending")),
        (INCIDENTS / "order", "2", ("within 1 ms of the first",)),
        (DATA / "run", "7", ("<408 ms",)),
    ],
)
async def test_what_the_evidence_shows(path: Path, keys: str, words: tuple[str, ...]) -> None:
    text = await shown(path, keys)
    for word in words:
        assert word in text


async def test_nothing_is_left_of_the_window_where_all_is_in_it() -> None:
    assert "‹0" not in await shown(INCIDENTS / "sigstop", "2")


@pytest.mark.parametrize(
    ("path", "keys", "row"),
    [
        (DATA / "injected" / "teardown", "6", "t rank 1 ! threading.py:1590"),
        (INCIDENTS / "ckpt_io", "3", "absent       faults.py:156"),
    ],
)
async def test_the_line_of_the_culprit_is_not_cut_off(path: Path, keys: str, row: str) -> None:
    """On a small terminal its state's words go, which its sign has."""
    assert row in await shown(path, keys, (40, 12))
