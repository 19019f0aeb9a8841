"""Pictures of every screen of every recorded incident: `python -m tests.support.screen_pictures` writes tests/data/screens.

Each file is an SVG sheet of one incident at one terminal size, with a screen per step. Recordings carry their own times and
the clock is fixed, so the output is reproducible.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import RenderableType
from textual._compositor import Compositor
from textual.pilot import Pilot
from textual.screen import Screen
from textual.strip import Strip

from tests.support.screen_svg import sheet
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.screenshot import settled
from tools.paths import DATA, INCIDENTS

SCREENS = DATA / "screens"
SIZES = ((80, 24), (140, 45))
CLOCK_S = 1_795_250_000.0
INCIDENT_KEYS = ("1", "2 n n", "3 n", "d", "escape 4", "5 c", "6")
RUN_KEYS = ("1", "2", "4", "5", "7", "8", "G", "question_mark")
CHECKPOINT_KEYS = (
    "7", "enter", "j j j j enter", "escape escape space j d", "escape r", "d p _ s h a r d = 4 enter", "escape p",
    "1 enter",
)  # fmt: skip
COMMAND = "python -m tests.support.screen_pictures"
PAINT = Compositor.render_update


def picture_cases() -> dict[str, tuple[Path, tuple[str, ...]]]:
    """(path, keys to press) by name: recordings of hung jobs, injected faults, a run, checkpoints."""
    folders = [*sorted(INCIDENTS.iterdir()), *sorted((DATA / "injected").iterdir())]
    found = {f"{path.parent.name}-{path.name}": (path, INCIDENT_KEYS) for path in folders if path.is_dir()}
    return {**found, "run": (DATA / "run", RUN_KEYS), "checkpoints": (DATA / "golden" / "v1", CHECKPOINT_KEYS)}


def golden(name: str, size: tuple[int, int]) -> Path:
    """Path of the picture of a case at a size."""
    return SCREENS / f"{name}-{size[0]}x{size[1]}.svg"


def strips_of(app: TitanApp) -> list[Strip]:
    """The painted lines of the terminal."""
    return list(app.screen._compositor.render_strips())


def screen_text(app: TitanApp) -> str:
    """The text on the terminal."""
    return "\n".join(strip.text.rstrip() for strip in strips_of(app))


def pictures_of(name: str) -> dict[tuple[int, int], str]:
    """Sheets of a case by size."""
    path, steps = picture_cases()[name]
    coloured = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    unpainted = patch.object(Compositor, "render_update", _paint_dialogs_alone)
    with contextlib.chdir(path.parent), patch.dict(os.environ, coloured, clear=True), unpainted:
        return {size: asyncio.run(_picture(path.name, steps, size)) for size in SIZES}


def _paint_dialogs_alone(compositor: Compositor, *, screen_stack: list[Screen[Any]]) -> RenderableType | None:
    """What a terminal would be sent after each change takes long, and pictures are rendered whole, from the widgets.

    Not what lies below a dialog: that is rendered here alone.
    """
    if screen_stack:
        return PAINT(compositor, screen_stack=screen_stack)
    compositor._dirty_regions.clear()
    return None


async def _picture(url: str, steps: tuple[str, ...], size: tuple[int, int]) -> str:
    app, screens = TitanApp(find_content(url), clock=lambda: CLOCK_S), {}
    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        for step in steps:
            await press(app, pilot, step)
            screens[step] = strips_of(app)
    return sheet(screens, size)


async def press(app: TitanApp, pilot: Pilot[None], keys: str) -> None:
    """Press keys and wait for their effects."""
    for key in keys.split():
        app.simulate_key(key)
    await settled(app, pilot)


def main() -> int:
    """Write the pictures of all cases, or of the named ones."""
    SCREENS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or picture_cases():
        for size, svg in pictures_of(name).items():
            golden(name, size).write_text(svg, encoding="utf-8")
        sys.stdout.write(f"{name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
