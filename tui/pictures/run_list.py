"""The runs of a folder: state, step, loss, newest whole checkpoint, size, age, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rich.cells import cell_len

from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.tui.data.run_folders import LastRecord, Runs, RunSummary, is_silent
from titan_ckpt.tui.data.runs import time_of
from titan_ckpt.tui.pictures.braille import number
from titan_ckpt.tui.rows import Role, Row, RowLink, TextSpan, counted, fitted, head, row, truncate, wrapped

_CLOCKS_S = 60.0
_LEAST_NAME = 12  # of a run
_RUN_COLUMNS: Mapping[str, int] = {
    "state": 11,
    "step": 9,
    "loss": 10,
    "whole": 9,
    "size": 11,
    "age": 11,
}  # with the gap
_RUN_COLUMNS_KEPT = ("state", "step", "whole", "age", "loss", "size", "mesh")  # what is left out first comes last


def run_rows(listed: Runs, now_s: float, width: int) -> Iterator[Row]:
    """A line per run, the one with the newest checkpoint first; then which folders were not looked at."""
    runs, unseen = listed.found, listed.unseen
    longest = min(
        max((cell_len(run.name) for run in runs), default=0), max(width - sum(_RUN_COLUMNS.values()), _LEAST_NAME)
    )
    cells = [_run_cells(run, now_s) for run in runs]
    mesh = 2 + max([4, *(len(each["mesh"][0]) for each in cells)])
    columns = _run_columns({**_RUN_COLUMNS, "mesh": mesh}, width - longest)
    names = "".join(_run_cell(name, size, name) for name, size in columns.items())
    yield head(f"{'run':<{longest}}{names}")
    for run, each in zip(runs, cells, strict=True):
        spans = [(_run_cell(name, size, each[name][0]), each[name][1]) for name, size in columns.items()]
        link = RowLink(screen=7, name=run.url)
        yield row(fitted(run.name, longest), *spans, link=link, is_problem=bool(run.problem or run.verdict))
        for text in filter(None, (run.verdict, run.problem)):
            yield from (row("    ", (line, Role.BAD), link=link) for line in wrapped(text, width - 4))
    if not runs:
        yield row("no runs here")
    if unseen:
        what = counted(len(unseen), "deeper folder")
        for line in wrapped(
            f"{what} not looked at, such as {unseen[0]}; `titan-ckpt tui FOLDER` lists its runs", width
        ):
            yield row((line, Role.DIM))


def _run_columns(sizes: Mapping[str, int], room: int) -> dict[str, int]:
    """The columns for which there is room beside the name of a run, with their sizes."""
    kept: set[str] = set()
    for name in _RUN_COLUMNS_KEPT:
        if room < sizes[name]:
            break
        room -= sizes[name]
        kept.add(name)
    return {name: size for name, size in sizes.items() if name in kept}


def _run_cell(column: str, size: int, text: str) -> str:
    """A gap, then a word at the left or a number at the right of its column."""
    return f"  {text:{'<' if column in ('state', 'mesh') else '>'}{size - 2}}"


def _run_cells(run: RunSummary, now_s: float) -> dict[str, TextSpan]:
    commit, last = run.newest.commit if run.newest is not None else None, run.last
    word, role = ("incident", Role.WARN) if run.is_incident else run_state(last, now_s, run.verdict)
    return {
        "state": (word, role),
        "step": (_number(last.step), Role.PLAIN),
        "loss": (_number(last.loss), Role.PLAIN),
        "whole": (str(commit.step), Role.PLAIN) if commit else ("" if run.is_incident else "none", Role.WARN),
        "size": (format_size(commit.size_bytes) if commit else "", Role.PLAIN),
        "age": (since(time_of(commit.created) if commit else last.time_s, now_s), Role.PLAIN),
        "mesh": (str(commit.mesh or "1") if commit else "", Role.PLAIN),
    }


def run_state(last: LastRecord, now_s: float, verdict: str = "") -> tuple[str, Role]:
    """Whether a run goes on, by its last record and the verdict on its job: `running`, `silent` for minutes, `stopped` by a
    fault, how it ended, "" if nothing is known."""
    if last.reason:
        return truncate(last.reason, 9), Role.DIM
    if math.isnan(last.time_s):
        return "", Role.DIM
    if is_silent(last, now_s):
        return "silent", Role.BAD if verdict else Role.WARN
    return ("stopped", Role.BAD) if verdict else ("running", Role.GOOD)


def _number(value: float) -> str:
    return "" if math.isnan(value) else number(value)


def since(time_s: float | None, now_s: float) -> str:
    """An age; "" if the time is not known, or is yet to come by more than clocks differ."""
    if time_s is None or math.isnan(time_s) or time_s - now_s > _CLOCKS_S:
        return ""
    return format_duration(max(0.0, now_s - time_s))
