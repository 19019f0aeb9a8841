"""The command palette: the screens, the keys of all screens, themes, and every place of the incident to jump to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import CommandPalette, Hit, Hits, Provider

from titan_ckpt.tui.goto import places, state_of
from titan_ckpt.tui.screens import PANES
from titan_ckpt.tui.session.session import Session

# (title, what it does, action)
SHARED_COMMANDS = (
    ("Next problem", "go to the next problem (n)", "next_problem(1)"),
    ("Go to", "a rank, an operation, a step, a host or a time (:)", "go_to"),
    ("Filter", "show matching lines only (/)", "filter"),
    ("Copy", "copy what the cursor is on (y)", "copy"),
    ("Edit", "open the line of code in $EDITOR (e)", "edit"),
    ("Export the report", "as a page, Markdown, text, or a trace for Perfetto (x)", "export"),
    ("Follow", "load new data every 2 s (f)", "follow"),
    ("Theme", "choose other colours", "change_theme"),
    ("Help", "all keys (?)", "help"),
    ("Quit", "exit (q)", "quit"),
)


class Palette(CommandPalette):
    """Textual's palette. Its page keys look for a page in a list that may not be laid out yet (KeyError in Textual 8.2)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "command_list('first')", show=False), Binding("pagedown", "command_list('last')", show=False),
    ]  # fmt: skip


def system_commands(app: App[Any], show_screen: Callable[[int], None]) -> Iterator[SystemCommand]:
    """Commands of the palette: every screen, and the keys that all screens share."""
    for pane in PANES:
        yield SystemCommand(f"{pane.number} {pane.label}", pane.purpose, partial(show_screen, pane.number))
    for title, what, action in SHARED_COMMANDS:
        yield SystemCommand(title, what, partial(app.run_action, action))


@runtime_checkable
class Jumper(Protocol):
    """The application, as the palette knows it."""

    session: Session

    def go_to(self, text: str) -> None:
        """Go to the place that `text` names."""


class Jumps(Provider):
    """Ranks, operations, steps, hosts and times, as they are typed after `:`; and themes by name."""

    async def search(self, query: str) -> Hits:
        app, query = self.app, query.strip()
        if isinstance(app, Jumper):
            for text, what in places(app.session, query):
                yield Hit(1.0, what, _jump(app, text), text=what, help=state_of(app.session, text))
        matcher = self.matcher(query)
        for name in sorted(app.available_themes):
            score = matcher.match(f"theme {name}")
            if score > 0:
                yield Hit(score * 0.5, matcher.highlight(f"theme {name}"), self._theme(name), help="other colours")

    def _theme(self, name: str) -> Callable[[], None]:
        def change() -> None:
            self.app.theme = name

        return change


def _jump(app: Jumper, text: str) -> Callable[[], None]:
    return lambda: app.go_to(text)
