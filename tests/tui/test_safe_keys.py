"""Keys that arrive together, and keys that interrupt: typed text is never a command."""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import RenderableType
from textual import events
from textual._compositor import LayoutUpdate
from textual.keys import _character_to_key
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Input

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.cli.main import main
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.cli import parse_keys
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screens.help import HelpScreen
from titan_ckpt.tui.screenshot import settled
from titan_ckpt.tui.widgets.part import PartView
from tools.paths import DATA, INCIDENTS

pytestmark = pytest.mark.repeats


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


# The keys that open each prompt of a run, from the first screen.
PROMPTS = (*(f"{n} slash" for n in range(1, 9)), "1 colon", "5 t", "7 r", "7 p", "8 o", "1 x")


async def test_no_prompt_takes_text_for_commands() -> None:
    """`/queue` as one packet, typed and pasted, at every prompt of every screen."""
    app = app_of(DATA / "run")
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        for keys in PROMPTS:
            await press(app, pilot, keys)
            assert prompt_of(app).has_focus, keys
            for character in "/queue":
                app.post_message(events.Key({"/": "slash"}.get(character, character), character))
            app.post_message(events.Paste("/text\nq\nx\n"))
            await settled(app, pilot)
            assert prompt_of(app).value == "/queue/text q x", keys
            await press(app, pilot, "escape")
            assert (app.is_running, app.pane.filter_text) == (True, ""), keys


async def test_keys_find_their_place_after_the_focus_was_lost() -> None:
    """Textual takes the focus away for a mouse event beside all widgets, which a window that shrinks can bring."""
    app = app_of(DATA / "run", 5)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await pilot.press("g")
        app.screen.set_focus(None)
        await pilot.press("j")
        assert app.pane.body.cursor == 1
        await pilot.press("/")
        for key in "queue":
            app.screen.set_focus(None)
            await pilot.press(key)
        assert app.prompt.value == "queue"


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
        assert prompt_of(app).value == "rank 3 q"


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


def test_an_archive_is_shown_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    with tarfile.open(tmp_path / "skip.tar.gz", "w:gz") as archive:
        archive.add(INCIDENTS / "skip", "skip")
    assert main(["tui", str(tmp_path / "skip.tar.gz"), "--screenshot", str(tmp_path / "seen.svg")]) == 0
    assert "SKIPPED_COLLECTIVE" in (tmp_path / "seen.svg").read_text()
    assert not list((tmp_path / "scratch").iterdir())


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


@pytest.mark.parametrize(("name", "ground"), [("dark", "#0d1219"), ("light", "#fcfcfb"), ("nord", "#2e3440")])
def test_a_screenshot_has_the_theme_that_was_asked_for(name: str, ground: str, tmp_path: Path) -> None:
    picture = tmp_path / "x.svg"
    assert main(["tui", str(INCIDENTS / "skip"), "--screenshot", str(picture), "--theme", name]) == 0
    assert ground in picture.read_text(encoding="utf-8")


def test_a_theme_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tui", str(INCIDENTS / "skip"), "--theme", "nrod"])
    assert "did you mean 'nord'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- the mouse


def scroll(app: TitanApp, down: bool) -> None:
    """A turn of the wheel over the list."""
    kind = events.MouseScrollDown if down else events.MouseScrollUp
    x, y = app.pane.body.region.offset + (5, 2)
    app.post_message(kind(None, x, y, 0, 1 if down else -1, 0, False, False, False, screen_x=x, screen_y=y))


async def test_a_double_click_opens_a_line_and_only_a_line() -> None:
    app = app_of(INCIDENTS / "skip", 3)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        await pilot.click(app.pane.body, offset=(5, 1))
        await settled(app, pilot)
        assert (app.pane.number, app.pane.body.cursor) == (3, 1)
        await pilot.click(app.pane.body, offset=(5, 30), times=2)
        await settled(app, pilot)
        assert (app.pane.number, app.pane.body.cursor) == (3, 1), "nothing is below the last line"
        await pilot.click(app.pane.body, offset=(5, 4), times=2)
        await settled(app, pilot)
        assert app.pane.number == 6
        part = app.pane.query(PartView).last()
        line = [row.text.startswith("state") for row in part._shown].index(True)
        await pilot.click(part, offset=(5, line + 1))  # below the frame
        assert app.pane.text_to_copy().startswith("state")


