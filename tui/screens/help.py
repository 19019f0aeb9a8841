"""`?`: the keys of the current screen, then those of all screens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from titan_ckpt.tui.data.grid import GLYPHS
from titan_ckpt.tui.data.incident import SITUATIONS
from titan_ckpt.tui.rows import Glyph, Role, Row, RowList, head, row, wrapped
from titan_ckpt.tui.widgets.key_bar import KeyBar
from titan_ckpt.tui.widgets.pane import Pane
from titan_ckpt.tui.widgets.text_view import TextView

WIDTH, _KEY = 70, 14
_FRAME = 4  # columns around the text
COMMON_KEYS = (
    ("1 - 8", "screens: overview, grid, collective, groups, logs, waits, checkpoints, training"),
    (
        "j k, arrows",
        "move; page up/down, ctrl+d ctrl+u half a page, g first, G last; h l or left/right scroll sideways",
    ),
    (
        "mouse",
        "click a line, a tab, the verdict or a key of the bottom line; double click opens the line; the wheel scrolls",
    ),
    ("enter", "open the item on this line"),
    (
        "esc backspace",
        "back: clear the filter or close a detail view, then return to the place before; also alt+left {",
    ),
    ("} alt+right", "forward again"),
    ("tab shift+tab", "next and previous pane"),
    ("w", "on a wide terminal hide the panes beside the list, on a narrow one show them"),
    ("/", "filter"),
    (":", "go to a rank, an operation (#7), a step (step 40), a host or a time"),
    ("n N", "next and previous problem"),
    ("space", "pin a rank (on checkpoints: a step)"),
    ("y", "copy what the cursor is on"),
    ("e", "open the line of code in $EDITOR"),
    ("x", "export the report: a page (.html), Markdown (.md), text (.txt), or a trace for Perfetto (.json)"),
    ("f", "follow a running job: load new data every 2 s"),
    ("ctrl+p", "command palette: also jumps to a rank, an operation, a step, a host or a time, and changes the theme"),
    ("? q", "this help, quit"),
    ("ctrl+c ctrl+z", "quit (press it twice), suspend"),
)


class HelpScreen(ModalScreen[None]):
    """All keys, shown over the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "app.pop_screen", "close", show=False)]

    def __init__(self, pane: Pane) -> None:
        super().__init__()
        self._pane = pane

    def compose(self) -> ComposeResult:
        yield TextView()
        yield KeyBar(self.app.simulate_key)

    def on_mount(self) -> None:
        self._show()
        self.query_one(TextView).focus()
        self.query_one(KeyBar).show_keys("", (("j k", "scroll"), ("esc", "close")))

    def on_resize(self) -> None:
        self._show()

    def _show(self) -> None:
        width = min(WIDTH, self.app.size.width - _FRAME)
        self.query_one(TextView).set_rows(RowList(help_rows(self._pane, width)))


def help_rows(pane: Pane, width: int = WIDTH) -> list[Row]:
    """Help for a screen, in lines of at most `width`."""
    rows = [
        head(f"{pane.number} {pane.label}"),
        *_entries(pane.keys, width),
        row(),
        head("everywhere"),
        *_entries(COMMON_KEYS, width),
    ]
    if pane.number == 2:
        rows += [row(), head("operations"), *map(_entry, GLYPHS)]
    elif pane.number in (1, 3, 4, 6):
        rows += [row(), head("ranks"), *map(_entry, SITUATIONS.values())]
    return [*rows, row(), row(("Plain text, for screen readers: titan-ckpt debug PATH", Role.DIM))]


def _entries(keys: Iterable[tuple[str, str]], width: int) -> Iterator[Row]:
    for key, what in keys:
        for i, line in enumerate(wrapped(what, max(width - _KEY, _KEY))):
            yield row((f"{key if i == 0 else '':>{_KEY - 2}}  ", Role.BOLD), line)


def _entry(glyph: Glyph) -> Row:
    return row((f"{glyph.char:>{_KEY - 2}}  ", glyph.role), glyph.label)
