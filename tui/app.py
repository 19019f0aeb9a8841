"""The application: eight numbered screens over one session, a prompt, a status line, help and a command palette."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.filter import LineFilter
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Input
from textual.widgets.input import Selection

from titan_ckpt.console.escapes import escape_text
from titan_ckpt.debug.report.text import report_text
from titan_ckpt.location import redact, redact_text
from titan_ckpt.tui import tasks
from titan_ckpt.tui.data.content import Content, find_content
from titan_ckpt.tui.data.standing import standing
from titan_ckpt.tui.goto import link_to
from titan_ckpt.tui.rows import RowLink, clean, shown, truncate
from titan_ckpt.tui.screens import PANES
from titan_ckpt.tui.screens.checkpoints import CheckpointsPane
from titan_ckpt.tui.screens.help import HelpScreen
from titan_ckpt.tui.screens.logs import LogsPane
from titan_ckpt.tui.session.loading import SessionLoader
from titan_ckpt.tui.session.session import Session
from titan_ckpt.tui.tabs import tab_at, tabs_text
from titan_ckpt.tui.widgets.line_view import LineView
from titan_ckpt.tui.widgets.looks import AsciiFilter, is_ascii_terminal, is_light_terminal
from titan_ckpt.tui.widgets.one_line import OneLine
from titan_ckpt.tui.widgets.pane import Pane

FOLLOW_S = 2.0
INTERRUPTED = 130


class TitanApp(App[None]):
    """`titan-ckpt tui`."""

    CSS_PATH = "app.tcss"
    TITLE = "titan-ckpt"
    ENABLE_COMMAND_PALETTE = True
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
        Binding("e", "export", "export the report", show=False),
        Binding("f", "follow", "follow", show=False),
        Binding("escape", "back", "back", show=False),
    ]

    def __init__(self, content: Content, *, clock: Callable[[], float] = time.time, first_screen: int = 0) -> None:
        super().__init__()
        self._ascii = AsciiFilter(enabled=is_ascii_terminal())
        if is_light_terminal():
            self.theme = "textual-light"
        self.session = Session(content=content, clock=clock)
        self._loader = SessionLoader(self, self.session, self._on_loaded, self.show_status)
        self._history: list[int] = []
        self._above: list[tuple[Session, int]] = []
        self._first_screen = first_screen or (
            CheckpointsPane.number if content.has_runs or content.step is not None else 1
        )
        self._answer: Callable[[str], None] | None = None
        self._is_interrupted = False
        self._working: list[str] = []
        self._status_text = ""

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's filters, and plain characters on a terminal that has no others."""
        return [*super().get_line_filters(), *([self._ascii] if self._ascii.enabled else [])]

    def compose(self) -> ComposeResult:
        yield OneLine(id="tabs")
        yield OneLine(id="verdict")
        with ContentSwitcher(initial=f"pane-{self._first_screen}", id="panes"):
            for pane in PANES:
                yield pane(self.session)
        yield Input(id="prompt", classes="hidden", compact=True, select_on_focus=False)
        yield OneLine(id="status")

    def on_mount(self) -> None:
        self._paint_tabs()
        self._loader.load_all()
        self.screen.set_focus(self.pane.body)
        self._paint_status()
        self.set_interval(FOLLOW_S, self._follow)
        self.set_interval(1.0, self._paint_verdict)

    def on_unmount(self) -> None:
        self._loader.close()

    # ------------------------------------------------------------------------------------------------- screens

    @property
    def pane(self) -> Pane:
        """The current screen."""
        return self.query_one(f"#{self.query_one('#panes', ContentSwitcher).current}", Pane)

    @property
    def is_settled(self) -> bool:
        """Whether all loading and computing is done."""
        return not self._loader.is_busy and not self._working

    def show_number(self, number: int) -> None:
        """Show a screen without adding to the history."""
        self.query_one("#panes", ContentSwitcher).current = f"pane-{number}"
        self.pane.update_rows()
        self.screen.set_focus(self.pane.body)
        self._paint_tabs()
        self.show_status("")

    def action_screen_number(self, number: int) -> None:
        if number != self.pane.number:
            self._history.append(self.pane.number)
            self.show_number(number)

    def on_click(self, event: events.Click) -> None:
        """A click on a tab shows its screen."""
        if isinstance(event.widget, OneLine) and event.widget.id == "tabs":
            number = tab_at(tabs_text(self.pane.number, self.size.width), event.x)
            if number is not None:
                self.action_screen_number(number)

    def on_pane_go(self, message: Pane.Go) -> None:
        self.go(message.link)

    def go(self, link: RowLink) -> None:
        """Show the item of `link`."""
        self.session.select(link.group, link.seq)
        self.action_screen_number(link.screen)
        self.pane.open_link(link)

    async def action_back(self) -> None:
        if self._answer is not None:
            self.close_prompt()
        elif self.pane.go_back():
            return
        elif self._history:
            self.show_number(self._history.pop())
        elif self._above:
            await self._show_session(*self._above.pop())

    # ----------------------------------------------------------------------------------------- a folder of runs

    def on_pane_open(self, message: Pane.Open) -> None:
        what, url = f"opening {redact(message.url)}", message.url
        self.on_pane_work(Pane.Work(what, lambda: find_content(url), self._opened))

    def _opened(self, content: Content) -> None:
        cursor = self.pane.body.cursor
        self._above.append((self.session, cursor))
        self.call_next(self._show_session, Session(content=content, clock=self.session.clock), None)

    async def _show_session(self, session: Session, cursor: int | None) -> None:
        """Rebuild all screens over another session. `cursor` is None for a new session, which still has to be loaded."""
        self._loader.close()
        self.session, self._history = session, []
        self._loader = SessionLoader(self, session, self._on_loaded, self.show_status)
        panes = self.query_one("#panes", ContentSwitcher)
        with self.batch_update():
            panes.current = None
            await panes.remove_children()
            for pane in PANES:
                await panes.add_content(pane(session))
            if cursor is None:
                self._loader.load_all()
            self.show_number(CheckpointsPane.number)
        if cursor is not None:  # a new list places its own cursor
            self.call_after_refresh(self.pane.body.move_to, cursor)

    # -------------------------------------------------------------------------------------------------- loading

    async def on_event(self, event: events.Event) -> None:
        """Handle a key at once, and clear the message of the key before.

        Textual would queue it at the focused widget: of keys that arrive together, those after `/` would be taken for commands.
        """
        if isinstance(event, events.Key) and not event.is_forwarded:
            if event.key != "ctrl+c":
                self._is_interrupted = False
            if self._status_text:
                self.show_status("")
            if isinstance(self.focused, LineView) and await self._check_bindings(event.key):
                return
        await super().on_event(event)

    def _on_loaded(self) -> None:
        self.pane.update_rows()
        self._paint_status()
        self._paint_verdict()

    def _follow(self) -> None:
        """Look again: while following, and once more when one look at a live job has to be confirmed."""
        incident = self.session.incident.value
        is_wanted = self.session.is_following or (incident is not None and incident.is_unconfirmed)
        if is_wanted and self._loader.is_rested:
            self._loader.reload()

    def action_follow(self) -> None:
        self.session.is_following = not self.session.is_following
        self.show_status("following: new data is loaded every 2 s" if self.session.is_following else "not following")
        if self.session.is_following:
            self.pane.followed()
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

    # ---------------------------------------------------------------------------------------- keys of all screens

    def action_next_problem(self, direction: int) -> None:
        self.pane.next_problem(direction)

    def action_pin(self) -> None:
        self.pane.pin()

    def action_copy(self) -> None:
        text = clean(shown(self.pane.copied_text()))
        self.copy_to_clipboard(text)
        self.show_status(f"copied: {text[:60]}" if text else "nothing to copy")

    async def action_help(self) -> None:
        await self.push_screen(HelpScreen(self.pane))

    def action_interrupt(self) -> None:
        """Ctrl-C closes what is open over the screen, else quits when it is pressed twice."""
        if len(self.screen_stack) > 1:
            self.pop_screen()
        elif self._answer is not None:
            self.close_prompt()
        elif self._is_interrupted:
            self.exit(return_code=INTERRUPTED)
        else:
            self._is_interrupted = True
            self.show_status("press ctrl+c again to quit")

    def action_go_to(self) -> None:
        if self.session.incident.value is None:
            self.show_status(f"nowhere to go: {self.session.incident.text}")
        else:
            self.ask("go to a rank (12), an operation (#7), a host (node3) or a time (14:05:30)", "", self._go_to)

    def _go_to(self, text: str) -> None:
        incident = self.session.incident.value
        assert incident is not None
        if re.fullmatch(r"\d+:\d+.*", text):
            self.action_screen_number(LogsPane.number)
            self.query_one(LogsPane).go_to_time(text)
            return
        link = link_to(incident, text, self.pane.number)
        if link is None:
            self.show_status(f"{text!r} is no rank, operation, host or time of this incident")
        else:
            self.go(link)

    def action_filter(self) -> None:
        self.ask(self.pane.filter_hint, self.pane.filter_text, self.pane.set_filter)

    def action_export(self) -> None:
        if self.session.incident.value is None:
            self.show_status(f"no report to export: {self.session.incident.text}")
            return
        name = self.session.incident.value.run.incident or "incident"
        self.ask("export the report to", f"{name}-report.txt", self._export)

    def _export(self, path: str) -> None:
        incident = self.session.incident.value
        assert incident is not None
        try:
            with Path(path).expanduser().open("x", encoding="utf-8") as file:
                file.write(escape_text(redact_text(report_text(incident.run, incident.verdicts))))
        except (OSError, ValueError) as error:  # ValueError: a path that no file can have
            self.show_status(f"{path} not written: {getattr(error, 'strerror', None) or error}")
        else:
            self.show_status(f"report written to {path}")

    # ---------------------------------------------------------------------------------------- prompt, bottom line

    def ask(self, label: str, initial: str, then: Callable[[str], None]) -> None:
        """Show the prompt; enter passes its text to `then`, esc cancels."""
        prompt = self.query_one("#prompt", Input)
        prompt.placeholder = "enter to accept, esc to cancel"
        prompt.value = initial
        prompt.selection = Selection(
            0, len(initial)
        )  # at once: selected on focus, the first keys typed would be replaced
        prompt.remove_class("hidden")
        self._answer = then
        self.query_one("#status", OneLine).show(truncate(f" {label}", self.size.width))
        self.screen.set_focus(prompt)

    def on_input_submitted(self, message: Input.Submitted) -> None:
        answer = self._answer
        self.close_prompt()
        if answer is not None:
            answer(message.value.strip())

    def close_prompt(self) -> None:
        """Hide the prompt and focus the screen."""
        self._answer = None
        self.query_one("#prompt", Input).add_class("hidden")
        self.screen.set_focus(self.pane.body)
        self._paint_status()

    def on_pane_show_status(self, message: Pane.ShowStatus) -> None:
        self.show_status(message.text)

    def show_status(self, text: str) -> None:
        """Show `text` on the status line; an empty text restores the key hints."""
        self._status_text = text
        self._paint_status()

    def _paint_status(self) -> None:
        reading = [] if self.session.is_following else self._loader.reading
        doing = [*self._working, *(f"reading {what}" for what in reading)]
        if self._status_text and not doing:
            text = self._status_text
        elif doing:
            text = " · ".join([*([self._status_text] if self._status_text else []), *doing]) + " ..."
        else:
            text = self._hints()
        follow = "[following] " if self.session.is_following else ""
        self.query_one("#status", OneLine).show(truncate(f" {follow}{text}", self.size.width))

    def _hints(self) -> str:
        """The screen's keys that fit on the status line."""
        text, room = "? help  q quit", self.size.width - 2 - len("[following] ") * self.session.is_following
        for key, what in self.pane.keys:
            longer = f"{text}  {key} {what}"
            text = longer if len(longer) <= room else text
        return text

    def _paint_tabs(self) -> None:
        self.query_one("#tabs", OneLine).show(tabs_text(self.pane.number, self.size.width))

    def _paint_verdict(self) -> None:
        """The bar on top of every screen; no bar where there is no incident, and none any more while the program ends."""
        incident, now_s = self.session.incident.value, self.session.clock()
        looked = f"   looked {max(now_s - self.session.looked_s, 0):.0f} s ago" if self.session.is_following else ""
        for bar in self.query("#verdict").results(OneLine):
            bar.display = incident is not None
            if incident is not None:
                found = standing(incident, now_s)
                bar.set_classes(found.role or "plain")
                bar.show(f" {found.text(self.size.width - 2 - len(looked))}{looked}")

    def on_resize(self) -> None:
        self.call_later(self._paint_tabs)  # the new size is not known yet
        self.call_later(self._paint_verdict)
        self.call_later(self._paint_status)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:  # noqa: ARG002 (Textual's)
        """Commands of the palette: every screen, and the keys that all screens share."""
        for pane in PANES:
            yield SystemCommand(f"{pane.number} {pane.label}", f"show screen {pane.number}", _shower(self, pane.number))
        yield SystemCommand("Next problem", "go to the next problem (n)", lambda: self.action_next_problem(1))
        yield SystemCommand("Go to", "a rank, an operation, a host or a time (:)", self.action_go_to)
        yield SystemCommand("Filter", "show matching lines only (/)", self.action_filter)
        yield SystemCommand("Copy", "copy the line under the cursor (y)", self.action_copy)
        yield SystemCommand("Export the report", "write the diagnosis to a text file (e)", self.action_export)
        yield SystemCommand("Follow", "load new data every 2 s (f)", self.action_follow)
        yield SystemCommand("Theme", "choose other colours", self.action_change_theme)
        yield SystemCommand("Help", "all keys (?)", self.action_help)
        yield SystemCommand("Quit", "exit (q)", self.action_quit)


def _shower(app: TitanApp, number: int) -> Callable[[], None]:
    return lambda: app.action_screen_number(number)
