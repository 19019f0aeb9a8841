"""Write the screenshots of the documentation: `python -m scripts.screenshots`.

They show the recorded incidents and the run that the tests use, with a fixed clock.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screenshot import write_screenshot
from tools.paths import DATA, DOCS, ROOT

CLOCK_S = 1_795_250_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A screen of a recording after `keys` were pressed."""

    name: str
    case: str
    keys: tuple[str, ...]
    height: int = 24


PICTURES = (
    Picture(name="overview", case="flight_recorder/skip", keys=()),
    Picture(name="grid", case="flight_recorder/skip", keys=("2", "n"), height=12),
    Picture(name="collective", case="flight_recorder/skip", keys=("enter",)),
    Picture(name="difference", case="flight_recorder/skip", keys=("enter", "d"), height=34),
    Picture(name="logs", case="flight_recorder/exception", keys=("5", "c"), height=16),
    Picture(name="checkpoints", case="run", keys=("7",), height=14),
    Picture(name="cut", case="golden/v1", keys=("7", "enter", "j", "j", "j", "j", "enter"), height=11),
    Picture(name="plan", case="golden/v1", keys=("7", "r", *"dp_shard=4", "enter"), height=14),
    Picture(name="training_screen", case="run", keys=("8",)),
)


def main() -> int:
    """Write all pictures into docs/images."""
    folder = DOCS / "images"
    folder.mkdir(exist_ok=True)
    for picture in PICTURES:
        path = DATA / picture.case
        with contextlib.chdir(path.parent):
            _take(path.name, folder / f"{picture.name}.svg", picture.keys, picture.height)
    return 0


def _take(url: str, path: Path, keys: tuple[str, ...], height: int) -> None:
    app = TitanApp(find_content(url), clock=lambda: CLOCK_S)
    write_screenshot(app, str(path), width=100, height=height, keys=keys, is_forced=True)
    sys.stdout.write(f"{path.relative_to(ROOT)} {path.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    sys.exit(main())
