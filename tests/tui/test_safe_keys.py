"""Keys that arrive together, and keys that interrupt: typed text is never a command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import Input

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.cli.main import main
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.cli import parse_keys
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screens.help import HelpScreen
from titan_ckpt.tui.screenshot import settled
from tools.paths import DATA, INCIDENTS


def app_of(path: Path, screen: int = 1) -> TitanApp:
    return TitanApp(find_content(str(path)), clock=lambda: 1.8e9, first_screen=screen)


def prompt_of(app: TitanApp) -> Input:
    return app.query_one("#prompt", Input)


@pytest.mark.parametrize(
    ("path", "burst", "typed"),
    [
        (INCIDENTS / "skip", "1/queue", "queue"),
        (INCIDENTS / "skip", "5/q 2 3n", "q 2 3n"),
        (INCIDENTS / "skip", "5t14:05:30", "14:05:30"),
        (INCIDENTS / "skip", "2/0-3,q", "0-3,q"),
        (DATA / "run", "7jrqpf", "qpf"),
        (DATA / "run", "7p1 q", "1 q"),
    ],
)
async def test_keys_of_one_packet_go_to_the_prompt(path: Path, burst: str, typed: str) -> None:
    """All keys are in the queue before the first is handled, as a paste or a slow connection delivers them."""
    app = app_of(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        for character in burst:
            app.post_message(events.Key({"/": "slash"}.get(character, character), character))
        await settled(app, pilot)
        assert prompt_of(app).value == typed
        assert prompt_of(app).has_focus
        assert app.is_running


async def test_pasted_text_runs_no_command() -> None:
    app = app_of(INCIDENTS / "skip")
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        app.post_message(events.Paste("/queue\nq\n"))
        await settled(app, pilot)
        assert (app.is_running, app.pane.filter_text, prompt_of(app).has_class("hidden")) == (True, "", True)
        await press(app, pilot, "slash")
        app.post_message(events.Paste("rank 3\nq\n"))
        await settled(app, pilot)
        assert prompt_of(app).value == "rank 3"


async def test_ctrl_c_quits_after_one_question() -> None:
    app = app_of(INCIDENTS / "skip")
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "ctrl+c")
        assert "press ctrl+c again to quit" in screen_text(app)
        await press(app, pilot, "j ctrl+c")
        assert app.is_running
        await pilot.press("ctrl+c")
    assert app.return_code == 130


async def closed_by_ctrl_c(app: TitanApp, pilot: Pilot[None], key: str, is_open: Callable[[], bool]) -> None:
    await press(app, pilot, key)
    assert is_open()
    await press(app, pilot, "ctrl+c")
    assert not is_open()


async def test_ctrl_c_closes_what_is_open_over_the_screen() -> None:
    app = app_of(INCIDENTS / "skip")
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await closed_by_ctrl_c(app, pilot, "slash", lambda: not prompt_of(app).has_class("hidden"))
        await closed_by_ctrl_c(app, pilot, "question_mark", lambda: isinstance(app.screen, HelpScreen))
        await closed_by_ctrl_c(app, pilot, "ctrl+p", lambda: len(app.screen_stack) > 1)
        assert app.is_running


@pytest.mark.parametrize("screen", range(1, 9))
async def test_a_filter_without_a_match_says_so(screen: int) -> None:
    app = app_of(DATA / "run", screen)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "slash")
        prompt_of(app).value = "zebra"
        await press(app, pilot, "enter")
        assert "'zebra'" in app.pane.copied_text()
        await press(app, pilot, "escape")
        assert "zebra" not in screen_text(app)


async def test_a_filter_on_training_chooses_whole_plots() -> None:
    app = app_of(DATA / "run", 8)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "slash")
        prompt_of(app).value = "loss"
        await press(app, pilot, "enter")
        text = screen_text(app)
        assert "loss" in text
        assert "throughput" not in text
        assert any("\u2801" <= character <= "\u28ff" for character in text), "the curve itself"


def test_an_unknown_key_of_a_screenshot_is_refused() -> None:
    assert parse_keys("2,n,?,ctrl+p,question_mark,enter, down") == (
        "2",
        "n",
        "?",
        "ctrl+p",
        "question_mark",
        "enter",
        "down",
    )
    for wrong in ("2,foo", "hyper+x", "entr"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no key"):
            parse_keys(wrong)


@pytest.mark.parametrize(("name", "problem"), [("x.png", "ends with .svg"), ("none/x.svg", "does not exist")])
def test_a_screenshot_that_cannot_be_written_is_refused(
    name: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tui", str(INCIDENTS / "skip"), "--screenshot", str(tmp_path / name)]) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
