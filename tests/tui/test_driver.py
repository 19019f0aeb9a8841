"""What a terminal sends that nobody typed: answers, in one piece or several, late or never."""

from __future__ import annotations

import random

import pytest

from titan_ckpt.tui.driver import Sieve, passed_on

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
