"""Make text harmless for a terminal: names, log lines and error texts may contain what a terminal obeys."""

from __future__ import annotations

import re

# Controls of ECMA-48 (C0, DEL, C1), directional formatting of Unicode UAX 9, line and paragraph separators, characters without
# width, interlinear annotations, tags, and lone surrogates, which cannot be encoded. Joiners (200C, 200D) are part of words.
_UNSAFE = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    r"\U000e0000-\U000e0fff"
)
_IN_TEXT = re.compile(f"[{_UNSAFE}]")
_IN_LINE = re.compile(f"[\t\n{_UNSAFE}]")


def escape_text(text: str) -> str:
    r"""`text` with unsafe characters as Python writes them; line ends and tabs stay.

    >>> print(escape_text("a\x1b]0;title\x07b"))
    a\x1b]0;title\x07b
    """
    return _IN_TEXT.sub(_escaped, text)


def escape_line(text: str) -> str:
    r"""`text` as one line: line ends and tabs are escaped, too, so that a name cannot look like a line of ours.

    >>> print(escape_line("weight\nstep 3: whole"))
    weight\nstep 3: whole
    """
    return _IN_LINE.sub(_escaped, text)


_SHORT = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}


def _escaped(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
