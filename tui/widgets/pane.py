"""Base class of the numbered screens: a title line, a body, a filter, steps from problem to problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.message import Message
from textual.timer import Timer

from titan_ckpt.tui.rows import Role, Row, RowLink, RowList, Rows, parse_ranks, placeholder, row, truncate, wrapped
from titan_ckpt.tui.session.session import Loadable, Session
from titan_ckpt.tui.widgets.line_view import LineView
from titan_ckpt.tui.widgets.one_line import OneLine
from titan_ckpt.tui.widgets.part import Part, PartView, Space

REST_S = 0.05  # longer than a key that is held down takes to come again
ANYWHERE = (":", "f")  # keys that need no data
_HEADINGS = 8  # lines before the first rank, at most
_LEAST_SPLIT, _LEAST_BELOW = 24, 8  # lines of the list and the parts beside it, and of a part below
NO_INCIDENT = (
    "An incident is a folder of Flight Recorder dumps, stacks or logs, or a run with a debug/ folder. To create one, run "
    "`titan-ckpt debug collect` on a hung job, or `titan-ckpt debug inject skip` as a drill."
)


@runtime_checkable
class Prompter(Protocol):
    """The application, as the screens know it."""

    def ask(self, label: str, initial: str, then: Callable[[str], None]) -> None:
        """Prompt for a line and pass it to `then`."""


class Pane(Vertical):
    """One numbered screen: a list, and `parts` beside and below it where the terminal is wide enough.

    `keys` are its own keys, for the help and the status line; `purpose` is for the palette.
    """

    number: ClassVar[int] = 0
    label: ClassVar[str] = ""
    purpose: ClassVar[str] = ""
    keys: ClassVar[tuple[tuple[str, str], ...]] = ()
    filter_hint: ClassVar[str] = "filter: show only lines that contain this text"
    parts: ClassVar[tuple[Part, ...]] = ()
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "next_part(1)", show=False), Binding("shift+tab", "next_part(-1)", show=False),
        Binding("w", "flip_parts", show=False),
    ]  # fmt: skip

    @dataclass
    class Go(Message):
        """Show another screen and select an item there."""

        link: RowLink

    @dataclass
    class Open(Message):
        """Open the run at `url`, or an incident of several there; esc on its first screen returns here."""

        url: str
        incident: str | None = None

    @dataclass
    class Work(Message):
        """Run `work` in a thread while the status line shows `what`; `done` gets the result on the UI thread."""

        what: str
        work: Callable[[], Any]
        done: Callable[[Any], None]

    @dataclass
    class ShowStatus(Message):
        """Show a text on the status line."""

        text: str

    def __init__(self, session: Session) -> None:
        super().__init__(id=f"pane-{self.number}")
        self.session = session
        self.filter_text = ""
        self._seen: tuple[object, ...] = ()
        self._story, self._began_at = -1, -1
        self._body: LineView | None = None
        self._parts_timer: Timer | None = None

    def compose(self) -> ComposeResult:
        beside = [part for part in self.parts if not part.is_below]
        with Container(classes="split"):
            with Vertical(classes="main"):
                yield OneLine(classes="title")
                yield from self.compose_list()
            if beside:
                with Vertical(classes="beside"):
                    yield from map(PartView, beside)
        yield from (PartView(part) for part in self.parts if part.is_below)

    def compose_list(self) -> ComposeResult:
        """The list with what belongs to it; its first LineView is the body."""
        yield LineView()

    @property
    def body(self) -> LineView:
        """The list of this screen."""
        if self._body is None:
            self._body = self.query_one(".main", Vertical).query_one(LineView)
        return self._body

    @property
    def has_parts(self) -> bool:
        """Whether panes stand beside the list."""
        return any(view.is_shown for view in self.query(PartView) if not view.part.is_below)

    def set_title(self, text: str) -> None:
        """Set the line below the tabs."""
        suffix = f"   filter: {self.filter_text}" if self.filter_text else ""
        title = self.query_one(".title", OneLine)
        width = (title.size.width or self.app.size.width) - self.has_parts  # a blank before their frame
        title.show(" " + truncate(text, width - len(suffix) - 1) + suffix)

    # -- what a screen may override

    def useful_keys(self) -> Iterable[tuple[str, str]]:
        """Those of `keys` that do something here and now, for the line at the bottom."""
        is_empty = self.session.incident.value is None
        return [key for key in self.keys if key[0] in ANYWHERE] if is_empty else self.keys

    def state(self) -> tuple[object, ...]:
        """What the rows depend on; they are rebuilt when it changes."""
        return (self.session.incident.version, self.session.incident.text)

    def make_rows(self, width: int) -> Rows:
        """Build the rows from the session."""
        return self.no_incident(width)

    def no_incident(self, width: int) -> Rows:
        """Rows to show if there is no incident."""
        return RowList(self.absent_rows(self.session.incident, NO_INCIDENT, width))

    def title(self) -> str:
        """Text of the title line."""
        return ""

    def is_complete(self) -> bool:
        """Whether the rows are those of loaded data."""
        return self.session.incident.value is not None and self.body.size.height > 0

    def begin(self) -> None:
        """Place the cursor once, when data is shown for the first time: on the rank at fault, else on the first one."""
        incident, rows, width = self.session.incident.value, self.body.rows, self.body.line_width
        if incident is not None and incident.foremost is not None:
            self.move_to_rank(incident.foremost)
            return
        links = ((i, rows.row(i, width).link) for i in range(min(len(rows), _HEADINGS)))
        self.body.move_to(next((i for i, link in links if link is not None and link.rank is not None), 0))

    def open_link(self, link: RowLink) -> None:
        """Select the item that another screen linked to, and no other at first sight."""
        self._story, self._began_at = self.session.story, -1
        self.select(link)

    def select(self, link: RowLink) -> None:
        """Select an item: the first line of its rank, else the one on which the screen starts."""
        self.update_rows()
        self.begin()
        self.move_to_rank(link.rank)

    def chosen(self, chosen: Row) -> None:
        """Enter on a row: follow its link."""
        if chosen.link is not None:
            self.post_message(self.Go(chosen.link))

    def followed(self) -> None:
        """Handle the start of following while this screen is shown."""

    def go_back(self) -> bool:
        """Handle esc within the screen; False if there is nothing to leave."""
        if self.filter_text:
            self.set_filter("")
            return True
        return False

    def pin(self) -> None:
        """Handle space: pin or unpin the rank of the row under the cursor."""
        current = self.body.current
        rank = current.link.rank if current and current.link else None
        if rank is None:
            self.post_message(self.ShowStatus("no rank on this line"))
            return
        self.pin_rank(rank)

    def pin_rank(self, rank: int) -> None:
        """Pin `rank` on all screens, or unpin it."""
        self.session.pinned = None if self.session.pinned == rank else rank
        text = f"rank {rank} pinned" if self.session.pinned is not None else f"rank {rank} unpinned"
        self.post_message(self.ShowStatus(text))
        self.update_rows()

    def copied_text(self) -> str:
        """Text that `y` copies: the row under the cursor."""
        current = self.body.current
        return current.whole if current else ""

    def part_rows(self, space: Space) -> Iterable[Row]:  # noqa: ARG002 (a screen with parts overrides it)
        """Rows of a part; it is rebuilt with the list, and if `is_of_line` when the cursor moves."""
        return ()

    def wants_parts(self) -> bool:
        """Whether there is anything to show in the parts."""
        return self.session.incident.value is not None

    def part_title(self, name: str) -> str:
        """Title of a part."""
        return name

    def text_to_copy(self) -> str:
        """What `y` copies: of the part that has the focus its line, else what the screen says."""
        view = self.focused_view
        if view is self.body:
            return self.copied_text()
        return view.current.whole if view.current else ""

    def place_to_edit(self) -> tuple[str, int] | None:
        """The file and line that `e` opens: of the row under the cursor, in the part that has the focus if it has it; else the
        first that the details show."""
        current = self.focused_view.current
        views = (view for view in self.query(PartView) if view.is_shown and view.part.is_of_line)
        details = (row.at for view in views for row in view.rows_shown)
        return current.at if current is not None and current.at else next(filter(None, details), None)

    # -- shared by all screens

    @property
    def focused_view(self) -> LineView:
        """The list, or the part that has the focus."""
        return next((view for view in self.query(PartView) if view.has_focus), self.body)

    def ask(self, label: str, initial: str, then: Callable[[str], None]) -> None:
        """Prompt for a line: at once, not by a message, so that the next key already goes to the prompt."""
        assert isinstance(self.app, Prompter)
        self.app.ask(label, initial, then)

    def work(self, what: str, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run `work` in a thread; `done` gets the result if this screen still exists."""

        def if_attached(result: Any) -> None:
            if self.is_attached:
                done(result)

        self.post_message(self.Work(what, work, if_attached))

    def move_to_rank(self, rank: int | None) -> None:
        """Move the cursor to the first row of `rank`, if any."""
        rows, width = self.body.rows, self.body.line_width
        for index in range(len(rows) if rank is not None else 0):
            link = rows.row(index, width).link
            if link is not None and link.rank == rank:
                self.body.move_to(index)
                return

    @staticmethod
    def absent_rows(part: Loadable[Any], hint: str, width: int) -> Iterator[Row]:
        """Rows in place of missing data: loading, the error, or a hint where to find it."""
        role: Role = Role.BAD if part.error else Role.DIM
        for line in wrapped(part.text, width):
            yield placeholder(line) if part.is_loading else row((line, role), is_problem=bool(part.error))
        if not part.is_loading and not part.error:
            yield row()
            yield from (row((line, Role.DIM)) for line in wrapped(hint, width))

    def set_filter(self, text: str) -> None:
        """Show matching rows only; an empty text shows all."""
        self.filter_text = text
        self.update_rows(force=True)

    def next_problem(self, direction: int) -> None:
        """Handle `n` and `N`."""
        place = self.body.rows.next_problem(self.body.cursor, direction)
        if place is None:
            self.post_message(self.ShowStatus("no further problem " + ("below" if direction > 0 else "above")))
        else:
            self.body.move_to(place, is_centred=True)

    def update_rows(self, *, force: bool = False) -> None:
        """Rebuild the rows if `state` has changed. Does nothing once the screen is removed."""
        if not self.is_attached:
            return
        self.set_class(not self.wants_parts(), "-bare")
        seen = (*self.state(), self.session.pinned, self.body.line_width, self.filter_text, self.has_parts)
        if seen != self._seen or force:
            self._seen = seen
            self.body.set_rows(self.filtered(self.make_rows(self.body.line_width)))
            if self._story != self.session.story and self.is_complete():
                self._begin_anew()
        self.set_title(self.title())
        self._grow_below()
        self.update_parts()

    def _begin_anew(self) -> None:
        """Place the cursor at first, and where it still is when the verdict has become another one."""
        if self._story < 0 or self.body.cursor == self._began_at:
            self.begin()
            self._began_at = self.body.cursor
        self._story = self.session.story

    def _grow_below(self) -> None:
        """Give what stands below the list the lines that the list and the parts beside it leave free."""
        free = self.size.height - max(len(self.body.rows) + 1, _LEAST_SPLIT) if self.screen.has_class("-wide") else 0
        for view in self.query(PartView):
            if view.part.is_below and view.part.is_of_line:
                view.set_styles(min_height=max(free, _LEAST_BELOW))

    def lay_out(self) -> None:
        """Make the lines for the right width before anything is painted: heights depend on lines, and scrollbars on heights."""
        for _ in range(1 + 2 * bool(self.parts)):
            for box in self.query(".split, .beside"):
                box._clear_arrangement_cache()
            self.screen._refresh_layout()
            self.update_rows()

    def update_parts(self, *, force: bool = False) -> None:
        """Rebuild the parts that are shown and whose contents have changed."""
        for view in self.query(PartView):
            if not view.is_shown:
                continue
            size = view.scrollable_content_region.size
            line = self.body.current if view.part.is_of_line else None
            seen = (self._seen, size, line, self.body.cursor if line is not None else None)
            if seen != view.seen or force:
                view.seen = seen
                view.show_rows(tuple(self.part_rows(view.space)) or [row(("nothing more about this line", Role.DIM))])
                view.name_it(self.part_title(view.part.name))

    def action_next_part(self, by: int) -> None:
        """Move the focus between the list and the parts beside it."""
        views = [self.body, *(view for view in self.query(PartView) if view.is_shown)]
        at = next((i for i, view in enumerate(views) if view.has_focus), 0)
        views[(at + by) % len(views)].focus()

    def action_flip_parts(self) -> None:
        """On a narrow terminal show the parts below the list, on a wide one hide them; and back."""
        self.toggle_class("-flipped")
        self.body.focus()

    def filtered(self, rows: Rows) -> Rows:
        """The rows that contain the filter's text; a line that says so if there is none."""
        found = rows.matching(self.filter_text) if self.filter_text and isinstance(rows, RowList) else rows
        return found if len(found) else self.no_match("no line contains")

    def no_match(self, what: str) -> Rows:
        """The only line if nothing passes the filter."""
        return RowList([row((f"{what} {self.filter_text!r}; esc shows all", Role.WARN))] if self.filter_text else ())

    def on_line_view_chosen(self, message: LineView.Chosen) -> None:
        message.stop()
        self.chosen(message.row)

    def on_line_view_moved(self) -> None:
        """The parts follow the cursor once it rests: while a key is held down, only the list moves."""
        self.update_parts_soon()

    def update_parts_soon(self) -> None:
        """Rebuild the parts unless the cursor moves on within REST_S."""
        if not any(view.is_shown and view.part.is_of_line for view in self.query(PartView)):
            return
        if self._parts_timer is None:
            self._parts_timer = self.set_timer(REST_S, self._update_parts_now)
        else:
            self._parts_timer.reset()

    def _update_parts_now(self) -> None:
        self._parts_timer = None
        self.update_parts()

    @property
    def is_settled(self) -> bool:
        """Whether the parts show the line under the cursor."""
        return self._parts_timer is None

    def on_line_view_resized(self, message: LineView.Resized) -> None:
        message.stop()
        self.update_rows()

    def on_part_view_followed(self, message: PartView.Followed) -> None:
        message.stop()
        if message.row.link is not None:
            self.post_message(self.Go(message.row.link))

    def on_show(self) -> None:
        self.update_rows()


def filter_ranks(text: str) -> tuple[int, ...] | None:
    """Ranks named by a filter text; None if it is not a set of ranks."""
    return parse_ranks(text) if text else None
