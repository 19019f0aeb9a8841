"""`titan-ckpt tui [PATH]`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import re
import signal
import string
import sys
from collections.abc import Iterator

from textual.keys import Keys, _character_to_key

from titan_ckpt.console.command import Command, Parser
from titan_ckpt.console.output import write_text
from titan_ckpt.console.picture import add_force_flag
from titan_ckpt.errors import UsageError
from titan_ckpt.tui import tasks
from titan_ckpt.tui.app import INTERRUPTED, TitanApp
from titan_ckpt.tui.data.content import Content, opened
from titan_ckpt.tui.driver import driver_after
from titan_ckpt.tui.screenshot import write_screenshot
from titan_ckpt.tui.terminal import UNUSABLE, ask_background, fitting_theme
from titan_ckpt.tui.themes import DARK, SHORT, THEMES, theme_name

_EPILOG = """\
examples:
  titan-ckpt tui s3://bucket/run             a run: its checkpoints, logs, metrics and newest incident
  titan-ckpt tui s3://bucket                 a folder of runs: choose one
  titan-ckpt tui ./debug/2026-11-21          one incident
  titan-ckpt tui RUN --screenshot out.svg    save the first screen as SVG; needs no terminal

Keys: 1-8 screens, ? help, q quit. For the diagnosis as plain text: titan-ckpt debug PATH
exit codes: 0 fine, 2 usage, 3 nothing to show at PATH
"""


def configure(parser: Parser) -> None:
    """Add PATH and the options of the first screen and the screenshot."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "path", metavar="PATH", nargs="?", default=".", help="a run, an incident, a folder or archive of dumps or logs"
    )
    parser.add_argument(
        "--screen", type=int, choices=range(1, 9), default=0, metavar="1-8", help="first screen to show"
    )
    parser.add_argument("--screenshot", metavar="FILE.svg", help="write the screen as SVG and exit")
    add_force_flag(parser)
    parser.add_argument(
        "--size", type=parse_screen_size, default=(80, 24), metavar="80x24", help="size of the screenshot"
    )
    parser.add_argument(
        "--keys", type=parse_keys, default=(), metavar="K,K",
        help="keys to press before the screenshot, for example 2,n,enter",
    )  # fmt: skip
    parser.add_argument(
        "--theme", type=theme_name, choices=(*SHORT, *THEMES), metavar="NAME",
        help=f"colours: {', '.join(SHORT)} or a theme of Textual, such as nord (default: what fits the terminal; "
        "dark for a screenshot)",
    )  # fmt: skip
    for option in ("--force", "--size", "--keys"):
        parser.needs(option, "--screenshot")


def parse_keys(text: str) -> tuple[str, ...]:
    """Keys by name or character.

    >>> parse_keys("2,n,enter")
    ('2', 'n', 'enter')
    """
    keys = tuple(key.strip() for key in text.split(",") if key.strip())
    for key in keys:
        if not is_key(key):
            raise argparse.ArgumentTypeError(
                f"{key!r} is no key; write characters and names such as enter, escape, down, pagedown, space, ctrl+p"
            )
    return keys


def is_key(name: str) -> bool:
    """Whether Textual knows a key of this name."""
    *modifiers, key = name.split("+") if len(name) > 1 else [name]
    named = {*Keys, *map(_character_to_key, string.printable)}
    return (len(key) == 1 or key in named or name in named) and set(modifiers) <= {"ctrl", "shift", "alt"}


def parse_screen_size(text: str) -> tuple[int, int]:
    """Columns and lines.

    >>> parse_screen_size("140x45")
    (140, 45)
    """
    match = re.fullmatch(r"(\d{2,3})x(\d{2,3})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write COLUMNSxLINES, for example 80x24")
    return int(match.group(1)), int(match.group(2))


def run(arguments: argparse.Namespace) -> int:
    """Open the screens, or write a picture of one."""
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not arguments.screenshot and not has_terminal:
        raise UsageError(
            "titan-ckpt tui needs a terminal; use `titan-ckpt debug PATH` for text or `--screenshot FILE.svg` for a picture"
        )
    if not arguments.screenshot and os.environ.get("TERM") in UNUSABLE:
        raise UsageError(
            f"titan-ckpt tui cannot draw on a terminal with TERM={os.environ['TERM']}; use `titan-ckpt debug PATH` for text, "
            "`--screenshot FILE.svg` for a picture, or set TERM to what the terminal is, such as xterm"
        )
    with opened(arguments.path) as content:
        return _show(content, arguments)


def _show(content: Content, arguments: argparse.Namespace) -> int:
    if arguments.screenshot:
        app = TitanApp(content, first_screen=arguments.screen, theme=arguments.theme or DARK.name)
        width, height = arguments.size
        write_screenshot(
            app, arguments.screenshot, width=width, height=height, keys=arguments.keys, is_forced=arguments.force
        )
        write_text(arguments.screenshot)
        return 0
    lightness, typed = ask_background()
    theme, driver = arguments.theme or fitting_theme(lightness), driver_after(typed)
    app = TitanApp(content, first_screen=arguments.screen, theme=theme, driver_class=driver)
    with logs_on_bottom_line(app), ended_by_signals(app):
        app.run()
    return app.return_code or 0


@contextlib.contextmanager
def ended_by_signals(app: TitanApp) -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the screens as `q` does: the terminal, if it is still there, is set back. `nohup` stays."""

    def end(*_: object) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:  # before the screens, or after them
            raise KeyboardInterrupt from error
        loop.call_soon_threadsafe(app.exit, None, INTERRUPTED)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in (number for number, handler in before.items() if handler != signal.SIG_IGN):
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def logs_on_bottom_line(app: TitanApp) -> Iterator[None]:
    """Show log records on the bottom line; on stderr they would overwrite the screen."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, [_BottomLine(app)]
    try:
        yield
    finally:
        root.handlers = before


class _BottomLine(logging.Handler):
    def __init__(self, app: TitanApp) -> None:
        super().__init__()
        self._app = app

    def emit(self, record: logging.LogRecord) -> None:
        self._app.post_message(tasks.TaskOutput(record.getMessage(), self._app.show_status))


TUI = Command(configure=configure, run=run)
