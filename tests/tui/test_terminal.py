"""The program in real terminals: a pseudo-terminal everywhere, and tmux where it is installed; with and without colour. And what
terminals send that nobody typed: answers, in one piece or several, late or never."""

from __future__ import annotations

import base64
import random
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.screen_terminal import (
    ENTER,
    ESCAPE,
    PseudoTerminal,
    Tmux,
    opened,
    see,
    shell,
    tui_command,
    wait_until,
)
from titan_ckpt.tui.driver import Sieve, passed_on
from tools.paths import INCIDENTS

pytestmark = pytest.mark.repeats

HAS_TMUX = shutil.which("tmux") is not None
TERMINALS = ["pty", pytest.param("tmux", marks=pytest.mark.skipif(not HAS_TMUX, reason="tmux is not installed"))]


@pytest.mark.parametrize("kind", TERMINALS)
def test_a_hang_is_traced_to_its_line(kind: str, tmp_path: Path) -> None:
    """As a user does over ssh: the verdict, the operation, two ranks side by side, the waits, a larger window, and quit."""
    with opened(kind, INCIDENTS / "skip", tmp_path) as terminal:
        see(terminal, "SKIPPED_COLLECTIVE")
        terminal.press(ENTER)
        assert "broadcast 8 Float" in see(terminal, "operation #7")
        terminal.press("d")
        assert "faults.py:122 c_skip" in see(terminal, "ranks 0 and 2")
        terminal.press(ESCAPE)
        see(terminal, "merged stacks")
        terminal.press("6")
        assert "rank 2 ! culprit" in see(terminal, "3 ranks waited")
        terminal.resize(120, 30)
        see(terminal, "7 Checkpoints")
        terminal.press("q")
        assert terminal.ended_with() == 0


COLOUR = re.compile(rb"\x1b\[(?:[\d;:]*[;:])?(?:[349][0-8]|10[0-7])[;:m]")


def hues(raw: bytes) -> set[bytes]:
    """All painted colours as red;green;blue."""
    return {match.group(1) for match in re.finditer(rb"[34]8;2;(\d+;\d+;\d+)", raw)}


