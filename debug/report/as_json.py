"""Verdicts as JSON, for other programs. `docs/bots.md` describes it; `SCHEMA` is its JSON Schema (draft 2020-12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from titan_ckpt.debug.incident.kinds import FlagKind, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Run, Verdict
from titan_ckpt.debug.incident.waits import Wait, began_ns, last_sign_ns, stopped_s, waits
from titan_ckpt.debug.report.action import ActionKind, action_for
from titan_ckpt.debug.report.facts import commands, page_of

VERSION = 2
MAX_WAITS = 64


def report_json(run: Run, verdicts: Sequence[Verdict], now_s: float | None = None) -> dict[str, Any]:
    """The interface for other programs. `now_s`: the present (seconds since epoch), for the age of a hang."""
    top = verdicts[0]
    began_s, last_s = stopped_s(run, top, began_ns(run)) or None, last_sign_ns(run) / 1e9 or None
    since_s = began_s or last_s
    return {
        "version": VERSION,
        "url": run.url,
        "incident": run.incident,
        "world_size": run.world_size,
        "action": asdict(action_for(run, top)),
        "time": {
            "stopped_s": began_s,
            "last_sign_s": last_s,
            "age_s": max(0.0, now_s - since_s) if now_s is not None and since_s is not None else None,
        },
        "ranks": [{"rank": record.rank, "host": record.host, "pid": record.pid} for record in run.ranks.values()],
        "waiting": [_wait(wait) for wait in waits(run)[:MAX_WAITS]],
        "commands": [] if top.is_healthy else commands(run, top),
        "verdicts": [{**asdict(verdict), "page": page_of(verdict)} for verdict in verdicts],
        "flags": [asdict(flag) for flag in run.flags],
    }


def _wait(wait: Wait) -> dict[str, Any]:
    operation = wait.operation
    return {
        "ranks": list(wait.ranks), "group": str(operation.group), "seq": operation.seq if operation.seq >= 0 else None,
        "op": operation.op, "sizes": operation.sizes, "dtypes": operation.dtypes, "file": wait.file, "line": wait.line,
        "since_s": wait.since_ns / 1e9 or None,
    }  # fmt: skip


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}
_SECONDS, _WHOLE_OR_NULL = {"type": ["number", "null"]}, {"type": ["integer", "null"]}
_RANKS = _list({"type": "integer", "minimum": 0})
_EVIDENCE = _object(text=_TEXT, rank=_WHOLE_OR_NULL, source=_TEXT, file=_TEXT, line=_WHOLE)
_VERDICT = _object(
    verdict={"enum": list(VerdictKind)}, subtype={"enum": list(Subtype)}, culprits=_RANKS, suspects=_RANKS, victims=_RANKS,
    group=_TEXT, seq=_WHOLE_OR_NULL, op=_TEXT, step=_WHOLE_OR_NULL, confidence={"type": "number", "minimum": 0, "maximum": 1},
    headline=_TEXT, page=_TEXT, evidence=_list(_EVIDENCE), chain=_list(_RANKS), next_steps=_list(_TEXT), signal=_TEXT, file=_TEXT,
    line=_WHOLE,
)  # fmt: skip
_WAIT = _object(
    ranks=_RANKS,
    group=_TEXT,
    seq=_WHOLE_OR_NULL,
    op=_TEXT,
    sizes=_TEXT,
    dtypes=_TEXT,
    file=_TEXT,
    line=_WHOLE,
    since_s=_SECONDS,
)
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "titan-ckpt debug --json",
    **_object(
        version={"const": VERSION},
        url=_TEXT,
        incident=_TEXT,
        world_size=_WHOLE,
        action=_object(action={"enum": list(ActionKind)}, hosts=_list(_TEXT), reason=_TEXT),
        time=_object(stopped_s=_SECONDS, last_sign_s=_SECONDS, age_s=_SECONDS),
        ranks=_list(_object(rank=_WHOLE, host=_TEXT, pid=_WHOLE_OR_NULL)),
        waiting=_list(_WAIT),
        commands=_list(_TEXT),
        verdicts={**_list(_VERDICT), "minItems": 1},
        flags=_list(_object(flag={"enum": list(FlagKind)}, text=_TEXT, ranks=_RANKS, source=_TEXT)),
    ),
}
