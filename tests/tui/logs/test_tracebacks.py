"""Logs whose names tell no rank, and tracebacks, whose lines belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.screen_pictures import screen_text
from tests.tui.test_keys import fill
from titan_ckpt.store.open import open_store
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.logs.files import LogFiles
from titan_ckpt.tui.data.logs.growth import grow
from titan_ckpt.tui.data.logs.index import load_logs
from titan_ckpt.tui.data.logs.lines import ERROR, INFO, TRACE, scan
from titan_ckpt.tui.screenshot import settled

HEAD, FRAMES, LAST = (
    "Traceback (most recent call last):",
    ['  File "train.py", line 3, in step', "    x = y"],
    "KeyError: 'a'",
)


@pytest.mark.parametrize(
    "lines",
    [
        [HEAD, *FRAMES, LAST],
        [f"[rank1]: {text}" for text in (HEAD, *FRAMES, LAST)],
        [f"2026-11-21 02:00:0{n} [rank1] {text}" for n, text in enumerate((HEAD, *FRAMES, LAST))],
        [f"2026-11-21 02:00:01 [rank1] ERROR failed {HEAD}", *FRAMES, LAST],
    ],
    ids=["bare", "rank", "stamp", "head alone"],
)
def test_the_lines_of_a_traceback_belong_together(lines: list[str]) -> None:
    level = scan("\n".join(["begin", *lines, "  indented", "end"]).encode()).level
    assert level.tolist() == [INFO, ERROR, TRACE, TRACE, ERROR, INFO, INFO]


def test_two_ranks_that_write_at_once_keep_their_tracebacks() -> None:
    texts = [f"[rank{rank}]: {text}" for text in (HEAD, *FRAMES, LAST) for rank in (0, 1)]
    assert scan("\n".join(texts).encode()).level.tolist() == [ERROR, ERROR, *[TRACE] * 4, ERROR, ERROR]


@pytest.mark.parametrize("cut", [40, 60, 75, 90])
def test_a_traceback_that_is_still_written_is_marked_anew(tmp_path: Path, cut: int) -> None:
    text, path = "\n".join(["begin", HEAD, *FRAMES, LAST, "end"]), tmp_path / "rank_0.log"
    path.write_text(text[:cut])
    index = load_logs(LogFiles(open_store(str(tmp_path)), find_content(str(tmp_path)).logs))
    path.write_text(text)
    now = grow(index, index.files, find_content(str(tmp_path)).logs)
    assert now is not None
    assert now.level.tolist() == [INFO, ERROR, TRACE, TRACE, ERROR, INFO]
    assert len(now.order) == 6
    now.files.close()


async def test_logs_whose_lines_alone_name_the_rank_have_it(tmp_path: Path) -> None:
    """And a filter for errors shows the exception, not the head of its traceback alone."""
    for rank in range(3):
        stamps = [
            f"2026-11-27T18:00:0{n}.00{rank}Z host{rank} trainer[{rank}]: [rank{rank}] step {n}" for n in range(6)
        ]
        last = f"2026-11-27T18:00:09.000Z host1 trainer[1]: [rank1] {HEAD}"
        text = "\n".join([*stamps, *([last, *FRAMES, LAST] if rank == 1 else ())])
        (tmp_path / f"job-0123_host_worker-{rank}.log").write_text(text + "\n")
    app = TitanApp(find_content(str(tmp_path)), first_screen=5)
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(app, pilot)
        lines = screen_text(app).splitlines()
        assert f"▸     !1 FIRST ERROR  {LAST}" in lines
        assert {line[:8].strip(" ▸") for line in lines[3:25]} >= {"0", "!1", "2"}
        await fill(app, pilot, "slash", "1 error")
        assert "4 of 22 lines" in app.pane.title()
        assert LAST in screen_text(app)
        await fill(app, pilot, "slash", "2")
        assert "6 of 22 lines" in app.pane.title()
