"""A list on which left and right select a column, and which tells where it was clicked."""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.message import Message

from titan_ckpt.tui.widgets.line_view import MARK, LineView


class GridView(LineView):
    """A LineView on which left and right select a column."""

    @dataclass
    class Shifted(Message):
        """Left or right was pressed."""

        by: int

    @dataclass
    class Pointed(Message):
        """A line was clicked at this character of it."""

        at: int

    def on_click(self, event: events.Click) -> None:
        place = event.get_content_offset(self)
        if place is not None and self.scroll_offset.y + place.y < len(self.rows) and place.x >= len(MARK):
            self.post_message(self.Pointed(place.x - len(MARK)))

    def action_shift(self, by: int) -> None:
        self.post_message(self.Shifted(1 if by > 0 else -1))