async def test_what_the_wheel_shows_stays_when_new_data_comes() -> None:
    app = app_of(INCIDENTS / "skip", 5)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "g")
        for _ in range(20):
            scroll(app, down=True)
        await settled(app, pilot)
        top = app.pane.body.scroll_offset.y
        assert top > 10
        app.pane.update_rows(force=True)
        await settled(app, pilot)
        assert app.pane.body.scroll_offset.y == top
        assert app.pane.body.cursor == top, "the cursor came along"
        for _ in range(40):
            scroll(app, down=False)
        await settled(app, pilot)
        assert app.pane.body.scroll_offset.y == 0


async def test_a_window_that_was_small_for_a_moment_is_painted_anew() -> None:
    """Terminals drop what does not fit. The program may see no other size: two signals, one look."""
    app = app_of(INCIDENTS / "skip")
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        painted: list[object] = []
        app._display = lambda screen, renderable: painted.append(renderable)  # type: ignore[method-assign]  # noqa: ARG005
        app.post_message(events.Resize(app.size, app.size))
        await settled(app, pilot)
        assert [update.region.size for update in painted if isinstance(update, LayoutUpdate)] == [app.size]


# ------------------------------------------------------------------------------------------------- any keys

KEYS = (
    *"12345678jkgGhlnNyefwitovVdzcsr[]+-<>{}:/x", "enter", "enter", "escape", "space", "tab", "down", "left", "pagedown",
    "home", "ctrl+d", "ctrl+p", "question_mark", "backspace", "f5", "delete",
)  # fmt: skip


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(("case", "size", "seed"), [("run", (120, 36), 1), ("injected/p2p_missing", (20, 5), 2)])
async def test_no_keys_in_any_order_do_harm(
    case: str, size: tuple[int, int], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """120 keys, clicks and pastes: the program goes on, no file changes, nothing is executed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: pytest.fail(f"executed {command}"))
    shutil.copytree(DATA / case, tmp_path / "run")
    before, chance = files_of(tmp_path), random.Random(seed)
    app = app_of(tmp_path / "run")
    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        for turn in range(120):
            kind = chance.random()
            if kind < 0.05:
                place = chance.randrange(size[0]), chance.randrange(size[1])
                await pilot.click(offset=place, times=chance.choice((1, 2)))
            elif kind < 0.1:
                app.post_message(events.Paste(chance.choice(("/queue\nq\n", "#7", "9" * 30, "\x1b[31m\u202e", "(["))))
            elif kind < 0.12:
                scroll(app, down=chance.random() < 0.5)
            else:
                app.simulate_key(_character_to_key(key) if len(key := chance.choice(KEYS)) == 1 else key)
            if turn % 20 == 0:
                await settled(app, pilot)
        await settled(app, pilot)
        assert app.is_running
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("size", [(80, 24), (140, 45)])
async def test_the_first_frame_of_a_screen_is_whole(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the lines of the screen before nor lines broken for another width, also when it is opened the first time."""
    app, frames = app_of(INCIDENTS / "chain"), []
    display = TitanApp._display

    def painted(self: TitanApp, screen: Screen[object], renderable: RenderableType | None) -> None:
        display(self, screen, renderable)
        frames.append(screen_text(self))

    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        monkeypatch.setattr(TitanApp, "_display", painted)
        for number in "234678":
            frames.clear()
            await press(app, pilot, number)
            whole = screen_text(app)
            assert [frame for frame in frames if f"[{number} " in frame and frame != whole] == []


async def test_a_screen_left_and_shown_again_at_once_gets_the_keys() -> None:
    app = app_of(INCIDENTS / "skip", 5)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "1 5")
        await press(app, pilot, "g j")
        assert app.pane.body.cursor == 1
