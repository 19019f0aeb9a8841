"""Verdicts on the jobs of a folder of runs: those that have left no end of their own, and write no more or have no process."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator

from titan_ckpt.errors import TitanError
from titan_ckpt.tui.data.content import find_content, left_no_process
from titan_ckpt.tui.data.incident import NO_FAULT, load_incident
from titan_ckpt.tui.data.run_folders import Runs, RunSummary, is_silent

_MOST_JUDGED, _MOST_BYTES = 16, 32 << 20


def find_verdicts(listed: Runs, now_s: float, known: Container[str]) -> dict[str, str]:
    """Verdicts on the newest runs without an end whose key is not `known`: of silent ones "" without a fault, of others only a
    fault. Only where the evidence is small enough to be read beside the list."""
    return dict(_verdicts(listed, now_s, known))


def _verdicts(listed: Runs, now_s: float, known: Container[str]) -> Iterator[tuple[str, str]]:
    open_ends = (run for run in listed.found if not run.last.reason and run.key not in known)
    for run in itertools.islice(open_ends, _MOST_JUDGED):
        if is_silent(run.last, now_s):
            yield run.key, _verdict_on(run, must_be_gone=False)
        elif text := _verdict_on(run, must_be_gone=True):
            yield run.key, text


def _verdict_on(run: RunSummary, *, must_be_gone: bool) -> str:
    try:
        content = find_content(run.url)
        if not content.has_evidence or sum(size for _, size, _ in content.evidence) > _MOST_BYTES:
            return ""
        if must_be_gone and not left_no_process(content):
            return ""
        top = load_incident(run.url).top
    except (TitanError, OSError):
        return ""  # its own screens say why
    if top.verdict in NO_FAULT:
        return top.headline if must_be_gone and top.is_undecided else ""
    return f"{top.verdict}: {top.headline} (confidence {top.confidence:.0%})"
