"""The last operations of an incident drawn over time, as SVG: a row per rank or party of ranks that are alike. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from titan_ckpt.console.units import format_duration
from titan_ckpt.debug.incident.records import Run
from titan_ckpt.debug.incident.waits import began_ns, last_sign_ns, pending
from titan_ckpt.debug.report.alike import Alike
from titan_ckpt.debug.report.facts import HANGS, LAST_WAITS

MOST_ROWS = 48
SHOWN_OPERATIONS = 24
WIDTH, LABEL, ROW, HEAD = 1000, 210, 18, 34
STOP_TEXT = 200  # at most so wide is the text at the last rank's wait


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """The time that is drawn, in ns. What is pending reaches to the right edge."""

    start: int
    end: int

    def x(self, time_ns: int) -> float:
        share = (time_ns - self.start) / (self.end - self.start)
        return LABEL + (WIDTH - LABEL) * min(max(share, 0.0), 1.0)


def timeline(run: Run, parties: Sequence[Alike], unended: str) -> str:
    """The SVG; "" if no operation has a time. `unended`: what is said of an operation without an end."""
    shown = [party for party in parties[:MOST_ROWS] if len(run.ranks[party.ranks[0]].operations)]
    window = _window(run, shown)
    if window is None:
        return ""
    height = HEAD + ROW * len(shown) + 4
    lines = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="operations over time">',
        *_axis(window, height),
    ]
    for index, party in enumerate(shown):
        y = HEAD + ROW * index
        lines.append(f'<text class="{party.mark or "label"}" x="0" y="{y + 13}">{escape(party.label)}</text>')
        lines += _bars(run, party.ranks[0], window, y, unended)
    if unended == HANGS and (began := began_ns(run)):
        x = window.x(began)
        lines.append(f'<line class="stop" x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD - 6}" y2="{height}"/>')
        place = f'x="{x + 3:.1f}"' if x < WIDTH - STOP_TEXT else f'x="{x - 3:.1f}" text-anchor="end"'
        lines.append(f'<text class="stop" {place} y="{HEAD - 10}">{LAST_WAITS}</text>')
    return "\n".join([*lines, "</svg>"])


def _window(run: Run, shown: Sequence[Alike]) -> _Window | None:
    """From the middle party's 24th operation before its last to a third after the last one that was issued."""
    issued = [run.ranks[party.ranks[0]].operations["created_ns"] for party in shown]
    issued = [np.sort(times[times > 0]) for times in issued]
    starts = [int(times[-SHOWN_OPERATIONS:][0]) for times in issued if len(times)]
    if not starts:
        return None
    start, last = int(np.median(starts)), max(int(times[-1]) for times in issued if len(times))
    room = max((last - start) // 3, 1_000_000)
    return _Window(start=min(start, last), end=max(min(last_sign_ns(run), last + room), last + room // 4))


def _axis(window: _Window, height: int) -> Iterator[str]:
    for part in range(5):
        time_ns = window.start + (window.end - window.start) * part // 5
        x = window.x(time_ns)
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD - 6}" y2="{height}"/>'
        text = "0" if part == 0 else format_duration((time_ns - window.start) / 1e9)
        yield f'<text class="tick" x="{x:.1f}" y="11">{text}</text>'


def _bars(run: Run, rank: int, window: _Window, y: int, unended: str) -> Iterator[str]:
    """The rank's operations; what did not end is painted last, on top."""
    table = run.ranks[rank].operations
    first = max(len(table) - 4 * SHOWN_OPERATIONS, 0)
    for row in first + np.argsort(pending(table[first:]), kind="stable"):
        entry = table[row]
        begin, end = int(entry["created_ns"]), int(entry["completed_ns"])
        is_pending = bool(pending(table[row]))
        end = window.end if is_pending else end or begin
        if not begin or begin > window.end or end < window.start:
            continue
        kind = "pending" if is_pending else "p2p" if entry["p2p"] else "done"
        x, operation = window.x(begin), run.operation(rank, int(row))
        width = max(window.x(end) - x, 1.5)
        number = f" #{operation.seq}" if operation.seq >= 0 else ""
        took = unended if is_pending else format_duration((end - begin) / 1e9)
        title = escape(f"rank {rank}: {operation.op}{number} of group {operation.group}, {operation.sizes}: {took}")
        yield (
            f'<rect class="{kind}" x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{ROW - 4}"><title>{title}</title></rect>'
        )
