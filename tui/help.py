"""`?`: the keys of the screen that is shown, then those of all screens."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from titan_ckpt.tui.data_grid import GLYPHS
from titan_ckpt.tui.data_incident import SITUATIONS
from titan_ckpt.tui.lineview import LineView
from titan_ckpt.tui.pane import Pane
from titan_ckpt.tui.rows import Row, RowList, head, row

KEYS = (
    ("1 - 8", "screens: overview, grid, collective, groups, logs, waits, checkpoints, training"),
    ("j k, arrows", "move; page up/down, g first, G last; h l or left/right shift"),
    ("enter", "open what the line names"),
    ("esc", "back: first out of a filter or a sub-view, then to the screen before"),
    ("/", "filter"),
    ("n N", "next and previous problem"),
    ("space", "pin a rank (on checkpoints: a step)"),
    ("y", "copy the line"),
    ("e", "export the report as text"),
    ("f", "follow a running job"),
    ("ctrl+p", "palette of commands"),
    ("? q", "this help, quit"),
)


class HelpScreen(ModalScreen[None]):
    """All keys, over the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "app.pop_screen", "close", show=False)]

    def __init__(self, pane: Pane) -> None:
        super().__init__()
        self._rows = help_rows(pane)

    def compose(self) -> ComposeResult:
        yield LineView()

    def on_mount(self) -> None:
        view = self.query_one(LineView)
        view.set_rows(RowList(self._rows))
        view.focus()


def help_rows(pane: Pane) -> list[Row]:
    """The help for a screen."""
    rows = [head(f"{pane.number} {pane.label}"), *(row((f"{key:>12}  ", "bold"), what) for key, what in pane.keys)]
    rows += [row(), head("everywhere"), *(row((f"{key:>12}  ", "bold"), what) for key, what in KEYS)]
    rows += [row(), head("operations (grid)"), *(row((f"{glyph:>12}  ", role), what) for glyph, role, what in GLYPHS)]
    rows += [
        row(),
        head("ranks (overview)"),
        *(row((f"{g:>12}  ", role), what) for g, role, what in SITUATIONS.values()),
    ]
    return [*rows, row(), row(("The same as plain text, for screen readers: titan-ckpt debug PATH", "dim"))]
