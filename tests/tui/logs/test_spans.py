"""The quick search for secrets of several lines finds what one pattern, which says what they are, finds."""

from __future__ import annotations

import random
import re

import pytest

from titan_ckpt.tui.data.logs.spans import may_span

PATTERN = re.compile(
    rb"PRIVATE KEY|Private-Lines|(?:pass[a-z]{0,10}|secrets?|tokens?|keys?|auth[a-z]{0,10}|cred[a-z]{0,10}|data)"
    rb"[\"']?[ \t]?[:=][^\n\w]{0,12}\r?\n|(?:name|value)[\"']?[ \t]?[:=]|(?:machine|password)[ \t]|\"{3}|'{3}",
    re.IGNORECASE,
)
WORDS = b"pass password passphraseses secret secrets token Tokens key KEYS auth authorisation cred data name Value machine x"
MARKS = (
    b" ",
    b"\t",
    b":",
    b"=",
    b'"',
    b"'",
    b"\n",
    b"\r\n",
    b"- ",
    b"PRIVATE KEY",
    b"loss=1.0",
    b">",
    b"|",
    b"{",
    b"abc",
)
PARTS = (*WORDS.split(), *MARKS)


@pytest.mark.parametrize("seed", range(10))
def test_it_finds_what_the_pattern_finds(seed: int) -> None:
    chance, found = random.Random(seed), set()
    for _ in range(2000):
        data = b"".join(chance.choice(PARTS) for _ in range(chance.randint(1, 12)))
        assert may_span(data) == (PATTERN.search(data) is not None), data
        found.add(may_span(data))
    assert found == {True, False}
