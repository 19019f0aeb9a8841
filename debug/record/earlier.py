"""What an earlier recorder of the same rank left in its folder: moved aside, so that attempts stay apart.

A job that is restarted uses its folder again. The recorder's files go to `earlier/0001`, those of the next attempt to
`earlier/0002`: each rank moves its own, so that the numbers agree where every attempt has every rank. What else lies there, as a
program's own log that is open or appended to, stays.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from titan_ckpt.debug.incident.attempts import EARLIER
from titan_ckpt.errors import TitanError
from titan_ckpt.private_files import PrivateFolder

log = logging.getLogger(__name__)

MOST_ATTEMPTS = 100  # the last place is then used again
# Behind the stem: what `debug.record.recorder` writes.
_OWN = re.compile(r"\.(?:box|sock|ask|sidecar\.json|error\.json|[\w-]{1,80}\.(?:pickle|stacks))")


def set_aside(folder: Path, stem: str) -> None:
    """Move the recorder's files `stem.*` of this user in `folder` to the first attempt that has none of this rank."""
    try:
        names = os.listdir(folder) if folder.is_dir() else []
        left = [name for name in names if name.startswith(stem) and _OWN.fullmatch(name, len(stem))]
        if not any(name.endswith((".box", ".sidecar.json")) for name in left):
            return
        files = PrivateFolder(folder)
        history = files.inside(EARLIER)
        for number in range(1, MOST_ATTEMPTS + 1):
            place = history.inside(f"{number:04d}")
            if not any(name.startswith(f"{stem}.") for name in os.listdir(place.path)):
                break
        for name in left:
            files.move(name, place)
    except (OSError, TitanError) as error:
        log.warning("what an earlier attempt left of %s stays where it is: %s", folder / stem, error)
