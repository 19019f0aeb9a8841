"""A list of any length with a cursor. Textual's line API paints only the visible lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from titan_ckpt.tui.rows import Role, Row, RowList, Rows, without_secrets
from titan_ckpt.tui.widgets.looks import CURSOR_DARK, CURSOR_LIGHT, DARK, LIGHT

MARK, NO_MARK = "▸ ", "  "


class LineView(ScrollView, can_focus=True):
    """Shows `Rows`. A mark before the cursor's line makes it visible without colour."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("ctrl+u", "half_page(-1)", "half a page up", show=False),
        Binding("ctrl+d", "half_page(1)", "half a page down", show=False),
        Binding("pageup,ctrl+b", "page(-1)", "page up", show=False),
        Binding("pagedown,ctrl+f", "page(1)", "page down", show=False),
        Binding("g,home", "to_start", "first", show=False),
        Binding("G,end", "to_end", "last", show=False),
        Binding("left,h", "shift(-8)", "left", show=False),
        Binding("right,l", "shift(8)", "right", show=False),
        Binding("enter", "choose", "open", show=False),
    ]

    @dataclass
    class Moved(Message):
        """The cursor moved to a row."""

        index: int

    @dataclass
    class Chosen(Message):
        """Enter was pressed on a row."""

        index: int
        row: Row

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.rows: Rows = RowList()
        self.cursor = 0
        self.shift = 0

    def set_rows(self, rows: Rows, *, cursor: int | None = None) -> None:
        """Replace the rows; the cursor keeps its position unless `cursor` is given."""
        self.rows = rows
        self.virtual_size = Size(1, len(rows))
        self.move_to(self.cursor if cursor is None else cursor)
        self.refresh()

    def move_to(self, index: int, *, is_centred: bool = False) -> None:
        """Move the cursor and scroll to it, to the middle of the view if `is_centred`."""
        self.cursor = max(0, min(index, len(self.rows) - 1))
        height = self.scrollable_content_region.height
        if is_centred and not self.scroll_offset.y <= self.cursor < self.scroll_offset.y + height:
            self.scroll_to(y=self.cursor - height // 2, animate=False, force=True, immediate=True)
        top = 0 if self.cursor <= 1 < height else self.cursor  # keep a heading above the first line visible
        self.scroll_to_region(
            Region(0, top, 1, self.cursor - top + 1), animate=False, force=True, immediate=True, x_axis=False
        )
        self.refresh()
        self.post_message(self.Moved(self.cursor))

    @property
    def current(self) -> Row | None:
        """The row under the cursor."""
        return self.rows.row(self.cursor, self.line_width) if len(self.rows) else None

    @property
    def line_width(self) -> int:
        """Width of a row without the mark."""
        return max(self.scrollable_content_region.width - len(MARK), 8)

    def render_line(self, y: int) -> Strip:
        """Paint a line. Every segment needs a style: the NO_COLOR filter fails on segments without one."""
        width, is_dark = self.scrollable_content_region.width, self.app.current_theme.dark
        styles = DARK if is_dark else LIGHT
        index = self.scroll_offset.y + y
        if index >= len(self.rows):
            return Strip.blank(width, styles[Role.PLAIN])
        is_cursor = index == self.cursor
        shown = without_secrets(self.rows.row(index, self.line_width))
        body = Strip([Segment(text, styles[role]) for text, role in shown.spans])
        body = body.crop(self.shift, self.shift + width - len(MARK)).adjust_cell_length(
            width - len(MARK), styles[Role.PLAIN]
        )
        strip = Strip([Segment(MARK if is_cursor else NO_MARK, styles[Role.BOLD]), *body])
        return strip.apply_style(CURSOR_DARK if is_dark else CURSOR_LIGHT) if is_cursor else strip

    def action_move(self, by: int) -> None:
        self.move_to(self.cursor + by)

    def action_page(self, by: int) -> None:
        self.move_to(self.cursor + by * max(self.scrollable_content_region.height - 1, 1))

    def action_half_page(self, by: int) -> None:
        self.move_to(self.cursor + by * max(self.scrollable_content_region.height // 2, 1))

    def action_to_start(self) -> None:
        self.move_to(0)

    def action_to_end(self) -> None:
        self.move_to(len(self.rows) - 1)

    def action_shift(self, by: int) -> None:
        self.shift = max(0, self.shift + by)
        self.refresh()

    def action_choose(self) -> None:
        row = self.current
        if row is not None:
            self.post_message(self.Chosen(self.cursor, row))

    def on_click(self, event: events.Click) -> None:
        """A click moves the cursor, a double click opens the line."""
        self.move_to(self.scroll_offset.y + event.y)
        if event.chain == 2:
            self.action_choose()
