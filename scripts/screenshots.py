"""The pictures of the screens in the documentation: `python scripts/screenshots.py`.

All are of real data: the recordings of hung jobs that the tests use. The clock is fixed.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data_content import find_content
from titan_ckpt.tui.screenshot import write_screenshot

ROOT = Path(__file__).parent.parent
INCIDENTS = ROOT / "tests" / "data" / "flight_recorder"
CLOCK_S = 1_795_240_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A screen of an incident after some keys."""

    name: str
    case: str
    keys: tuple[str, ...]
    height: int = 24


PICTURES = (
    Picture(name="overview", case="skip", keys=()),
    Picture(name="grid", case="skip", keys=("2", "n", "n"), height=12),
    Picture(name="collective", case="skip", keys=("enter",)),
    Picture(name="logs", case="exception", keys=("5", "c"), height=16),
)


def main() -> int:
    """Write all pictures into docs/images."""
    folder = ROOT / "docs" / "images"
    folder.mkdir(exist_ok=True)
    for picture in PICTURES:
        with contextlib.chdir(INCIDENTS):
            _take(picture.case, folder / f"{picture.name}.svg", picture.keys, picture.height)
    return 0


def _take(url: str, path: Path, keys: tuple[str, ...], height: int) -> None:
    app = TitanApp(find_content(url), clock=lambda: CLOCK_S)
    write_screenshot(app, str(path), width=100, height=height, keys=keys)
    sys.stdout.write(f"{path.relative_to(ROOT)} {path.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    sys.exit(main())
