"""Pasted text that holds escapes, such as coloured log lines: nothing of it is a command."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.screen_terminal import opened, see
from titan_ckpt.tui.driver import Pastes
from tools.paths import INCIDENTS

START, END = "\x1b[200~", "\x1b[201~"
COLOURED = "log: \x1b[31mERROR\x1b[0m x\r\rfoo\x1b]0;name\x1b"


@pytest.mark.parametrize("seed", range(20))
def test_only_text_is_left_of_a_paste(seed: int) -> None:
    chance = random.Random(seed)
    sent = f"jk{START}{COLOURED}{END}q{START}{END}\x1b[A{START}plain{END}"
    pastes, found, at = Pastes(), "", 0
    while at < len(sent):
        size = chance.randint(1, 9)
        found += pastes.passed(sent[at : at + size])
        at += size
    bare = COLOURED.replace("\x1b", "")
    assert found == f"jk{START}{bare}{END}q{START}{END}\x1b[A{START}plain{END}"


def test_an_escape_is_a_key_once_nothing_follows() -> None:
    pastes = Pastes()
    assert [pastes.passed(text) for text in ("j\x1b", "", "\x1b", "[B")] == ["j", "\x1b", "", "\x1b[B"]
    assert [pastes.passed(text) for text in ("\x1b[2", "")] == ["", "\x1b[2"]


def test_a_paste_without_an_end_stays_a_paste() -> None:
    pastes = Pastes()
    assert [pastes.passed(text) for text in (f"{START}a\x1b", "", "[31mq", END, "q")] == [
        f"{START}a",
        "",
        "[31mq",
        END,
        "q",
    ]


@pytest.mark.repeats
def test_a_paste_with_colours_runs_nothing(tmp_path: Path) -> None:
    with opened("pty", INCIDENTS / "skip", tmp_path) as terminal:
        see(terminal, "SKIPPED_COLLECTIVE")
        terminal.press(f"{START}{COLOURED}xq{END}")
        terminal.press("?")
        see(terminal, "double click")
        assert not list(tmp_path.glob("*.html"))
