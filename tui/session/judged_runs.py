"""Verdicts on the jobs of a folder of runs: those that have left no end of their own, and write no more."""

from __future__ import annotations

import itertools
from collections.abc import Container

from titan_ckpt.errors import TitanError
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import NO_FAULT, load_incident
from titan_ckpt.tui.data.run_folders import Runs, RunSummary, is_silent

_MOST_JUDGED, _MOST_BYTES = 16, 32 << 20


def find_verdicts(listed: Runs, now_s: float, known: Container[str]) -> dict[str, str]:
    """Verdicts on the newest silent runs whose key is not `known`, "" without a fault; only where the evidence is small enough
    to be read beside the list."""
    silent = (run for run in listed.found if is_silent(run.last, now_s))
    return {run.key: _verdict_on(run) for run in itertools.islice(silent, _MOST_JUDGED) if run.key not in known}


def _verdict_on(run: RunSummary) -> str:
    try:
        content = find_content(run.url)
        if not content.has_evidence or sum(size for _, size, _ in content.evidence) > _MOST_BYTES:
            return ""
        top = load_incident(run.url).top
    except (TitanError, OSError):
        return ""  # its own screens say why
    return "" if top.verdict in NO_FAULT else f"{top.verdict}: {top.headline} (confidence {top.confidence:.0%})"
