"""Work off the screen's thread. Threads are daemons, so that quitting never waits for a slow store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from textual.app import App
from textual.message import Message

from titan_ckpt.errors import TitanError


@dataclass
class Finished(Message):
    """A task ended: with `result`, or with `error` where that is not None."""

    what: str
    result: Any
    error: Exception | None
    done: Callable[[Any], None]
    failed: Callable[[str], None]


@dataclass
class TaskOutput(Message):
    """A task has something to show before its end."""

    value: Any
    show: Callable[[Any], None]


def start(
    app: App[Any], what: str, work: Callable[[], Any], done: Callable[[Any], None], failed: Callable[[str], None]
) -> None:
    """Run `work` in a thread; the app gets a Finished message."""

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001 (handed over: shown if expected, raised on the screen's thread if not)
            error = caught
        app.post_message(Finished(what, result, error, done, failed))

    threading.Thread(target=run, name=f"tui: {what}", daemon=True).start()


def finish(message: Finished) -> None:
    """Hand a task's end to who asked for it, on the screen's thread; an error that is nobody's fault is shown as text."""
    if message.error is None:
        message.done(message.result)
    elif isinstance(message.error, TitanError | OSError):
        message.failed(str(message.error))
    else:
        raise message.error
