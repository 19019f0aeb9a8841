"""What an earlier process of the same rank left in the recorder's folder: moved aside, so that attempts stay apart.

A job that is restarted uses its folder again. Its files go to `earlier/0001`, those of the next attempt to `earlier/0002`: each
rank moves its own, so that the numbers agree where every attempt has every rank.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from titan_ckpt.debug.incident.attempts import EARLIER
from titan_ckpt.errors import TitanError
from titan_ckpt.private_files import PrivateFolder

log = logging.getLogger(__name__)

MOST_ATTEMPTS = 100  # the last place is then used again


def set_aside(folder: Path, stem: str) -> None:
    """Move the files `stem.*` of this user in `folder` to the first attempt that has none of this rank."""
    try:
        left = [name for name in os.listdir(folder) if name.startswith(f"{stem}.")] if folder.is_dir() else []
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
