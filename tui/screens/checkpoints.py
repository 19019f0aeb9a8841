"""Screen 7: the runs of a folder or the checkpoints of a run; tensors and their cut; verify, diff, reshard and prune plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, TypeVar

from textual.binding import Binding, BindingType

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.console.units import format_size
from titan_ckpt.errors import DamagedError, TitanError
from titan_ckpt.tui import tasks
from titan_ckpt.tui.data.runs import CopyKey, StepCopy, StepState, TierName
from titan_ckpt.tui.pictures.run_list import run_rows
from titan_ckpt.tui.pictures.saves import checkpoint_rows, save_rows
from titan_ckpt.tui.rows import Row, RowLink, RowList, Rows, counted, placeholder, row, truncate_start
from titan_ckpt.tui.screens.checkpoint_rows import (
    Verified,
    cut_rows,
    display_url,
    error_rows,
    parse_keep,
    prune_rows,
    reshard_rows,
    saving_rows,
    step_rows,
    tensor_diff_rows,
    tensor_rows,
    verified,
    verify_rows,
)
from titan_ckpt.tui.session.session import Session
from titan_ckpt.tui.widgets.pane import Pane
from titan_ckpt.tui.widgets.part import Part, Space

_AGES_S = 10.0  # after which the ages of steps and runs are painted anew
_ABSENT = "Open the run for its checkpoints: `titan-ckpt tui URL` with the URL in its `save.url`."
T = TypeVar("T")
ShowProgress = Callable[[str], None]
_PATH_WIDTH = 32


class CheckpointsPane(Pane):
    """The list of steps, one opened step, or the result of a key such as `v`."""

    number = 7
    label = "Checkpoints"
    purpose = "steps, sizes and damage; what is in a checkpoint"
    keys = (
        ("enter", "open"),
        ("v", "verify every byte"),
        ("d", "diff with the pinned step"),
        ("r", "reshard plan"),
        ("p", "prune preview"),
        ("f", "follow"),
    )
    parts = (Part(name="step"), Part(name="saves", is_of_line=False))
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "verify", show=False), Binding("d", "diff", show=False), Binding("r", "reshard", show=False),
        Binding("p", "prune", show=False),
    ]  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._opened: Checkpoint | None = None
        self._answer: list[Row] | None = None
        self._pinned_step: int | None = None
        self._shown = 0
        self._cursors: list[int] = []
        self._wanted = (
            None if session.content.step is None else (session.content.step, 0)
        )  # a step, and the cursor on it
        self._contents: dict[int, Checkpoint | str] = {}  # of steps the cursor was on, or why one cannot be read
        self._is_looking = False

    def on_mount(self) -> None:
        self.set_interval(_AGES_S, self.update_rows)

    def useful_keys(self) -> Iterable[tuple[str, str]]:
        has_steps = self.session.checkpoints.value is not None and bool(self.session.checkpoints.value.steps)
        runs = self.session.runs.value
        return self.keys if has_steps else (self.keys[0], self.keys[-1]) if runs is not None and runs.found else ()

    def wants_parts(self) -> bool:
        return self.session.checkpoints.value is not None

    def part_rows(self, space: Space) -> Iterable[Row]:
        """What is in the step under the cursor, and the cadence of all saves."""
        found, metrics = self.session.checkpoints.value, self.session.metrics.value
        if found is None:
            return ()
        if space.name == "saves":
            return save_rows(found, metrics, space.width)
        step = self._step()
        if step is None:
            return ()
        current = self.body.current
        name = current.link.name if current is not None and current.link is not None else ""
        if self._opened is not None and name in self._opened.manifest.by_fqn:
            return cut_rows(self._opened, name)
        known = self._opened or self._contents.get(step)
        if known is None:
            self._look_into(step)
            return [placeholder(f"reading step {step} ...")]
        listed = found.find(step)
        damage = listed.best.damage.replace(f"{listed.best.store}/", "") if listed is not None else ""
        if damage or isinstance(known, str):
            return error_rows(damage or str(known), space.width)
        return checkpoint_rows(known, metrics, space.width)

    def _look_into(self, step: int) -> None:
        """Read the index of a step in a thread, one at a time: the cursor may run over many steps of a slow store."""
        copies = self._copies(step)
        if self._is_looking or not copies:
            return
        self._is_looking = True

        def work() -> Checkpoint | str:
            try:
                return self._open(copies[0])
            except TitanError as error:
                return str(error).replace(copies[0].store.url, display_url(copies[0].store.url))

        def done(found: Checkpoint | str) -> None:
            self._is_looking = False
            self._contents[step] = found
            self.update_parts(force=True)

        self.work(f"reading step {step}", work, done)

    def state(self) -> tuple[object, ...]:
        parts = (self.session.checkpoints, self.session.runs)
        versions = tuple((part.version, part.text) for part in parts)
        age = int(self.session.clock() / _AGES_S)
        return (*versions, age, self._shown, self._pinned_step, self.session.incident.version)

    def title(self) -> str:
        where = truncate_start(display_url(self.session.content.shown_url), _PATH_WIDTH)
        found = self.session.checkpoints.value
        if self._opened is not None:
            manifest = self._opened.manifest
            facts = f"{counted(len(manifest.tensors), 'tensor')} · {format_size(manifest.size_bytes)}"
            return f"step {self._opened.step} · mesh {manifest.mesh or 'unknown'} · {facts}"
        if self.session.content.has_runs:
            runs = self.session.runs.value
            return f"{where} · {runs.counts if runs is not None else self.session.runs.text}"
        if found is None:
            return "checkpoints"
        ahead, safe = found.newest(TierName.FAST), found.newest(TierName.MIRROR)
        behind = f" · mirror up to step {safe}" if safe != ahead and safe is not None else ""
        return f"{where} · {found.counts(' · ') or 'no steps yet'}{behind}"

    def make_rows(self, width: int) -> Rows:
        if self._answer is not None:
            return RowList(self._answer)
        if self._opened is not None:
            return RowList(tensor_rows(self._opened))
        incident = self.session.incident.value
        saving = list(saving_rows(incident, width)) if incident is not None else []
        has_list = self.session.runs.value is not None or self.session.checkpoints.value is not None
        above, below = ([], [row(), *saving]) if has_list else ([*saving, row()], [])
        return RowList([*(above if saving else ()), *self._list(width), *(below if saving else ())])

    def _list(self, width: int) -> Iterable[Row]:
        steps, runs, now_s = self.session.checkpoints, self.session.runs, self.session.clock()
        if runs.value is not None:
            return run_rows(runs.value, now_s, width)
        if self.session.content.has_runs:
            return self.absent_rows(runs, "", width)
        if steps.value is not None:
            return step_rows(steps.value, self._pinned_step, now_s, width)
        return self.absent_rows(steps, _ABSENT, width)

    # -- levels: a run, a step, a tensor or an answer

    def _show(self, *, opened: Checkpoint | None = None, answer: Iterable[Row] | None = None) -> None:
        """Go one level down; esc returns to the current line."""
        self._cursors.append(self.body.cursor)
        self._opened, self._answer = opened or self._opened, None if answer is None else list(answer)
        self._repaint(0)

    def update_rows(self, *, force: bool = False) -> None:
        """In a new list, move the cursor to the step that was asked for, else to the first line that enter opens."""
        if not self.is_attached:
            return
        before, cursor, current = self.body.rows, self.body.cursor, self.body.current
        super().update_rows(force=force)
        rows = self.body.rows
        if rows is before or len(rows) < 2:
            return
        if current is not None and current.link is not None:
            self._stay_at(current.link, before, cursor)
        if self._wanted is not None and cursor == self._wanted[1] and self._opened is None and self._answer is None:
            self._move_to_step(self._wanted[0])
        if self.body.cursor == 0:
            links = [rows.row(index, self.body.line_width).link for index in range(2)]
            self.body.move_to(1 if links[0] is None and links[1] is not None else 0)

    def _stay_at(self, link: RowLink, before: Rows, cursor: int) -> None:
        """Keep the cursor on its run or step, which may have another place in a new list."""
        first_then, first_now = self._place_of(link, before), self._place_of(link, self.body.rows)
        if first_then is not None and first_now is not None:
            self.body.move_to(first_now + cursor - first_then)

    def _place_of(self, link: RowLink, rows: Rows) -> int | None:
        width = self.body.line_width
        return next((index for index in range(len(rows)) if rows.row(index, width).link == link), None)

    def _move_to_step(self, step: int) -> None:
        """Move now, and again when the lines wrap in another width, until the cursor is moved."""
        rows, width = self.body.rows, self.body.line_width
        links = (rows.row(index, width).link for index in range(len(rows)))
        place = next((index for index, link in enumerate(links) if link is not None and link.step == step), None)
        if place is not None:
            self.body.move_to(place)
        self._wanted = (step, self.body.cursor)

    def select(self, link: RowLink) -> None:
        """The list of steps, with the cursor on the step."""
        self._opened, self._answer = None, None
        self._cursors.clear()
        self._repaint(0)
        if link.step is not None:
            self._move_to_step(link.step)

    def _repaint(self, cursor: int) -> None:
        self._shown += 1
        self.body.move_to(cursor)
        self.update_rows(force=True)
        self.body.move_to(cursor or self.body.cursor)

    def go_back(self) -> bool:
        if super().go_back():
            return True
        if self._answer is None and self._opened is None:
            return False
        if self._answer is None:
            self._opened = None
        self._answer = None
        self._repaint(self._cursors.pop() if self._cursors else 0)
        return True

    def chosen(self, chosen: Row) -> None:
        link = chosen.link
        if link is None or link.screen != self.number:
            super().chosen(chosen)
        elif link.step is None:
            self.post_message(self.Open(link.name))
        elif self._opened is None:
            self._ask_of_step(
                "opening", lambda copies, _: self._open(copies[0]), lambda found: self._show(opened=found)
            )
        elif link.name and self._answer is None:
            self._show(answer=cut_rows(self._opened, link.name))

    def _open(self, copy: StepCopy) -> Checkpoint:
        """Runs in a thread. What cannot be opened because it is damaged is marked in the list."""
        try:
            return open_checkpoint(copy.store.url, step=copy.step, store=copy.store)
        except DamagedError as error:
            self.app.post_message(tasks.TaskOutput({copy.key: str(error)}, self._note_damage))
            raise

    def _note_damage(self, found: dict[CopyKey, str]) -> None:
        self.session.note_damage(found)
        self.update_rows()

    # -- actions on a step

    def pin(self) -> None:
        step = self._step()
        if step is None:
            self.post_message(self.ShowStatus("no step on this line"))
            return
        self._pinned_step = None if self._pinned_step == step else step
        self.post_message(self.ShowStatus(f"step {step} {'unpinned' if self._pinned_step is None else 'pinned'}"))
        self.update_rows()

    def _step(self) -> int | None:
        if self._opened is not None:
            return self._opened.step
        current = self.body.current
        return current.link.step if current is not None and current.link is not None else None

    def _copies(self, step: int) -> list[StepCopy]:
        """Readable copies of a step, the preferred one first."""
        found = self.session.checkpoints.value
        known = found.find(step) if found is not None else None
        if known is None:
            return []
        return [
            known.best,
            *(copy for copy in known.copies if copy is not known.best and copy.state != StepState.PARTIAL),
        ]

    def _ask_of_step(
        self, what: str, work: Callable[[list[StepCopy], ShowProgress], T], then: Callable[[T], None]
    ) -> None:
        """Run `work` on the step under the cursor in a thread, then call `then`; a TitanError is shown as rows.

        `work` reports its progress to the status line.
        """
        step, width = self._step(), self.body.line_width
        if step is None:
            self.post_message(self.ShowStatus("move the cursor to a step first"))
            return
        copies = self._copies(step)
        if not copies:
            self.post_message(self.ShowStatus(f"step {step} no longer exists"))
            return

        app = self.app

        def show_progress(text: str) -> None:
            app.post_message(tasks.TaskOutput(text, self._show_status))

        def safely() -> T | TitanError:
            try:
                return work(copies, show_progress)
            except TitanError as error:
                return error

        def done(found: T | TitanError) -> None:
            if isinstance(found, TitanError):
                self._show(answer=error_rows(str(found), width))
            else:
                then(found)

        self.work(f"{what} step {step}", safely, done)

    def _answer_with(self, rows: list[Row]) -> None:
        self._show_status("")
        self._show(answer=rows)

    def _show_status(self, text: str) -> None:
        self.post_message(self.ShowStatus(text))

    def action_verify(self) -> None:
        width = self.body.line_width

        def work(copies: list[StepCopy], show_progress: ShowProgress) -> list[Verified]:
            progress = tasks.ByteProgress(show_progress, sum(copy.size_bytes or 0 for copy in copies))
            return [verified(copy, progress.add) for copy in copies]

        def done(found: list[Verified]) -> None:
            self.session.note_damage({each.copy.key: each.damage for each in found})
            self._answer_with(list(verify_rows(found, width)))

        self._ask_of_step("verifying", work, done)

    def action_diff(self) -> None:
        pinned = self._pinned_step
        if pinned is None:
            self.post_message(self.ShowStatus("pin one step with space, move to another, then press d"))
            return
        others = self._copies(pinned)

        def work(copies: list[StepCopy], show_progress: ShowProgress) -> list[Row]:
            pair = [*others[:1], copies[0]]
            progress = tasks.ByteProgress(show_progress, sum(copy.size_bytes or 0 for copy in pair))
            return list(tensor_diff_rows(self._open(pair[0]), self._open(pair[-1]), progress.add))

        self._ask_of_step(f"comparing step {pinned} with", work, self._answer_with)

    def action_reshard(self) -> None:
        if self._step() is None:
            self.post_message(self.ShowStatus("move the cursor to a step first"))
        else:
            self.ask("mesh, such as pp=2,dp_shard=4", "", self._plan)

    def _plan(self, mesh: str) -> None:
        width = self.body.line_width

        def work(copies: list[StepCopy], _: ShowProgress) -> list[Row]:
            return list(reshard_rows(self._open(copies[0]), mesh, width))

        self._ask_of_step(f"planning {mesh} for", work, self._answer_with)

    def action_prune(self) -> None:
        if self.session.checkpoints.value is None:
            self.post_message(self.ShowStatus("no steps to prune"))
        else:
            self.ask("number of newest steps to keep: 3, or 3 1000 to keep every 1,000th step too", "3", self._prune)

    def _prune(self, text: str) -> None:
        found, width = self.session.checkpoints.value, self.body.line_width

        def work() -> list[Row]:
            try:
                return list(prune_rows(found, parse_keep(text), width)) if found is not None else []
            except TitanError as error:
                return error_rows(str(error), width)

        self.work("planning to prune", work, self._answer_with)