@pytest.mark.parametrize(
    ("environment", "is_coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "vt100", "NO_COLOR": "1"}, False)],
)
def test_every_mark_is_there_with_and_without_colour(
    environment: dict[str, str], is_coloured: bool, tmp_path: Path
) -> None:
    with opened("pty", INCIDENTS / "skip", tmp_path, COLORTERM="truecolor", **environment) as terminal:
        assert isinstance(terminal, PseudoTerminal)
        screen = see(terminal, "in a collective")
        for mark in ("▸ SKIPPED_COLLECTIVE", "[1 Overview]", "0w 1w 2! 3w", "culprit: rank 2"):
            assert mark in screen
        assert bool(hues(terminal.raw)) == is_coloured
        terminal.press("2")
        assert "#" in see(terminal, "[2 Grid]")
        terminal.press("?")
        see(terminal, "everywhere")
        assert bool(COLOUR.search(terminal.raw)) == is_coloured, "neither a grey nor one of the terminal's colours"
        terminal.press(ESCAPE)
        wait_until(terminal, lambda: "everywhere" not in terminal.text())
        terminal.press("q")
        assert terminal.ended_with() == 0


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX"}, {"LC_ALL": "", "LANG": "C"}])
def test_in_the_locale_c_every_byte_is_ascii(locale: dict[str, str], tmp_path: Path) -> None:
    """Python itself would write UTF-8."""
    with opened("pty", INCIDENTS / "skip", tmp_path, **locale) as terminal:
        assert isinstance(terminal, PseudoTerminal)
        see(terminal, "SKIPPED_COLLECTIVE")
        for number in "2345678":
            terminal.press(number)
            see(terminal, f"[{number} ")
        terminal.press("?")
        see(terminal, "everywhere")
        terminal.press(ESCAPE)
        wait_until(terminal, lambda: "everywhere" not in terminal.text())
        terminal.press("q")
        assert terminal.ended_with() == 0
        assert terminal.raw.isascii()


@pytest.mark.parametrize("name", ["dumb", "unknown"])
def test_a_terminal_without_a_cursor_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    with opened("pty", INCIDENTS / "skip", tmp_path, TERM=name) as terminal:
        assert isinstance(terminal, PseudoTerminal)
        assert terminal.ended_with() == 2
        terminal.text()
        assert b"titan-ckpt debug PATH" in terminal.raw
        assert b"--screenshot" in terminal.raw
        assert b"\x1b" not in terminal.raw


def test_a_terminal_that_says_it_is_light_gets_a_light_theme(tmp_path: Path) -> None:
    with opened("pty", INCIDENTS / "skip", tmp_path, COLORTERM="truecolor") as terminal:
        assert isinstance(terminal, PseudoTerminal)
        wait_until(terminal, lambda: b"\x1b]11;?" in terminal.raw)
        terminal.press("\x1b]11;rgb:ffff/fefe/f0f0\x1b\\\x1b[?62;22c")
        see(terminal, "SKIPPED_COLLECTIVE")
        assert b"201;219;228" in hues(terminal.raw), "the cursor's line of the light theme"
        assert "rgb:" not in terminal.text()
        terminal.press("q")
        assert terminal.ended_with() == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
def test_ctrl_z_suspends_and_the_editor_gets_the_line(tmp_path: Path) -> None:
    """In a shell: suspended and continued, then the line under the cursor goes to $EDITOR, then the screens are back."""
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho "$@" > edited\n')
    editor.chmod(0o755)
    with shell(tmp_path, EDITOR=str(editor)) as terminal:
        see(terminal, "ready$")
        terminal.press(shlex.join(tui_command(INCIDENTS / "skip")) + ENTER)
        see(terminal, "[1 Overview]")
        terminal.press("\x1a")
        see(terminal, "Stopped")
        terminal.press("clear; fg" + ENTER)
        see(terminal, "[1 Overview]")
        terminal.press("5")
        see(terminal, "[5 Logs]")
        see(terminal, "overflow on this rank")
        terminal.press("e")
        edited = tmp_path / "edited"
        wait_until(terminal, lambda: edited.exists() and edited.read_text().endswith("\n"))
        assert re.fullmatch(r"\+\d+ .*/skip/rank_2\.log\n", edited.read_text())
        terminal.press("2")
        see(terminal, "[2 Grid]")
        terminal.press("q")
        see(terminal, "ready$")


ANSWER = "\x1b]11;rgb:ffff/fefe/f0f0\x1b\\\x1b[?62;22c"


def test_keys_typed_before_the_screens_stand_are_kept(tmp_path: Path) -> None:
    """While the terminal is asked for its background: before its answer, and after it."""
    with opened("pty", INCIDENTS / "skip", tmp_path) as terminal:
        assert isinstance(terminal, PseudoTerminal)
        wait_until(terminal, lambda: b"\x1b]11;?" in terminal.raw)
        terminal.press(f"2/0-1{ANSWER},3")
        screen = see(terminal, "0-1,3")
        assert "[2 Grid]" in screen
        terminal.press(ENTER)
        assert "rgb" not in see(terminal, "filter: 0-1,3")
        terminal.press("q")
        assert terminal.ended_with() == 0


def test_an_answer_that_comes_late_is_no_command(tmp_path: Path) -> None:
    """Over a slow connection it comes while the screens stand, in pieces; a letter of another encoding ends nothing."""
    with opened("pty", INCIDENTS / "skip", tmp_path) as terminal:
        assert isinstance(terminal, PseudoTerminal)
        see(terminal, "[1 Overview]")
        for piece in ("\x1b]11;rg", "b:1e1e/2e2e/efef\x1b", "\\\x1b[?6", "2;22c"):
            terminal.press(piece)
            terminal.text()
        terminal.press_bytes(b"\xe9")
        terminal.press("2")
        screen = see(terminal, "[2 Grid]")
        assert "filter" not in screen
        assert "? help" in screen, "the prompt is closed"
        terminal.press("q")
        assert terminal.ended_with() == 0


@pytest.mark.parametrize(
    ("name", "size"), [("xterm-256color", (120, 36)), ("screen", (60, 16)), ("linux", (200, 60)), ("vt100", (40, 12))]
)
def test_nothing_is_lost_on_any_terminal(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    """Bracketed paste, a paste without brackets, a click, a wheel, other sizes; at the end the terminal is as before."""
    with opened("pty", INCIDENTS / "skip", tmp_path, TERM=name) as terminal:
        assert isinstance(terminal, PseudoTerminal)
        see(terminal, "[1 Overview]")
        terminal.press("\x1b[200~/queue\nq\n\x1b[201~")
        terminal.press("\x1b[<0;16;1M\x1b[<0;16;1m")
        see(terminal, "[2 Grid]")
        terminal.resize(20, 5)
        terminal.resize(*size)
        terminal.press("\x1b[<65;10;8M" * 3)
        terminal.press("5/queue")
        see(terminal, "[5 Logs]")
        see(terminal, "queue")
        terminal.press("\x03")
        terminal.press("6")
        see(terminal, "[6 Waits]")
        terminal.press("q")
        assert terminal.ended_with() == 0
        terminal.text()
    for mode in (b"1049", b"1000", b"2004"):
        assert terminal.raw.rfind(b"\x1b[?" + mode + b"l") > terminal.raw.rfind(b"\x1b[?" + mode + b"h"), mode
    assert b"\x1b[?25h" in terminal.raw


@pytest.mark.parametrize("name", ["linux", "xterm-16color"])
def test_a_terminal_of_16_colours_gets_its_own(name: str, tmp_path: Path) -> None:
    with opened("pty", INCIDENTS / "skip", tmp_path, TERM=name, COLORTERM="") as terminal:
        assert isinstance(terminal, PseudoTerminal)
        see(terminal, "in a collective")
        terminal.press("q")
        assert terminal.ended_with() == 0
        assert b"\x1b[1;31;49m" in terminal.raw, "the culprit's mark is red"
        assert not re.search(rb"[34]8[;:][25][;:]", terminal.raw), "no colour of 256 or of 16 million"


def test_a_copy_reaches_the_terminal_around_tmux(tmp_path: Path) -> None:
    """`y` writes OSC 52 as it is, for terminals and for a tmux that takes it, and wrapped, for one that passes it on."""
    with opened("pty", INCIDENTS / "skip", tmp_path, TMUX="/tmp/tmux-0/default,1,0") as terminal:
        assert isinstance(terminal, PseudoTerminal)
        see(terminal, "[1 Overview]")
        terminal.press("2")
        see(terminal, "by rank")
        terminal.press("y")
        see(terminal, "copied: group default_pg #7: rank 2 differs")
        terminal.press("q")
        assert terminal.ended_with() == 0
        copied = base64.b64encode(b"group default_pg #7: rank 2 differs")
        plain, wrapped = b"\x1b]52;c;%s\x07" % copied, b"\x1bPtmux;\x1b\x1b]52;c;%s\x07\x1b\\" % copied
        assert plain + wrapped in terminal.raw


@pytest.mark.skipif(not HAS_TMUX, reason="tmux is not installed")
def test_a_copy_is_in_the_buffer_of_tmux(tmp_path: Path) -> None:
    with opened("tmux", INCIDENTS / "skip", tmp_path) as terminal:
        assert isinstance(terminal, Tmux)
        terminal.run("set-option", "-s", "set-clipboard", "on")
        see(terminal, "[1 Overview]")
        terminal.press("2")
        see(terminal, "by rank")
        terminal.press("y")
        see(terminal, "copied: group")
        assert terminal.run("show-buffer") == "group default_pg #7: rank 2 differs"
        terminal.press("q")
        assert terminal.ended_with() == 0


def test_a_program_stopped_from_outside_goes_on_and_ends(tmp_path: Path) -> None:
    """`kill -STOP` and `kill -CONT`: no key goes to two readers, and no thread is left over that keeps it from ending."""
    with opened("pty", INCIDENTS / "skip", tmp_path) as terminal:
        assert isinstance(terminal, PseudoTerminal)
        see(terminal, "[1 Overview]")
        for number in (2, 3, 4):
            painted = terminal.raw.count(b"\x1b[?1049h")
            terminal.process.send_signal(signal.SIGSTOP)
            terminal.process.send_signal(signal.SIGCONT)
            wait_until(terminal, lambda painted=painted: terminal.raw.count(b"\x1b[?1049h") > painted)  # type: ignore[misc]
            terminal.press(str(number))
            see(terminal, f"[{number} ")
        terminal.press("q")
        assert terminal.ended_with() == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_ends_the_program_sets_the_terminal_back(number: signal.Signals, tmp_path: Path) -> None:
    with opened("pty", INCIDENTS / "skip", tmp_path) as terminal:
        assert isinstance(terminal, PseudoTerminal)
        see(terminal, "[1 Overview]")
        terminal.process.send_signal(number)
        wait_until(terminal, lambda: b"\x1b[?1049l" in terminal.raw)
        assert terminal.ended_with() == 130


def test_the_end_of_the_terminal_ends_the_program(tmp_path: Path) -> None:
    with opened("pty", INCIDENTS / "skip", tmp_path) as terminal:
        assert isinstance(terminal, PseudoTerminal)
        see(terminal, "[1 Overview]")
        terminal.hang_up()
        assert terminal.process.wait(10) == 130


def test_ctrl_z_stops_nothing_that_nobody_can_continue(tmp_path: Path) -> None:
    """As the only program of a container or of `ssh host titan-ckpt tui`."""
    with opened("pty", INCIDENTS / "skip", tmp_path) as terminal:
        see(terminal, "[1 Overview]")
        terminal.press("\x1a")
        see(terminal, "there is no shell to return to")
        terminal.press("q")
        assert terminal.ended_with() == 0


ANSWERS = (
    "\x1b]11;rgb:1e1e/2e2e/efef\x1b\\", "\x1b]11;rgba:ff/ff/ff/ff\x07", "\x1b[?62;22c", "\x1b[>41;379;0c", "\x1b[?1u",
    "\x1bP>|xterm(379)\x1b\\", "\x1b]52;c;cXVldWU=\x07", "\x1b_Gi=1;OK\x1b\\",
)  # fmt: skip
TYPED = (
    "q",
    "/",
    "jj",
    "\x1b[B",
    "\x1bOA",
    "\x1b[<0;12;3M",
    "\x1b[200~a\nb\x1b[201~",
    "\x1b[?2048;2$y",
    "é",
    "\r",
    "\x1b[1;5C",
)


@pytest.mark.parametrize("seed", range(40))
def test_answers_are_taken_out_and_keys_stay(seed: int) -> None:
    """Whatever comes between them, and wherever the pieces end."""
    chance = random.Random(seed)
    parts = [chance.choice(ANSWERS if chance.random() < 0.5 else TYPED) for _ in range(8)]
    sent = "".join(parts)
    sieve, found, at = Sieve(), "", 0
    while at < len(sent):
        end = at + chance.randint(1, 12)
        while sent[end - 1 : end] == "\x1b":  # Textual itself waits for what follows an escape
            end += 1
        found += sieve.passed(sent[at:end], 0.0)
        at = end
    assert found == "".join(part for part in parts if part in TYPED)


def test_a_key_that_begins_like_an_answer_is_passed_on() -> None:
    sieve = Sieve()
    assert sieve.passed("j\x1b]", 0.0) == "j"
    assert sieve.passed("", 0.5) == ""
    assert sieve.passed("", 1.5) == "\x1b]", "alt with ]"
    assert sieve.passed("k", 1.6) == "k"


def test_half_an_answer_is_no_key() -> None:
    sieve = Sieve()
    assert sieve.passed("\x1b]11;rgb:ff", 0.0) == ""
    assert sieve.passed("", 1.5) == ""
    assert sieve.passed("q", 1.6) == "q"


COPY = "\x1b]52;c;cmFuayAy\x07"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TERM": "xterm-256color"}, ""),
        ({"TERM": "screen-256color", "TMUX": "/tmp/tmux,1,0"}, "\x1bPtmux;\x1b\x1b]52;c;cmFuayAy\x07\x1b\\"),
        ({"TERM": "tmux-256color"}, "\x1bPtmux;\x1b\x1b]52;c;cmFuayAy\x07\x1b\\"),
        ({"TERM": "screen", "STY": "1.pts"}, "\x1bP\x1b]52;c;cmFuayAy\x07\x1b\\"),
    ],
)
def test_a_copy_is_wrapped_for_a_multiplexer(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TMUX", "STY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert passed_on(COPY) == expected


def test_screen_gets_a_long_copy_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops strings of more than 256 bytes."""
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.setenv("STY", "1.pts")
    copy = f"\x1b]52;c;{'QUJD' * 300}\x07"
    pieces = passed_on(copy).removeprefix("\x1bP").removesuffix("\x1b\\").split("\x1b\\\x1bP")
    assert "".join(pieces) == copy
    assert max(map(len, pieces)) < 250
