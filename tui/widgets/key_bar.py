"""The bottom line: a message, or keys and what they do. A click on a key presses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.text import Text
from textual import events
from textual.keys import _character_to_key

from titan_ckpt.tui.rows import Role, clean, shown, truncate
from titan_ckpt.tui.widgets.looks import looks_of
from titan_ckpt.tui.widgets.one_line import OneLine

Keys = Sequence[tuple[str, str]]
_GAP = 2
_COMMON_KEYS = (("?", "help"), ("q", "quit"))


class KeyBar(OneLine):
    """The bottom line: a message, or the keys of the screen. A click on a key presses it."""

    def __init__(self, press: Callable[[str], object]) -> None:
        super().__init__(id="status")
        self._press = press
        self._spots: list[tuple[int, int, str]] = []

    def show_message(self, text: str) -> None:
        """Show a message."""
        self._spots = []
        self.show(truncate(f" {text}", self.app.size.width))

    def show_state(
        self, text: str, doing: Sequence[str], keys: Iterable[tuple[str, str]], *, is_following: bool
    ) -> None:
        """Show the message `text` and what is being done, else the keys: those of every screen, then `keys`."""
        before = "[following: new data every 2 s] " if is_following else ""
        if doing:
            self.show_message(f"{before}{' · '.join([*([text] if text else []), *doing])} ...")
        elif text:
            self.show_message(f"{before}{text}")
        else:
            self.show_keys(before, (*_COMMON_KEYS, *keys))

    def show_keys(self, before: str, keys: Keys) -> None:
        """Show `before`, then as many keys as fit, each with what it does."""
        self._spots = []
        roles = looks_of(self.app.current_theme).roles
        line = Text(f" {before}", no_wrap=True)
        for key, whole in keys:
            room = self.app.size.width - 1 - line.cell_len - len(key) - _GAP
            what = whole if key != "enter" or len(whole) <= room else "open"
            if len(what) > room:
                continue
            for word in key.split():
                self._spots.append((line.cell_len, line.cell_len + len(word), key_name(word)))
                line.append(f"{word} ", roles[Role.BOLD] + roles[Role.GOOD])
            line.append(clean(shown(what)))
            start, _, name = self._spots.pop()
            self._spots.append((start, line.cell_len, name))  # what the last key does belongs to it
            line.append(" " * _GAP)
        self.show_text(line)

    def on_click(self, event: events.Click) -> None:
        for start, stop, key in self._spots:
            if start <= event.x < stop:
                self._press(key)


def key_name(word: str) -> str:
    """Textual's name of a key as the screens write it.

    >>> key_name("/"), key_name("enter"), key_name("ctrl+p")
    ('slash', 'enter', 'ctrl+p')
    """
    return _character_to_key(word) if len(word) == 1 else {"esc": "escape"}.get(word, word)
