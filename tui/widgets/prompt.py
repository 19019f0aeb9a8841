"""The line in which an answer is typed. Typed and pasted text is never a command."""

from __future__ import annotations

from collections.abc import Callable

from textual import events
from textual.widgets import Input
from textual.widgets.input import Selection


class Prompt(Input):
    """Hidden until it asks."""

    def __init__(self) -> None:
        super().__init__(id="prompt", classes="hidden", compact=True, select_on_focus=False)
        self.placeholder = "enter to accept, esc to cancel"
        self.cursor_blink = False  # what is painted depends on no clock
        self._then: Callable[[str], None] | None = None
        self._asked = ("", "")
        self._typed: dict[tuple[str, str], str] = {}

    @property
    def is_open(self) -> bool:
        """Whether it waits for an answer."""
        return self._then is not None

    def ask(self, label: str, initial: str, then: Callable[[str], None]) -> None:
        """Show `initial` to be edited, or what was typed when the same was asked before: it may have been refused."""
        self._asked = (label, initial)
        self.value = self._typed.get(self._asked, initial)
        # at once: selected on focus, the first keys typed would be replaced
        self.selection = Selection(0, len(self.value))
        self.remove_class("hidden")
        self._then = then
        self.screen.set_focus(self)

    def on_paste(self, event: events.Paste) -> None:
        """Take all lines that are pasted, as one: Textual's own handler, which follows, takes the first alone."""
        event.text = " ".join(event.text.splitlines())

    async def on_key(self, event: events.Key) -> None:
        """Obey the keys of an input at once: Textual would queue them behind the letters that arrive with them."""
        for binding in self._bindings.key_to_bindings.get(event.key, ()):
            event.stop()
            event.prevent_default()
            await self.run_action(binding.action)

    def on_input_submitted(self, message: Input.Submitted) -> None:
        self._typed[self._asked] = message.value

    def close(self) -> Callable[[str], None] | None:
        """Hide it, and return who asked."""
        then, self._then = self._then, None
        self.add_class("hidden")
        return then
