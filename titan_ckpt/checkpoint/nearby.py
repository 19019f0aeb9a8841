"""What a mistyped URL of a run probably meant."""

from __future__ import annotations

import os
import re
from itertools import islice

from titan_ckpt.arguments import nearest
from titan_ckpt.location import local_path, redact, scheme

MOST_NAMES = 10_000


def nearby(url: str) -> str:
    """`; did you mean ...?` for the URL of a run that is not there; "" if nothing is like it. Lists local folders alone."""
    if (match := re.search(r"@([^@/]+)\Z", url)) is not None:
        return f"; {redact(match[1])!r} is no step: write a number, {redact(url[: match.start()])}@1200, or @latest"
    path = local_path(url)
    if scheme(url) != "file":
        return ""
    if os.path.isfile(path):
        return "; it is a file, and a run is a folder"
    if os.path.exists(path):
        return ""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MOST_NAMES) if entry.is_dir()]
    except OSError:
        return "" if os.path.isdir(folder) else f"; there is no folder {folder}"
    return f"; {found}".rstrip() if (found := nearest(name, names)) else ""
