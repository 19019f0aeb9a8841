"""A pane beside or below the list of a screen: details of the line under the cursor, or a picture of the whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from textual.message import Message

from titan_ckpt.tui.rows import CULPRIT, Role, Row, RowList, clean, shown, truncate
from titan_ckpt.tui.widgets.line_view import LineView


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A pane of a screen. `is_below`: under the list, else beside it. `is_of_line`: it shows the line under the cursor."""

    name: str
    is_below: bool = False
    is_of_line: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What there is room for in the part `name`."""

    name: str
    width: int
    height: int


class PartView(LineView):
    """Shows a part's rows; it has a cursor while it has the focus."""

    @dataclass
    class Followed(Message):
        """Enter was pressed on a row of a part."""

        row: Row

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        self.seen: tuple[object, ...] = ()
        self._shown: tuple[Row, ...] = ()
        self._start = 0
        self.border_title = part.name
        self.add_class("below" if part.is_below else "part", f"part-{part.name}")

    @property
    def is_shown(self) -> bool:
        """Whether there is room for it."""
        return self.size.width > 0

    @property
    def space(self) -> Space:
        """The room for its rows."""
        return Space(name=self.part.name, width=self.line_width, height=self.scrollable_content_region.height)

    @property
    def rows_shown(self) -> tuple[Row, ...]:
        """Its rows, also those out of sight."""
        return self._shown

    def show_rows(self, rows: Iterable[Row]) -> None:
        """Replace the rows, and begin at the first, a picture of the whole with a rank at fault in sight; what is shown already
        stays as it is."""
        new = tuple(rows)
        if new != self._shown or self.cursor != self._start:
            marked = (
                i
                for i, each in enumerate(new)
                if any(CULPRIT in text and role == Role.BAD for text, role in each.spans)
            )
            self._shown, self._start = new, 0 if self.part.is_of_line else next(marked, 0)
            self.set_rows(RowList(new), cursor=0)
            self.move_to(self._start, is_centred=True)

    def name_it(self, text: str) -> None:
        """Replace the title in the frame."""
        self.border_title = clean(shown(truncate(text, max(self.size.width - 6, 8)))).replace("[", r"\[")

    @property
    def has_cursor(self) -> bool:
        return self.has_focus

    def told_moved(self) -> None:
        """The screen's own cursor has not moved."""

    def action_choose(self) -> None:
        row = self.current
        if row is not None:
            self.post_message(self.Followed(row))
