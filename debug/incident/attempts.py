"""The attempts of a job that was started again with the same folder."""

from __future__ import annotations

import re
from collections.abc import Iterable

EARLIER = "earlier"
_EARLIER = re.compile(rf"(?:^|(.*)/){EARLIER}/(\d{{4}})(?:/|$)")


def earlier_attempt(path: str) -> str | None:
    """The folder of the earlier attempt that a file belongs to (the path up to it); None for a file of the newest.

    >>> earlier_attempt("rec/earlier/0002/rank_00001.box")
    'rec/earlier/0002'
    """
    found = _EARLIER.match(path)
    return path[: found.end()].rstrip("/") if found else None


def earlier_attempts(paths: Iterable[str]) -> list[str]:
    """The folders of all earlier attempts, oldest first."""
    found = {folder for path in paths if (folder := earlier_attempt(path)) is not None}
    return sorted(found, key=lambda folder: folder.rpartition("/")[::-1])
