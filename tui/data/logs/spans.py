"""Whether bytes of a log may hold a secret of several lines, such as a private key. Pure."""

from __future__ import annotations

import re

# In place of one pattern that ignores case: a search for a literal takes a tenth of its time.
_LITERALS = (
    b"private key", b"private-lines", b'"""', b"'''", b"machine ", b"machine\t", b"password ", b"password\t",
)  # fmt: skip
_NAMED = tuple(re.compile(word + rb"[\"']?[ \t]?[:=]") for word in (b"name", b"value"))
_OPEN = re.compile(rb"[:=][^\n\w]{0,12}\r?\n")  # the value is on the next line
_KEY = re.compile(rb"(?:pass[a-z]{0,10}|secrets?|tokens?|keys?|auth[a-z]{0,10}|cred[a-z]{0,10}|data)[\"']?[ \t]?\Z")
_LONGEST_KEY = 16


def may_span(data: bytes) -> bool:
    """Whether a key of several lines, a list, a YAML block or a string of several lines may be in it."""
    low = data.lower()
    if any(word in low for word in _LITERALS) or any(named.search(low) for named in _NAMED):
        return True
    found = _OPEN.search(low)
    while found is not None:
        at = found.start()
        if _KEY.search(low, max(at - _LONGEST_KEY, 0), at):
            return True
        found = _OPEN.search(low, at + 1)
    return False
