"""Answers of log services to a query, whose lines stand deep in one JSON document.

Formats: Grafana Loki's HTTP API (`query_range`: `data.result[]`, push: `streams[]`, each `{"stream": labels, "values":
[[nanoseconds, line], ...]}`); Elasticsearch and OpenSearch `_search` (`hits.hits[]._source`, or `fields` with lists of values);
Splunk's `output_mode=json` (`results[]._raw`); CloudWatch Logs Insights (`results[]`, lists of `{"field", "value"}`);
Datadog's Logs API v2 (`data[].attributes`); Azure Monitor (`tables[]` of `columns` and `rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Entry = dict[str, Any]


def service_entries(value: Any) -> list[Entry]:
    """The entries that the document holds, as it orders them; [] if it is none of these."""
    if not isinstance(value, dict):
        return []
    inner = _inside(value, "data") or value
    readers = (
        (inner.get("result", inner.get("streams")), _of_stream),
        (_inside(value, "hits").get("hits"), _of_hit),
        (value.get("results"), _of_result),
        (value.get("data"), _of_attributes),
        (value.get("tables"), _of_table),
    )
    return next((found for items, read in readers if (found := [e for one in _items(items) for e in read(one)])), [])


def _of_stream(one: Mapping[str, Any]) -> Iterator[Entry]:
    pairs = [pair for pair in _list(one.get("values")) if isinstance(pair, list) and len(pair) in (2, 3)]
    if pairs and str(pairs[0][0]) > str(pairs[-1][0]):
        pairs.reverse()
    labels = _inside(one, "stream")
    yield from ({**labels, "time": str(at), "log": line} for at, line, *_ in pairs if isinstance(line, str))


def _of_hit(one: Mapping[str, Any]) -> Iterator[Entry]:
    fields = {name: found[0] for name, found in _inside(one, "fields").items() if isinstance(found, list) and found}
    yield from filter(None, [{**fields, **_inside(one, "_source")}])


def _of_result(one: Mapping[str, Any]) -> Iterator[Entry]:
    yield from filter(None, [dict(one)])


def _of_attributes(one: Mapping[str, Any]) -> Iterator[Entry]:
    yield from filter(None, [_inside(one, "attributes")])


def _of_table(one: Mapping[str, Any]) -> Iterator[Entry]:
    """The rows by the names of the columns; a damaged row may be shorter, and keeps what it has."""
    names = [str(column.get("name")) for column in _list(one.get("columns")) if isinstance(column, dict)]
    yield from (dict(zip(names, row, strict=False)) for row in _list(one.get("rows")) if isinstance(row, list))


def _items(found: Any) -> Iterator[Entry]:
    """The objects of a list; one may be a list of cells."""
    for one in _list(found):
        if isinstance(one, dict):
            yield one
        elif isinstance(one, list):
            yield {str(cell.get("field")): cell.get("value") for cell in one if isinstance(cell, dict)}


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _inside(value: Any, key: str) -> Entry:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}
