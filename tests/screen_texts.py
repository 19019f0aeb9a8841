"""What every screen shows of every recorded incident, as text: `python -m tests.screen_texts` writes it to tests/data/screens.

Each file is one incident at one size of terminal; its parts are the keys that were pressed and the screen after them. Times are
those of the recordings, and the clock is fixed, so that the same program writes the same files.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from pathlib import Path

from textual.pilot import Pilot

from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data_content import find_content
from titan_ckpt.tui.screenshot import settled

DATA = Path(__file__).parent / "data"
SCREENS = DATA / "screens"
SIZES = ((80, 24), (140, 45))
CLOCK_S = 1_795_250_000.0
INCIDENT_KEYS = ("1", "2 n n", "3 n", "d", "escape 4", "5 c", "6")
RUN_KEYS = ("1", "2", "4", "5", "7", "8", "G", "question_mark")
COMMAND = "python -m tests.screen_texts"


def cases() -> dict[str, tuple[Path, tuple[str, ...]]]:
    """(where it is, keys to press) by name: the recordings of hung jobs, the injected faults, a run."""
    folders = [*sorted((DATA / "flight_recorder").iterdir()), *sorted((DATA / "injected").iterdir())]
    found = {f"{path.parent.name}-{path.name}": (path, INCIDENT_KEYS) for path in folders if path.is_dir()}
    return {**found, "run": (DATA / "run", RUN_KEYS)}


def golden(name: str, size: tuple[int, int]) -> Path:
    """The file of a case at a size."""
    return SCREENS / f"{name}-{size[0]}x{size[1]}.txt"


def screen_text(app: TitanApp) -> str:
    """The terminal's cells without their colours; many empty lines as one."""
    text = "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())
    return re.sub(r"\n{4,}", lambda lines: f"\n({len(lines.group()) - 1} empty lines)\n", text)


def texts_of(name: str) -> dict[tuple[int, int], str]:
    """The text of a case at each size."""
    path, steps = cases()[name]
    with contextlib.chdir(path.parent):
        return asyncio.run(_texts(path.name, steps))


async def _texts(url: str, steps: tuple[str, ...]) -> dict[tuple[int, int], str]:
    return {size: await _text_at(url, steps, size) for size in SIZES}


async def _text_at(url: str, steps: tuple[str, ...], size: tuple[int, int]) -> str:
    app, parts = TitanApp(find_content(url), clock=lambda: CLOCK_S), []
    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        for step in steps:
            await press(app, pilot, step)
            parts.append(f"=== {step} ===\n{screen_text(app).rstrip()}\n")
    return "".join(parts)


async def press(app: TitanApp, pilot: Pilot[None], keys: str) -> None:
    """Press keys, and wait for what they lead to."""
    for key in keys.split():
        app.simulate_key(key)
    await settled(app, pilot)


def difference(before: str, now: str) -> list[str]:
    """The lines that have changed, in words."""
    old, new = _parts(before), _parts(now)
    found = [f"after the keys {keys!r}: a screen that there is no text of" for keys in new if keys not in old]
    found += [f"after the keys {keys!r}: this screen is no longer shown" for keys in old if keys not in new]
    for keys in old.keys() & new.keys():
        length = max(len(old[keys]), len(new[keys]))
        lines = [(part + [""] * length)[:length] for part in (old[keys], new[keys])]
        found += [
            f"after the keys {keys!r}, line {number}:\n    was: {a}\n    now: {b}"
            for number, (a, b) in enumerate(zip(*lines, strict=True), 1)
            if a != b
        ]
    return found


def _parts(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("=== ") and line.endswith(" ==="):
            lines = found[line[4:-4]] = []
        else:
            lines.append(line)
    return found


def main() -> int:
    """Write the texts of all cases, or of those named."""
    SCREENS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or cases():
        for size, text in texts_of(name).items():
            golden(name, size).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
