"""A pattern that would search for ever is given up and says so, while the screens go on; `re` itself cannot be stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.logs import index
from titan_ckpt.tui.data.logs.matcher import Matcher
from titan_ckpt.tui.screens.logs import LogsPane
from titan_ckpt.tui.screenshot import settled

ENDLESS = ["(a+)+$", "(a|aa)+$", r"(\w*)*x!", "(a?a?)*$"]
LINES = b"step 1\n" + b"a" * 60 + b"!\nstep 2\n"


@pytest.mark.parametrize("pattern", ENDLESS)
def test_it_names_the_pattern_and_the_limit(pattern: str) -> None:
    with Matcher(pattern, limit_s=0.1) as found, pytest.raises(TimeoutError) as error:
        found.starts(LINES)
    assert repr(pattern) in str(error.value)
    assert "0.1 s" in str(error.value)


def test_matches_are_those_of_re_in_each_block() -> None:
    with Matcher("STEP [0-9]|^a+!$", limit_s=60) as found:
        assert list(found.starts(LINES)) == [0, 7, 69]
        assert list(found.starts(b"")) == []
        assert list(found.starts(b"a step 3")) == [2]


def test_a_warning_about_a_pattern_does_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with Matcher("[[a]+!", limit_s=60) as found:
        assert list(found.starts(LINES)) == [7]
    assert capfd.readouterr().err == ""


def test_a_search_that_is_left_ends_its_process() -> None:
    with Matcher("(a|aa)+$", limit_s=600) as found:
        process = found._process
    assert process.returncode is not None


async def test_the_screens_say_so_and_take_the_next_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "LIMIT_S", 0.1)
    (tmp_path / "rank_0.log").write_bytes(LINES)
    app = TitanApp(find_content(str(tmp_path)), first_screen=5)
    async with app.run_test(size=(120, 24)) as pilot:
        await settled(app, pilot)
        pane = app.query_one(LogsPane)
        assert len(pane.body.rows) == 3
        pane.set_filter("(a|aa)+$")
        await settled(app, pilot)
        assert "took more than 0.1 s" in pane.body.rows.row(0, 110).text
        pane.set_filter("step")
        await settled(app, pilot)
        assert len(pane.body.rows) == 2
