"""The application: eight numbered screens over one session, a prompt, a status line, help and a command palette."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.filter import LineFilter
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Input

from titan_ckpt.location import redact
from titan_ckpt.tui import tasks, themes
from titan_ckpt.tui.bars import TabBar, VerdictBar, paint_bars
from titan_ckpt.tui.commands import Jumps, Palette, system_commands
from titan_ckpt.tui.data.content import Content, find_content
from titan_ckpt.tui.editor import open_in_editor
from titan_ckpt.tui.export import EXPORT_HINT, export_report, report_name
from titan_ckpt.tui.goto import HINT, is_time, link_to
from titan_ckpt.tui.history import History, Place
from titan_ckpt.tui.rows import RowLink, clean, shown, truncate
from titan_ckpt.tui.screens import PANES
from titan_ckpt.tui.screens.checkpoints import CheckpointsPane
from titan_ckpt.tui.screens.help import HelpScreen
from titan_ckpt.tui.screens.logs import LogsPane
from titan_ckpt.tui.session.loading import SessionLoader
from titan_ckpt.tui.session.session import Session
from titan_ckpt.tui.terminal import has_shell
from titan_ckpt.tui.widgets.key_bar import KeyBar
from titan_ckpt.tui.widgets.line_view import LineView
from titan_ckpt.tui.widgets.looks import AsciiFilter, ColourlessFilter, is_ascii_terminal
from titan_ckpt.tui.widgets.pane import Pane
from titan_ckpt.tui.widgets.prompt import Prompt

FOLLOW_S = 2.0
INTERRUPTED = 130


class TitanApp(App[None]):
    """`titan-ckpt tui`."""

    CSS_PATH = "app.tcss"
    TITLE = "titan-ckpt"
    ENABLE_COMMAND_PALETTE = True
    ALLOW_SELECT = False  # `y` copies; a selection would take ctrl+c
    COMMANDS = App.COMMANDS | {Jumps}
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012 (as Textual declares it)
    VERTICAL_BREAKPOINTS = [(0, "-tiny"), (18, "-low"), (30, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(n), f"screen_number({n})", f"screen {n}", show=False) for n in range(1, 9)),
        Binding("q", "quit", "quit", show=False),
        Binding("ctrl+c", "interrupt", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "suspend", show=False, priority=True),
        Binding("question_mark", "help", "help", show=False),
        Binding("slash", "filter", "filter", show=False),
        Binding("colon", "go_to", "go to", show=False),
        Binding("n", "next_problem(1)", "next problem", show=False),
        Binding("N", "next_problem(-1)", "previous problem", show=False),
        Binding("space", "pin", "pin", show=False),
        Binding("y", "copy", "copy", show=False),
        Binding("e", "edit", "open in $EDITOR", show=False),
        Binding("x", "export", "export the report", show=False),
        Binding("f", "follow", "follow", show=False),
        Binding("escape,backspace,alt+left,left_curly_bracket", "back", "back", show=False),
        Binding("alt+right,right_curly_bracket", "forward", "forward", show=False),
    ]

    def __init__(
        self,
        content: Content,
        *,
        clock: Callable[[], float] = time.time,
        first_screen: int = 0,
        theme: str = themes.DARK.name,
        driver_class: type[Driver] | None = None,
    ) -> None:
        super().__init__(driver_class=driver_class)
        self._colourless, self._ascii = ColourlessFilter(self.no_color), AsciiFilter(is_ascii_terminal())
        for each in themes.THEMES.values():
            self.register_theme(each)
        self.theme = theme
        self.session = Session(content=content, clock=clock)
        self._loader = SessionLoader(self, self.session, self._on_loaded, self.show_status)
        self._history = History()
        self._above: list[tuple[Session, int, int]] = []
        self._first_screen = first_screen or (
            CheckpointsPane.number if content.has_runs or content.step is not None else 1
        )
        self._is_interrupted, self._num_ticks, self._status_text = False, 0, ""
        self._working: list[str] = []

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's filters, no colour with NO_COLOR, and plain characters on a terminal that has no others."""
        return [*super().get_line_filters(), *(each for each in (self._colourless, self._ascii) if each.enabled)]

    def compose(self) -> ComposeResult:
        yield TabBar()
        yield VerdictBar()
        with ContentSwitcher(initial=f"pane-{self._first_screen}", id="panes"):
            for pane in PANES:
                yield pane(self.session)
        yield Prompt()
        yield KeyBar(self.simulate_key)

    def on_mount(self) -> None:
        self._loader.load_all()
        self.screen.set_focus(self.pane.body)
        self._repaint()
        self.theme_changed_signal.subscribe(self, lambda _: self._repaint())
        self.set_interval(FOLLOW_S / 2, self._tick)
        self.set_interval(1.0, self._paint_bars)

    def on_unmount(self) -> None:
        self._loader.close()

    @property
    def pane(self) -> Pane:
        """The current screen."""
        return self.query_one(f"#{self.query_one('#panes', ContentSwitcher).current}", Pane)

    @property
    def is_settled(self) -> bool:
        """Whether all loading and computing is done."""
        return not self._loader.doing and not self._working and self.pane.is_settled

    def show_number(self, number: int) -> None:
        """Show a screen without adding to the history; its first frame is whole."""
        with self.batch_update():
            self.query_one("#panes", ContentSwitcher).current = f"pane-{number}"
            self.pane.lay_out()
        self.screen.set_focus(self.pane.body)
        self._paint_bars()
        self.show_status("")

    def action_screen_number(self, number: int) -> None:
        if number != self.pane.number:
            self._history.leave(self._here())
            self.show_number(number)

    def on_tab_bar_clicked(self, message: TabBar.Clicked) -> None:
        self.action_screen_number(message.number)

    def on_verdict_bar_clicked(self) -> None:
        """Show what the verdict is about."""
        incident = self.session.incident.value
        link = incident.link_of(incident.top) if incident is not None else RowLink(screen=CheckpointsPane.number)
        if link is not None:
            self.go(link)

    def on_pane_go(self, message: Pane.Go) -> None:
        self.go(message.link)

    def go(self, link: RowLink) -> None:
        """Show the item of `link`."""
        self._history.leave(self._here())
        self.session.select(link.group, link.seq)
        if link.screen != self.pane.number:
            self.show_number(link.screen)
        self.pane.open_link(link)

    def _here(self) -> Place:
        return Place(
            screen=self.pane.number, lane=self.session.lane, seq=self.session.seq, cursor=self.pane.body.cursor
        )

    def _return_to(self, place: Place) -> None:
        self.session.lane, self.session.seq = place.lane, place.seq
        self.show_number(place.screen)
        self.pane.body.move_to(place.cursor)

    async def action_back(self) -> None:
        """Close what is open, then go to the place before, then to the folder of runs."""
        if self.prompt.is_open:
            self.close_prompt()
        elif self.pane.go_back():
            return
        elif (place := self._history.back(self._here())) is not None:
            self._return_to(place)
        elif self._above:
            await self._show_session(*self._above.pop())

    def action_forward(self) -> None:
        if (place := self._history.forward(self._here())) is not None:
            self._return_to(place)

    def on_pane_open(self, message: Pane.Open) -> None:
        what, look = f"opening {redact(message.url)}", partial(find_content, message.url, message.incident)
        self.on_pane_work(Pane.Work(what, look, self._opened))

    def _opened(self, content: Content) -> None:
        self._above.append((self.session, self.pane.body.cursor, self.pane.number))
        first = 1 if content.chosen is not None else CheckpointsPane.number
        content = content.beside(self.session.content)
        self.call_next(self._show_session, Session(content=content, clock=self.session.clock), None, first)

    async def _show_session(self, session: Session, cursor: int | None, number: int) -> None:
        """Rebuild all screens over another session. `cursor` is None for a new session, which still has to be loaded."""
        self._loader.close()
        self.session, self._history = session, History()
        self._loader = SessionLoader(self, session, self._on_loaded, self.show_status)
        panes = self.query_one("#panes", ContentSwitcher)
        with self.batch_update():
            panes.current = None
            await panes.remove_children()
            for pane in PANES:
                await panes.add_content(pane(session))
            if cursor is None:
                self._loader.load_all()
            self.show_number(number)
        if cursor is not None:  # a new list places its own cursor
            self.call_after_refresh(self.pane.body.move_to, cursor)

    async def on_event(self, event: events.Event) -> None:
        """Handle a key at once, also if a click beside all widgets took the focus, and clear the message of the key before.

        Textual would queue it at the focused widget: of keys that arrive together, those after `/` would be taken for commands.
        """
        if isinstance(event, events.Key) and not event.is_forwarded:
            self._is_interrupted &= event.key == "ctrl+c"
            if self._status_text:
                self.show_status("")
            if self.focused is None and len(self.screen_stack) == 1 and self.query(Prompt):
                self.screen.set_focus(self.prompt if self.prompt.is_open else self.pane.body)
            if isinstance(self.focused, LineView) and await self._check_bindings(event.key):
                return
        await super().on_event(event)

    def _on_loaded(self) -> None:
        self.pane.update_rows()
        self._paint_status()
        self._paint_bars()

    def _tick(self) -> None:
        """Look again every FOLLOW_S, and twice as often where a verdict on a live job has to be confirmed."""
        self._num_ticks, incident = self._num_ticks + 1, self.session.incident.value
        if self._num_ticks % 2 == 0 or (incident is not None and incident.awaits_confirmation):
            self._follow()
            for pane in [pane for pane in self.query(Pane) if pane.display]:  # none while another session is opened
                pane.update_rows()  # ages

    def _follow(self) -> None:
        """Look again while following, and where one look has to be confirmed; else judge a job anew that may go on."""
        incident = self.session.incident.value
        is_open = self.session.is_following or (incident is not None and incident.is_unconfirmed)
        (self._loader.reload_if_rested if is_open else self._loader.judge_if_rested)()

    def action_follow(self) -> None:
        self.session.is_following = not self.session.is_following
        self.show_status("" if self.session.is_following else "not following")
        if self.session.is_following:
            self.pane.followed()
        self.pane.update_rows()
        self._follow()

    def on_pane_work(self, message: Pane.Work) -> None:
        self._working.append(message.what)
        self._paint_status()
        tasks.start(self, message.what, message.work, message.done, self.show_status)

    def on_finished(self, message: tasks.Finished) -> None:
        if message.what in self._working:
            self._working.remove(message.what)
        tasks.finish(message)
        self._paint_status()

    def on_task_output(self, message: tasks.TaskOutput) -> None:
        message.show(message.value)
        self._paint_bars()  # it may have found damage

    def action_next_problem(self, direction: int) -> None:
        self.pane.next_problem(direction)

    def action_pin(self) -> None:
        self.pane.pin()

    def action_copy(self) -> None:
        if text := clean(shown(self.pane.text_to_copy())):
            self.copy_to_clipboard(text)
        self.show_status(f"copied: {truncate(text, 60)}" if text else "nothing to copy")

    async def action_help(self) -> None:
        await self.push_screen(HelpScreen(self.pane))

    def action_interrupt(self) -> None:
        """Ctrl-C closes what is open over the screen, else quits when it is pressed twice."""
        if len(self.screen_stack) > 1:
            self.pop_screen()
        elif self.prompt.is_open:
            self.close_prompt()
        elif self._is_interrupted:
            self.exit(return_code=INTERRUPTED)
        else:
            self._is_interrupted = True
            self.show_status("press ctrl+c again to quit")

    def action_suspend_process(self) -> None:
        """Suspend if a shell can continue the program: in a container or `ssh host titan-ckpt tui` nobody could."""
        if has_shell():
            super().action_suspend_process()
        else:
            self.show_status("there is no shell to return to")

    def action_go_to(self) -> None:
        self.ask(HINT, "", self.go_to)

    def go_to(self, text: str) -> None:
        """Go to the place that `text` names."""
        if is_time(text):
            self.action_screen_number(LogsPane.number)
            self.query_one(LogsPane).go_to_time(text)
            return
        link = link_to(self.session, text, self.pane.number)
        if link is None:
            self.show_status(f"{text!r} is no rank, operation, step, host or time that is known here")
        else:
            self.go(link)

    def action_filter(self) -> None:
        self.ask(self.pane.filter_hint, self.pane.filter_text, self.pane.set_filter)

    def action_edit(self) -> None:
        """Open the line of code under the cursor, or the line of a log."""
        place = self.pane.place_to_edit()
        self.show_status("no line of code here" if place is None else open_in_editor(self, *place))

    def action_export(self) -> None:
        incident = self.session.incident.value
        if incident is None:
            self.show_status(f"no report to export: {self.session.incident.text}")
            return

        def export(path: str) -> None:
            write = partial(export_report, incident, self.session.clock(), path)
            self.on_pane_work(Pane.Work("writing the report", write, self.show_status))

        self.ask(EXPORT_HINT, report_name(incident), export)

    @property
    def prompt(self) -> Prompt:
        """The line in which answers are typed."""
        return self.query_one(Prompt)

    def ask(self, label: str, initial: str, then: Callable[[str], None]) -> None:
        """Show the prompt; enter passes its text to `then`, esc cancels."""
        self.query_one(KeyBar).show_message(label)
        self.prompt.ask(label, initial, then)

    def on_input_submitted(self, message: Input.Submitted) -> None:
        then = self.close_prompt()
        if then is not None:
            then(message.value.strip())

    def close_prompt(self) -> Callable[[str], None] | None:
        """Hide the prompt and focus the screen."""
        then = self.prompt.close()
        self.screen.set_focus(self.pane.body)
        self._paint_status()
        return then

    def on_pane_show_status(self, message: Pane.ShowStatus) -> None:
        self.show_status(message.text)

    def show_status(self, text: str) -> None:
        """Show `text` on the status line; an empty text restores the key hints."""
        self._status_text = text
        self._paint_status()

    def _paint_status(self) -> None:
        if not self.query(Prompt) or self.prompt.is_open:  # there is none any more while the program ends
            return
        is_following = self.session.is_following
        doing = [*self._working, *([] if is_following else self._loader.doing)]
        keys = self.pane.useful_keys()
        self.query_one(KeyBar).show_state(self._status_text, doing, keys, is_following=is_following)

    def _paint_bars(self) -> None:
        paint_bars(self, self.session)

    def _repaint(self) -> None:
        """Paint all lines anew: the size or the colours have changed, or another program wrote on the terminal."""
        self._paint_bars()
        self._paint_status()
        for widget in (self.screen, *self.query("LineView, OneLine")):
            widget.refresh()

    def on_resize(self) -> None:
        self.call_later(self._repaint)  # the new size is not known yet

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:  # noqa: ARG002 (Textual's)
        return system_commands(self, self.action_screen_number)

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, Palette):
            self.push_screen(Palette(id="--command-palette"))
