"""Write the report to a file: as a page, as Markdown, as text, or all operations as a trace; its ending says which."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from titan_ckpt.console.escapes import escape_text
from titan_ckpt.console.picture import MARK, write_marked, write_picture
from titan_ckpt.debug.report.html_page import report_html
from titan_ckpt.debug.report.markdown import report_markdown
from titan_ckpt.debug.report.text import report_text
from titan_ckpt.debug.report.trace import trace_parts
from titan_ckpt.errors import AlreadyExistsError, UsageError
from titan_ckpt.location import redact_text
from titan_ckpt.tui.data.incident import Incident
from titan_ckpt.tui.rows import clean

EXPORT_HINT = "export to a file: .html page, .md Markdown, .txt text, .json trace for ui.perfetto.dev"


def report_name(incident: Incident) -> str:
    """The name of a report's file to begin with."""
    return f"{clean(incident.run.incident).replace('/', '-') or 'incident'}-report.html"


def export_report(incident: Incident, now_s: float, path: str) -> str:
    """Write the report to `path`, whole or not at all, never over a file of another program; returns what to say.

    `now_s`: the present (seconds since epoch). UsageError for a name with another ending, TitanError where it cannot be written.
    """
    write = _WRITERS.get(os.path.splitext(path)[1].lower())
    if write is None:
        raise UsageError(
            f"{f'{path}: ' if path else ''}give a name that ends with {', '.join(_WRITERS)}; nothing was written"
        )
    if incident.awaits_confirmation:
        raise UsageError("not written: one look at a live job is no verdict; press x again after the next look")
    place = os.path.expanduser(path)
    replaced = ", in place of an earlier one" if os.path.lexists(place) else ""
    try:
        write(incident, place, now_s)
    except AlreadyExistsError as error:
        raise AlreadyExistsError(
            f"not written: {path} is there already, without our mark; give another name"
        ) from error
    except ValueError as error:  # a path that no file can have
        raise UsageError(f"{path}: {error}") from error
    return f"report written to {path}{replaced}"


def _write_page(incident: Incident, path: str, now_s: float) -> None:
    page = report_html(incident.run, incident.verdicts, incident.states, now_s)
    write_picture(path, page, is_forced=False)


def _write_markdown(incident: Incident, path: str, now_s: float) -> None:
    _write(path, [f"{MARK}\n", _plain(report_markdown(incident.run, incident.verdicts, now_s))])


def _write_text(incident: Incident, path: str, now_s: float) -> None:
    _write(path, [_plain(report_text(incident.run, incident.verdicts, now_s))])


def _write_trace(incident: Incident, path: str, now_s: float) -> None:  # noqa: ARG001 (as the others)
    _write(path, trace_parts(incident.run, incident.top, mark=MARK))


def _write(path: str, parts: Iterable[str]) -> None:
    write_marked(path, parts, is_forced=False)


def _plain(text: str) -> str:
    """Without secrets, and without what a terminal would obey."""
    return escape_text(redact_text(text))


_WRITERS: Mapping[str, Callable[[Incident, str, float], None]] = {
    ".html": _write_page, ".md": _write_markdown, ".txt": _write_text, ".json": _write_trace,
}  # fmt: skip
