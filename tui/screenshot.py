"""Write one screen as SVG without a terminal, for `make demo` and the documentation."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Sequence

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from textual.pilot import Pilot

from titan_ckpt.console.picture import check_picture, check_svg, write_picture
from titan_ckpt.tui.app import TitanApp

_FONT_FACES = re.compile(r"@font-face\s*\{[^}]*\}")
_POLL_S, _HOPS = 0.02, 5


def write_screenshot(
    app: TitanApp, path: str, *, width: int, height: int, keys: tuple[str, ...] = (), is_forced: bool = False
) -> None:
    """Run `app` headless, press `keys` once everything is loaded, and write the screen to `path`.

    Another program's file at `path` is replaced only if `is_forced`."""
    check_svg(path)
    check_picture(path, is_forced=is_forced)
    write_picture(path, take_screens(app, (width, height), [keys])[0], is_forced=is_forced)


def take_screens(app: TitanApp, size: tuple[int, int], steps: Sequence[Sequence[str]]) -> list[str]:
    """Run `app` headless; after the keys of each step its screen as SVG."""
    return asyncio.run(_take(app, size, steps))


async def _take(app: TitanApp, size: tuple[int, int], steps: Sequence[Sequence[str]]) -> list[str]:
    found = []
    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        for keys in steps:
            for key in keys:
                await pilot.press(key)
                await settled(app, pilot)
            # The template links fonts on a public server; the file must look the same offline. librsvg drops blanks else.
            svg = _FONT_FACES.sub("", _export(app, size))
            found.append(svg.replace("<svg ", '<svg xml:space="preserve" ', 1))
    return found


def _export(app: TitanApp, size: tuple[int, int]) -> str:
    """The screen as SVG. Textual draws a terminal's own colours as those of a dark one; a light theme gets a light one's."""
    theme, title = app.current_theme, "titan-ckpt tui"
    if theme.dark or not (theme.ansi or app.no_color):
        return app.export_screenshot(title=title)
    console = Console(
        width=size[0], height=size[1], file=io.StringIO(), force_terminal=True, color_system="truecolor", record=True,
        legacy_windows=False, safe_box=False,
    )  # fmt: skip
    console.print(app.screen._compositor.render_update(full=True))  # as Textual's own export does
    return console.export_svg(title=title, theme=DEFAULT_TERMINAL_THEME)


async def settled(app: TitanApp, pilot: Pilot[None]) -> None:
    """Wait until all loading and computing is done and painted, or the program has ended by an error."""
    await _drained(pilot)
    has_waited = False
    while app.is_running and not app.is_settled:
        await asyncio.sleep(_POLL_S)
        has_waited = True
    if has_waited:
        await _drained(pilot)


async def _drained(pilot: Pilot[None]) -> None:
    """Wait for every widget's messages and for the messages these cause (a key, a layout, a size, rows).

    One pause only waits for an idle processor, which proves little on a loaded machine.
    """
    for _ in range(_HOPS):
        await pilot.pause(0)
    await pilot.pause()
