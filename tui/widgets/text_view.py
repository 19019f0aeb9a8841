"""A text that is read, not chosen from: it has no cursor, and keys and the wheel scroll it."""

from __future__ import annotations

from textual import events

from titan_ckpt.tui.widgets.line_view import LineView


class TextView(LineView):
    """Lines of which the first in sight takes the place of the cursor."""

    @property
    def has_cursor(self) -> bool:
        return False

    def move_to(self, index: int, *, is_centred: bool = False) -> None:  # noqa: ARG002 (there is nothing to centre)
        """Scroll line `index` to the top, as far as the text goes."""
        last = max(len(self.rows) - self.scrollable_content_region.height, 0)
        self.cursor = max(0, min(index, last))
        self.scroll_to(y=self.cursor, animate=False, force=True, immediate=True)
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        event.prevent_default()  # a line has nothing to open

    def _move_into_sight(self) -> None:
        self.move_to(self.scroll_offset.y)
