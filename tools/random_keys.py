"""Random keys, sizes and typed words on the screens over recorded incidents, runs and checkpoints: no key may end the program.

`python -m tools.random_keys FOLDER ... --seconds 600 --seed 1`: each folder, or each folder in it, is copied first, as keys
may save, export or prune.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from textual._compositor import Compositor

from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screenshot import settled
from tools.paths import DATA, INCIDENTS

SIZES = ((20, 5), (40, 12), (80, 24), (120, 36), (200, 60))
# All that a screen binds, but for what ends or stops the program.
KEYS = (
    *"12345678jkhlgGnNtvVodcwysirpfxez", "plus", "minus", "less_than_sign", "greater_than_sign", "left_square_bracket",
    "right_square_bracket", "left_curly_bracket", "right_curly_bracket", "space", "enter", "escape", "tab", "shift+tab", "up",
    "down", "left", "right", "home", "end", "pageup", "pagedown", "ctrl+d", "ctrl+u", "ctrl+p", "question_mark", "slash", "colon",
)  # fmt: skip
_WORDS = ("0-2", "loss", "3", "rank 1", "step 2", "#7", "14:05", "zzz", "fsdp=2", "")
_RESIZES, _WORDED, _CONFIRMED = 0.04, 0.15, 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A session that an error ended: what was open, at which size, the keys so far."""

    folder: str
    size: tuple[int, int]
    keys: tuple[str, ...]
    error: BaseException


def recordings() -> list[Path]:
    """The recordings that are part of the project."""
    return [*_folders(INCIDENTS), *_folders(DATA / "injected"), DATA / "run", DATA / "golden" / "v1"]


def _folders(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir()]


def session(folder: Path, rng: random.Random, num_keys: int) -> Failure | None:
    """Press random keys on a copy of a folder; the failure, if there is one."""
    size, pressed = rng.choice(SIZES), list[str]()
    unpainted = patch.object(Compositor, "render_update", lambda compositor, **_: compositor._dirty_regions.clear())
    environment = patch.dict(os.environ, {"EDITOR": "true", "VISUAL": "true"})
    with tempfile.TemporaryDirectory() as there, unpainted, environment:
        shutil.copytree(folder, Path(there) / folder.name)
        with contextlib.chdir(there):
            try:
                asyncio.run(_press(TitanApp(find_content(folder.name)), size, _random_keys(rng, num_keys), pressed))
            except Exception as error:  # noqa: BLE001 (whatever ends it is what is looked for)
                return Failure(folder=str(folder), size=size, keys=tuple(pressed), error=error)
    return None


def _random_keys(rng: random.Random, number: int) -> Iterator[str | tuple[int, int]]:
    """Keys; now and then a word with a prompt before it, and a size of the terminal."""
    for _ in range(number):
        if rng.random() < _RESIZES:
            yield rng.choice(SIZES)
        if rng.random() >= _WORDED:
            yield rng.choice(KEYS)
            continue
        yield rng.choice(("slash", "colon", "t", "r", "p", "o", "x"))
        yield from rng.choice(_WORDS)
        yield "enter" if rng.random() < _CONFIRMED else "escape"


async def _press(
    app: TitanApp, size: tuple[int, int], keys: Iterable[str | tuple[int, int]], pressed: list[str]
) -> None:
    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        for key in keys:
            if not app.is_running:
                return
            pressed.append(str(key))
            if isinstance(key, str):
                app.simulate_key(key)
            else:
                await pilot.resize_terminal(*key)
            await settled(app, pilot)


def main() -> int:
    """Run sessions for some time; the exit code is 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="random_keys", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rng, end, number = random.Random(given.seed), time.monotonic() + given.seconds, 0
    found: dict[str, Failure] = {}
    folders = [path for folder in given.folders for path in _folders(folder)] or recordings()
    while time.monotonic() < end:
        failure, number = session(rng.choice(folders), rng, 60), number + 1
        if failure is not None and found.setdefault(repr(failure.error), failure) is failure:
            sys.stdout.write(f"{failure.folder} at {failure.size}: {' '.join(failure.keys[-12:])}\n")
            traceback.print_exception(failure.error, limit=-4, file=sys.stdout)
    sys.stdout.write(f"{number} sessions, {len(found)} kinds of failure\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
