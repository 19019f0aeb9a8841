"""One screen as SVG, without a terminal: what `make demo` and the documentation show."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from textual.pilot import Pilot

from titan_ckpt.tui.app import TitanApp

_FONT_FACES = re.compile(r"@font-face\s*\{[^}]*\}")
_POLL_S, _HOPS = 0.02, 5


def write_screenshot(app: TitanApp, path: str, *, width: int, height: int, keys: tuple[str, ...] = ()) -> None:
    """Run `app` headless until everything is read, press `keys`, and write the screen to `path`."""
    svg = asyncio.run(_take(app, (width, height), keys))
    Path(path).write_text(svg, encoding="utf-8")


async def _take(app: TitanApp, size: tuple[int, int], keys: tuple[str, ...]) -> str:
    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        for key in keys:
            await pilot.press(key)
            await settled(app, pilot)
        # The template names fonts on a public server; a file that shows the same offline has no need of them.
        return _FONT_FACES.sub("", app.export_screenshot(title="titan-ckpt tui"))


async def settled(app: TitanApp, pilot: Pilot[None]) -> None:
    """Wait until nothing is being read or computed, and all of it is painted."""
    await _rested(pilot)
    has_waited = False
    while not app.is_settled:
        await asyncio.sleep(_POLL_S)
        has_waited = True
    if has_waited:
        await _rested(pilot)


async def _rested(pilot: Pilot[None]) -> None:
    """Wait for every widget's messages and for those that they lead to (a key, a layout, a size, rows): on a machine that others
    load, a processor that looks idle, which is all that one pause waits for, says little."""
    for _ in range(_HOPS):
        await pilot.pause(0)
    await pilot.pause()
