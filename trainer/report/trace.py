"""A trace of the loop's phases on every rank, in Chrome's trace event format: open it in Perfetto (ui.perfetto.dev).

Format: "Trace Event Format", complete events (`ph: X`), times in microseconds.
A rank is a process of the trace; clocks are the machines' own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from titan_ckpt.trainer.report.phases import Span


def trace_events(spans: Iterable[Span], *, rank: int, name: str) -> list[dict[str, Any]]:
    """The events of one rank."""
    spans = list(spans)
    threads = {thread: number for number, thread in enumerate(dict.fromkeys(span.thread for span in spans))}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}]
    events += [
        {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": thread}}
        for thread, number in threads.items()
    ]
    events += [
        {
            "ph": "X", "pid": rank, "tid": threads[span.thread], "name": span.name, "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6, "args": {"step": span.step},
        }
        for span in spans
    ]  # fmt: skip
    return events


def write_trace(path: str, events: list[dict[str, Any]]) -> None:
    """A file that the viewer opens."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
