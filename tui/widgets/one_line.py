"""A line of text around the rows: titles, rulers, the status."""

from __future__ import annotations

from textual.widgets import Static

from titan_ckpt.tui.rows import clean, shown


class OneLine(Static):
    """Text without markup, without secrets and without what a terminal would obey."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__("", id=id, classes=classes, markup=False)

    def show(self, text: str) -> None:
        """Replace the text."""
        self.update(clean(shown(text)))
