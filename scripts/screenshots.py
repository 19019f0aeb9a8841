"""Write the pictures of the documentation, dark and light, and the recording of the README: `python -m scripts.screenshots`.

They show the recorded incidents and the run that the tests use, with a fixed clock. `--gallery FOLDER` writes every screen of
every recording at four sizes instead, with a page that shows them all (`make screens`).
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screenshot import take_screens
from tools.paths import DATA, DOCS, INCIDENTS, ROOT

CLOCK_S = 1_795_250_000.0
THEMES = {"": "titan-dark", "-light": "titan-light"}
GALLERY_SIZES = ((40, 12), (80, 24), (120, 36), (200, 60))
RECORDING = (("", ()), ("the grid", ("2", "n")), ("the operation", ("enter",)), ("two ranks side by side", ("d",)),
             ("the waits", ("escape", "6")), ("the logs", ("5",)))  # fmt: skip
FRAME_S = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A screen of a recording after `keys` were pressed."""

    name: str
    case: str
    keys: tuple[str, ...]
    size: tuple[int, int] = (120, 36)


PICTURES = (
    Picture(name="overview", case="flight_recorder/skip", keys=()),
    Picture(name="grid", case="flight_recorder/skip", keys=("2", "n"), size=(120, 24)),
    Picture(name="timeline", case="injected/gil_held", keys=("2", "t"), size=(120, 24)),
    Picture(name="collective", case="flight_recorder/skip", keys=("enter",)),
    Picture(name="difference", case="flight_recorder/skip", keys=("enter", "d"), size=(100, 34)),
    Picture(name="logs", case="flight_recorder/exception", keys=("5", "c")),
    Picture(name="checkpoints", case="run", keys=("7", "j", "j", "j", "j", "j")),
    Picture(name="cut", case="golden/v1", keys=("7", "enter", "j", "j", "j", "j"), size=(120, 24)),
    Picture(name="plan", case="golden/v1", keys=("7", "r", *"dp_shard=4", "enter"), size=(100, 14)),
    Picture(name="training_screen", case="run", keys=("8",)),
)


def main() -> int:
    """Write the pictures into docs/images, or the gallery."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gallery", type=Path, metavar="FOLDER", help="write every screen of every recording there")
    given = parser.parse_args()
    if given.gallery is not None:
        write_gallery(given.gallery.absolute())
        return 0
    folder = DOCS / "images"
    for ending, theme in THEMES.items():
        for picture in PICTURES:
            (svg,) = screens_of(DATA / picture.case, picture.size, theme, [picture.keys])
            _write(folder / f"{picture.name}{ending}.svg", svg)
        frames = screens_of(INCIDENTS / "skip", (110, 30), theme, [keys for _, keys in RECORDING])
        _write(folder / f"session{ending}.svg", animation(frames))
    return 0


def screens_of(path: Path, size: tuple[int, int], theme: str, steps: Sequence[Sequence[str]]) -> list[str]:
    """The screens of a recording after each step."""
    with contextlib.chdir(path.parent):
        app = TitanApp(find_content(path.name), clock=lambda: CLOCK_S, theme=theme)
        return take_screens(app, size, steps)


def animation(frames: Sequence[str]) -> str:
    """One SVG that shows each frame for some seconds, without scripts."""
    box = re.search(r'viewBox="([^"]*)"', frames[0])
    assert box is not None
    total, share = FRAME_S * len(frames), 100 / len(frames)
    style = (
        f".frame{{opacity:0;animation:shown {total}s step-end infinite}}@keyframes shown{{0%{{opacity:1}}"
        f"{share:.3f}%{{opacity:0}}100%{{opacity:0}}}}"
    )
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box[1]}">', f"<style>{style}</style>"]
    for number, frame in enumerate(frames):
        parts.append(f'<g class="frame" style="animation-delay:{number * FRAME_S - total}s">{frame}</g>')
    return "\n".join([*parts, "</svg>\n"])


def write_gallery(folder: Path) -> None:
    """A folder of SVG files, and index.html."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = [*sorted(INCIDENTS.iterdir()), *sorted((DATA / "injected").iterdir()), DATA / "run", DATA / "golden" / "v1"]
    page = ["<!doctype html><title>screens</title><style>body{background:#444;color:#eee}img{max-width:48%}</style>"]
    for path in (path for path in cases if path.is_dir()):
        page.append(f"<h2>{path.name}</h2>")
        for columns, lines in GALLERY_SIZES:
            for ending, theme in THEMES.items():
                svgs = screens_of(path, (columns, lines), theme, [(number,) for number in "12345678"])
                for number, svg in enumerate(svgs, 1):
                    name = f"{path.name}-{number}-{columns}x{lines}{ending}.svg"
                    (folder / name).write_text(svg, encoding="utf-8")
                    page.append(f'<img src="{name}" alt="{name}" loading="lazy">')
        sys.stdout.write(f"{path.name}\n")
    (folder / "index.html").write_text("\n".join(page), encoding="utf-8")


def _write(path: Path, svg: str) -> None:
    path.write_text(svg, encoding="utf-8")
    sys.stdout.write(f"{path.relative_to(ROOT)} {path.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    sys.exit(main())
