"""Verdicts as JSON, for other programs. `docs/bots.md` describes it; `docs/verdict.schema.json` is its JSON Schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from titan_ckpt.debug.incident.records import Run, Verdict


def report_json(run: Run, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The interface for other programs."""
    return {
        "version": 1,
        "url": run.url,
        "incident": run.incident,
        "world_size": run.world_size,
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "flags": [asdict(flag) for flag in run.flags],
    }
