"""Logs as browsers and log services save them: pages of HTML, and tables of CSV with a column for the message.

Columns: Splunk (`_time`, `host`, `_raw`), CloudWatch Logs Insights (`@timestamp`, `@message`, `@logStream`), Datadog (`Date`,
`Host`, `Message`), Grafana (`Time`, `Line`), BigQuery and Kibana (`timestamp`, `message`). Most list the newest first.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Sequence

TABLES = (".csv",)
PAGES = (".html", ".htm")
_TAG = re.compile(r"<(?:br|/p|/div|/tr|/li)\b[^<>]{0,200}>|<[!/a-zA-Z][^<>]{0,4000}>")
_MESSAGES = ("_raw", "@message", "message", "line", "log", "textpayload", "body", "content", "msg")
_TIMES = ("_time", "@timestamp", "timestamp", "time", "date", "ts")
_HOSTS = ("@logstream", "pod", "pod_name", "host", "hostname", "source")
_RANKS = ("rank", "global_rank")
_FILES = ("source", "filename", "file", "@log", "log_file")
_RANK_OF_FILE = re.compile(r"rank[_-]?0*(\d{1,6})(?!\d)[^/]*$", re.IGNORECASE)


def page_text(page: str) -> str:
    """The text of a page of HTML."""
    bare = _TAG.sub(lambda tag: "\n" if tag[0][1:3] in ("br", "/p", "/d", "/t", "/l") else "", page)
    return html.unescape(bare).replace("\n\n", "\n")


def table_lines(text: str, where: str) -> list[str]:
    """The entries of a table, the oldest first, each as a JSON object; [] if none of its columns is a message."""
    try:
        rows = list(csv.reader(io.StringIO(text.lstrip("\ufeff"), newline="")))
    except csv.Error as error:
        raise ValueError(f"{where}: no table: {error}") from error
    names = [name.strip().lower() for name in rows[0]] if rows else []
    columns = {
        key: place
        for key, known in (
            ("message", _MESSAGES),
            ("timestamp", _TIMES),
            ("host", _HOSTS),
            ("rank", _RANKS),
            ("file", _FILES),
        )
        if (place := _column(names, known)) is not None
    }
    if "message" not in columns:
        return []
    entries = [
        _entry({key: row[place] for key, place in columns.items() if place < len(row)}) for row in rows[1:] if any(row)
    ]
    first, last = (entries[n].get("timestamp", "") for n in (0, -1)) if entries else ("", "")
    return [json.dumps(entry) for entry in (reversed(entries) if first > last else entries)]


def _entry(found: dict[str, str]) -> dict[str, str]:
    """An entry, with the rank that the name of its file gives."""
    file = found.pop("file", "")
    match = _RANK_OF_FILE.search(file)
    return {"rank": match.group(1), **found} if match else found


def _column(names: Sequence[str], known: Sequence[str]) -> int | None:
    return next((names.index(name) for name in known if name in names), None)
