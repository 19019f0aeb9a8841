"""A list of any length with a cursor. Textual's line API paints only the visible lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events, on
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollDown, ScrollTo, ScrollUp
from textual.strip import Strip

from titan_ckpt.tui.rows import Role, Row, RowList, Rows, without_number, without_secrets
from titan_ckpt.tui.widgets.looks import looks_of

MARK, NO_MARK = "▸ ", "  "
MORE_LEFT, MORE_RIGHT = "‹", "›"


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

    class Resized(Message):
        """The view has another size."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.rows: Rows = RowList()
        self.cursor = 0
        self.shift = 0
        self._ground = Style()

    def set_rows(self, rows: Rows, *, cursor: int | None = None) -> None:
        """Replace the rows; the cursor keeps its position unless `cursor` is given."""
        self.rows = rows
        self.virtual_size = Size(1, len(rows))
        self.move_to(self.cursor if cursor is None else cursor)
        self.refresh()

    def move_to(self, index: int, *, is_centred: bool = False) -> None:
        """Move the cursor and scroll to it, to the middle of the view if `is_centred`."""
        former, self.cursor = self.cursor, max(0, min(index, len(self.rows) - 1))
        height = self.scrollable_content_region.height
        if is_centred and not self.scroll_offset.y <= self.cursor < self.scroll_offset.y + height:
            self.scroll_to(y=self.cursor - height // 2, animate=False, force=True, immediate=True)
        self._reveal_cursor()  # paints all lines if they scroll
        for line in {former, self.cursor}:
            if 0 <= line - self.scroll_offset.y < height:
                self.refresh_line(line)
        self.told_moved()

    def _reveal_cursor(self) -> None:
        """Scroll as little as shows the cursor, with a heading above the first line."""
        top = 0 if self.cursor <= 1 < self.scrollable_content_region.height else self.cursor
        self.scroll_to_region(
            Region(0, top, 1, self.cursor - top + 1), animate=False, force=True, immediate=True, x_axis=False
        )

    def told_moved(self) -> None:
        """Tell the screen that the cursor is on another line, or on another one's place."""
        self.post_message(self.Moved(self.cursor))

    @property
    def current(self) -> Row | None:
        """The row under the cursor."""
        return self.rows.row(self.cursor, self.line_width) if len(self.rows) else None

    @property
    def line_width(self) -> int:
        """Width of a row without the mark; of the whole terminal before the first layout."""
        return max((self.scrollable_content_region.width or self.app.size.width) - len(MARK), 8)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Paint some lines. Textual derives the style of a widget anew whenever it is asked for."""
        self._ground = self.rich_style
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """Paint a line. Every segment needs a style: the NO_COLOR filter fails on segments without one."""
        width, looks = self.scrollable_content_region.width, looks_of(self.app.current_theme)
        styles = looks.roles
        index = self.scroll_offset.y + y
        if index >= len(self.rows):
            return Strip.blank(width, self._ground)
        is_cursor = index == self.cursor and self.has_cursor
        shown = without_secrets(self.rows.row(index, self.line_width))
        body = Strip([Segment(text, styles[role]) for text, role in shown.spans])
        strip = Strip([Segment(MARK if is_cursor else NO_MARK, styles[Role.BOLD]), *self._visible(body, width, styles)])
        return strip.apply_style(self._ground + looks.cursor if is_cursor else self._ground)

    def _visible(self, body: Strip, width: int, styles: Mapping[Role, Style]) -> Strip:
        """The part of a line that fits, with a mark at each end where more of it is; no number is cut."""
        room = width - len(MARK)
        left = Strip([Segment(MORE_LEFT, styles[Role.DIM])]) if self.shift and body.cell_length else Strip([])
        is_cut = body.cell_length > self.shift + room
        right = Strip([Segment(MORE_RIGHT, styles[Role.DIM])]) if is_cut else Strip([])
        start, end = self.shift + left.cell_length, self.shift + room - right.cell_length
        middle = body.crop(start, end)
        if is_cut:
            middle = middle.crop(0, cell_len(without_number(middle.text, body.crop(end).text)))
        strip = Strip([*left, *middle])
        return Strip([*strip.adjust_cell_length(room - right.cell_length, styles[Role.PLAIN]), *right])

    @property
    def has_cursor(self) -> bool:
        """Whether a line is marked as the one that keys act on."""
        return True

    def action_move(self, by: int) -> None:
        self.move_to(self.cursor + by)

    def action_page(self, by: int) -> None:
        self.move_to(self.cursor + by * max(self.scrollable_content_region.height - 1, 1))

    def action_half_page(self, by: int) -> None:
        self.move_to(self.cursor + by * max(self.scrollable_content_region.height // 2, 1))

    def action_to_start(self) -> None:
        """To the first line; to the one after it if that is a heading alone of lines that enter opens."""
        links = [self.rows.row(index, self.line_width).link for index in range(min(len(self.rows), 2))]
        self.move_to(1 if len(links) == 2 and links[0] is None and links[1] is not None else 0)

    def action_to_end(self) -> None:
        self.move_to(len(self.rows) - 1)

    def action_shift(self, by: int) -> None:
        self.shift = max(0, self.shift + by)
        self.refresh()

    def action_choose(self) -> None:
        row = self.current
        if row is not None:
            self.post_message(self.Chosen(self.cursor, row))

    def on_hide(self, event: events.Hide) -> None:
        """Keep the focus if the screen was shown again before this arrived: Textual would take it away, keys would be lost."""
        if self.is_on_screen:
            event.prevent_default()

    def on_resize(self) -> None:
        self._reveal_cursor()
        self.post_message(self.Resized())

    def on_click(self, event: events.Click) -> None:
        """A click moves the cursor, a double click opens the line; the frame and the room below the lines are no lines."""
        place = event.get_content_offset(self)
        if place is None or self.scroll_offset.y + place.y >= len(self.rows):
            return
        self.move_to(self.scroll_offset.y + place.y)
        if event.chain == 2:
            self.action_choose()

    @on(events.MouseScrollDown)
    @on(events.MouseScrollUp)
    @on(ScrollTo)
    @on(ScrollUp)
    @on(ScrollDown)
    def take_cursor_along(self) -> None:
        """Keep the cursor in sight when the mouse scrolls: from out of sight it would scroll back at the next reload."""
        self.call_after_refresh(self._move_into_sight)

    def _move_into_sight(self) -> None:
        top, height = self.scroll_offset.y, self.scrollable_content_region.height
        seen = max(top, min(self.cursor, top + height - 1))
        if seen != self.cursor and len(self.rows):
            self.move_to(seen)
