"""A list on which left and right select a column."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from titan_ckpt.tui.widgets.line_view import LineView


class GridView(LineView):
    """A LineView on which left and right select a column."""

    @dataclass
    class Shifted(Message):
        """Left or right was pressed."""

        by: int

    def action_shift(self, by: int) -> None:
        self.post_message(self.Shifted(1 if by > 0 else -1))
