"""Load a session in threads, and reload it while following."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from textual.app import App

from titan_ckpt.errors import NotFoundError, TitanError
from titan_ckpt.location import absence, redact, scheme
from titan_ckpt.tui import tasks
from titan_ckpt.tui.data.content import Content, find_content
from titan_ckpt.tui.data.incident import NO_FAULT, Incident, load_incident
from titan_ckpt.tui.data.logs.files import LogFiles
from titan_ckpt.tui.data.logs.growth import grow
from titan_ckpt.tui.data.logs.index import HEAD_BYTES, LogIndex, load_logs
from titan_ckpt.tui.data.metrics import load_metrics
from titan_ckpt.tui.data.run_folders import load_runs
from titan_ckpt.tui.data.runs import find_damage, load_others, load_steps
from titan_ckpt.tui.data.standing import is_unsettled, ticking
from titan_ckpt.tui.session.judged_runs import find_verdicts
from titan_ckpt.tui.session.session import Loadable, Session

_SMALL_LOGS = 32 << 20
_BEFORE = "shown is what was read before"
MORE_S = 10.0  # between looks for more than a verdict without following
LEAST_REST = 1.0  # seconds of rest for each second that a look took


class SessionLoader:
    """Loads a session in threads. On the UI thread, calls `changed` after each load, and `show_status` if a reload failed."""

    def __init__(
        self, app: App[Any], session: Session, changed: Callable[[], None], show_status: Callable[[str], None]
    ) -> None:
        self._app = app
        self._session = session
        self._changed = changed
        self._show_status = show_status
        self._not_before_s = 0.0
        self._more_s = time.monotonic() + MORE_S
        self._is_lost = False  # the last look found nothing to read
        self._beside: list[str] = []

    @property
    def is_busy(self) -> bool:
        """Whether anything is loading."""
        s = self._session
        parts: tuple[Loadable[Any], ...] = (s.incident, s.checkpoints, s.runs, s.logs, s.metrics)
        return any(part.is_loading for part in parts)

    @property
    def doing(self) -> list[str]:
        """What is loading, with how much of it is read, and what is looked at beside."""
        s = self._session
        parts: tuple[Loadable[Any], ...] = (s.incident, s.checkpoints, s.runs, s.logs, s.metrics)
        return [*(f"reading {part.reading}" for part in parts if part.is_loading), *self._beside]

    def load_all(self) -> None:
        """Start loading everything that the content has."""
        s, content = self._session, self._session.content
        if content.has_evidence:
            self._load_incident(content)
        if content.has_checkpoints:
            self._load_steps(content)
        if content.has_runs:
            self._load_runs(content)
        if content.metrics:
            self._load(s.metrics, lambda: load_metrics(content.store, content.metrics))
        if content.logs:
            self._load_logs(content)

    def reload(self) -> None:
        """List the content again in a thread and load what has changed, if the last look has ended."""
        if not self.is_busy:
            content = self._session.content
            tasks.start(self._app, "looking for changes", lambda: _look_again(content), self._found, self._lost)

    def reload_if_rested(self) -> None:
        """Reload if the last look is long enough ago, so that a large job does not take all of the processor."""
        if time.monotonic() >= self._not_before_s:
            self.reload()

    def judge_if_rested(self) -> None:
        """Judge a job that may go on anew, if the last look has ended long enough ago; every MORE_S also load what else has
        changed of it, or of a list of runs."""
        now_s = time.monotonic()
        if self.is_busy or now_s < self._not_before_s:
            return
        s, content = self._session, self._session.content
        if now_s >= self._more_s and scheme(content.url) == "file":  # remote stores are listed while following
            self._more_s = now_s + MORE_S
            is_open = content.has_runs or s.incident.value is None or self._may_go_on()
            (self.reload if is_open else self._look_for_a_new_job)()
        elif self._may_go_on():
            self._load_incident(content)

    def _look_for_a_new_job(self) -> None:
        """List the folder of a job that has ended, and load what is there if it is another incident or has other files."""
        before = self._session.content

        def found(content: Content) -> None:
            is_other = (content.incident, content.evidence) != (before.incident, before.evidence)
            if self._session.content is before and (is_other or self._is_lost):
                self._found(content)

        tasks.start(self._app, "looking for a new job", lambda: _look_again(before), found, self._lost)

    def _found(self, content: Content) -> None:
        s, before = self._session, self._session.content
        s.content = content.beside(before)
        if self._is_lost:
            self._is_lost = False
            self._show_status("")
        if before.metrics and not content.metrics:
            self._show_status(f"{before.metrics} is gone: {_BEFORE}")
        if content.logs and (content.logs != before.logs or content.incident != before.incident):
            self._load_logs(content)
        if content.has_evidence and (content.evidence != before.evidence or self._may_go_on()):
            self._load_incident(content)
        elif s.incident.value is not None:
            s.looked_s = s.clock()  # and nothing has changed
        if content.has_checkpoints:
            self._load_steps(content)
        if content.has_runs:
            self._load_runs(content)
        if content.metrics:
            self._load(s.metrics, lambda: load_metrics(content.store, content.metrics))

    def _may_go_on(self) -> bool:
        """Whether another look may tell more of the job."""
        incident = self._session.incident.value
        return incident is not None and is_unsettled(incident, self._session.clock())

    def _load_incident(self, content: Content) -> None:
        """Read and judge; the look before confirms a verdict on a live job. A look that took long is not repeated at once."""
        s, started_s = self._session, time.monotonic()
        before = former = s.incident.value
        if former is not None and former.run.incident != content.incident:
            former = None

        def look() -> Incident:
            found = load_incident(content.url, content.chosen, on_read=self._progress(s.incident).show)
            if before is not None and _is_recorded(before) and not _is_recorded(found):
                raise NotFoundError(f"what the recorders wrote is gone; {_BEFORE}")
            return found.confirmed_by(former) if ticking(found, s.clock()) else found

        def after() -> None:
            s.looked_s = s.clock()
            found = s.incident.value
            if found is not None and former is not None and former.lanes:  # groups of one size may change places
                s.lane = found.lane_of(former.names[s.lane % len(former.lanes)])
            is_calm = found is None or (former is not None and found.top.verdict in NO_FAULT)
            if found is not None and not is_calm and (former is None or _story(found) != _story(former)):
                s.story += former is not None
                link = found.link_of(found.top)
                s.lane, s.seq = (found.lane_of(link.group), link.seq) if link is not None else (s.lane, None)
            self._not_before_s = time.monotonic() + LEAST_REST * (time.monotonic() - started_s)

        self._load(s.incident, look, after=after)

    def _lost(self, text: str) -> None:
        self._is_lost = True
        self._show_status(text)

    def close(self) -> None:
        """Close the log files."""
        if self._session.logs.value is not None:
            self._session.logs.value.files.close()

    def _load_steps(self, content: Content) -> None:
        """Load the steps here, then those of the run's other tiers, which may be slow or unreachable."""
        s, part = self._session, self._session.checkpoints

        def check() -> None:
            s.mark_damage()
            found = part.value
            if found is not None:
                self._look_beside("looking for damaged steps", lambda: find_damage(found, s.checked), s.note_checked)

        def others() -> None:
            s.mark_damage()
            found = part.value
            if found is not None and found.unread:
                self._load(part, lambda: load_others(found), after=check)
            else:
                check()

        if part.value is None:
            self._load(part, lambda: load_steps(content.store), after=others)
        else:
            self._load(part, lambda: load_others(load_steps(content.store)), after=check)

    def _load_runs(self, content: Content) -> None:
        """List the runs, then judge the jobs that are gone. A list that took long is not read again at once."""
        s, started_s = self._session, time.monotonic()

        def judge() -> None:
            self._more_s = time.monotonic() + MORE_S * max(1.0, time.monotonic() - started_s)
            s.mark_verdicts()
            found = s.runs.value
            if found is not None:
                look = partial(find_verdicts, found, s.clock(), s.judged)
                self._look_beside("judging the silent runs", look, s.note_verdicts)

        self._load(s.runs, lambda: load_runs(content.store), after=judge)

    def _look_beside(self, what: str, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Look at something in a thread without holding up the next look at the content; one look of a kind at a time."""
        if what in self._beside:
            return
        self._beside.append(what)

        def done(value: Any) -> None:
            self._beside.remove(what)
            then(value)
            self._changed()

        def failed(text: str) -> None:
            self._beside.remove(what)
            self._show_status(f"not done: {what}: {text}")

        tasks.start(self._app, what, work, done, failed)

    def _load_logs(self, content: Content) -> None:
        former = self._session.logs.value
        if former is None:
            self._load_first(LogFiles(content.store, content.logs))
        elif content.logs != former.files.files:
            self._load(
                self._session.logs, lambda: _reload_logs(former, content), after=lambda: self._close_former(former)
            )

    def _load_first(self, files: LogFiles) -> None:
        """Load all lines; if they are many, first show the beginning of each file."""

        total_bytes = sum(file.size_bytes for file in files.files)

        def whole() -> None:
            logs = self._session.logs
            self._load(logs, lambda: load_logs(files, on_bytes=self._progress(logs, total_bytes).add))

        if total_bytes > _SMALL_LOGS:
            self._load(self._session.logs, lambda: load_logs(files, head_bytes=HEAD_BYTES), after=whole)
        else:
            whole()

    def _close_former(self, former: LogIndex) -> None:
        now = self._session.logs.value
        if now is not None and now.files is not former.files:
            former.files.close()

    def _progress(self, part: Loadable[Any], total_bytes: int = 0) -> tasks.ByteProgress:
        """Shows how much of a part is read, from the thread that reads it."""

        def show(share: str) -> None:
            part.share = share
            self._changed()

        return tasks.ByteProgress(lambda text: self._app.post_message(tasks.TaskOutput(text, show)), total_bytes)

    def _load(self, part: Loadable[Any], work: Callable[[], Any], *, after: Callable[[], None] | None = None) -> None:
        part.is_loading, part.share = True, ""

        def done(value: Any) -> None:
            if part.error:
                self._show_status("")  # which says that it was not reloaded
            part.value, part.error, part.is_loading = value, "", False
            part.version += 1
            if after is not None:
                after()
            self._session.name_logs()
            self._changed()

        def failed(text: str) -> None:
            part.error, part.is_loading = text, False
            part.version += 1
            self._changed()
            if part.value is not None:
                self._show_status(f"{part.what} not reloaded: {text}")

        tasks.start(self._app, part.what, work, done, failed)


def _look_again(content: Content) -> Content:
    """List what is there now. What is raised says that it is gone, or why it was not listed."""
    try:
        return find_content(content.url, content.chosen)
    except (TitanError, OSError) as error:
        is_gone = bool(absence(content.url))
        raise NotFoundError(
            f"{redact(content.url)} is gone: {_BEFORE}" if is_gone else f"not reloaded: {error}"
        ) from error


def _is_recorded(incident: Incident) -> bool:
    """Whether anything but logs was read."""
    return any(record.dumps or record.stacks or record.has_recorder for record in incident.run.ranks.values())


def _story(incident: Incident) -> tuple[object, ...]:
    """What the selection follows: a job that hangs is no longer at the operation that was the newest before."""
    top = incident.top
    return top.verdict, top.culprits, top.group, top.seq


def _reload_logs(former: LogIndex, content: Content) -> LogIndex:
    """Index what the logs have grown by, or reload them if they changed in another way."""
    try:
        found = grow(former, former.files, content.logs)
    except (OSError, TitanError):
        found = None  # the full reload reports which file failed
    return found if found is not None else load_logs(LogFiles(content.store, content.logs))
