"""A line of text around the rows: titles, rulers, the status."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from titan_ckpt.tui.rows import clean, shown


class OneLine(Static):
    """Text without markup, without secrets and without what a terminal would obey."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__("", id=id, classes=classes, markup=False)
        self._text: str | Text = ""

    def show(self, text: str) -> None:
        """Replace the text."""
        self.show_text(clean(shown(text)))

    def show_text(self, text: str | Text) -> None:
        """Replace the text, which is clean and has no secret. Its height stays, so nothing else moves."""
        if text != self._text:
            self._text = text
            self.update(text, layout=False)
