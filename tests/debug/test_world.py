"""The analyzer on 135 pieces of evidence from jobs that hung, crashed or were healthy, with the truth about each.

`tests/data/incidents.tar.xz` holds them and MANIFEST.json: `culprits` (these ranks) or `any_of` (one or more), `verdicts` that
are right (none: any that accuses the right ranks), `innocent` ranks, `undecided` (an honest answer), `healthy` jobs.
"""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.errors import NotFoundError
from tools.paths import DATA

QUIET = {"HEALTHY", "STRAGGLER", "RUNNING"}
OPEN = {"INSUFFICIENT_DATA", "RUNNING"}
# Least number of right answers by kind of evidence: of 25 for each kind of a job but 15 live ones, 15 dumps, 5 texts.
LEAST_RIGHT = {
    "console_raw": 20,
    "console_tee": 23,
    "logs": 23,
    "nccl": 15,
    "recorder_live": 14,
    "recorder_post": 23,
    "text": 5,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    with tarfile.open(DATA / "incidents.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def outcome(folder: Path, truth: Mapping[str, Any]) -> str:
    """right, undecided, part (not all culprits), accused, healthy, refused, or kind (right ranks, wrong verdict)."""
    try:
        top = diagnose(open_run(str(folder)))[0]
    except NotFoundError:
        return "refused"
    accused, culprits, any_of = set(top.culprits), set(truth.get("culprits", ())), set(truth.get("any_of", ()))
    if truth.get("healthy"):
        return "accused" if accused and top.verdict not in QUIET else "right" if top.verdict in QUIET else "undecided"
    if top.verdict == "HEALTHY":
        return "healthy"
    if accused & set(truth.get("innocent", ())) or top.verdict in truth.get("never", ()):
        return "accused"
    if not accused or top.verdict in OPEN:
        is_named = not accused and top.verdict in truth["verdicts"]
        is_honest = truth.get("undecided") or "INSUFFICIENT_DATA" in truth["verdicts"] or not (culprits or any_of)
        return "right" if is_honest or is_named else "undecided"
    if accused == culprits or (any_of and accused <= any_of | culprits):
        return "right" if not truth["verdicts"] or top.verdict in truth["verdicts"] else "kind"
    return "accused" if accused - culprits - any_of else "part"


@pytest.mark.parametrize("kind", LEAST_RIGHT)
def test_evidence_of_the_world(kind: str, world: Path) -> None:
    truths = json.loads((world / "MANIFEST.json").read_text())
    of_kind = {name: truth for name, truth in truths.items() if kind in name.split("/")}
    found = {name: outcome(world / name, truth) for name, truth in of_kind.items()}
    counts = Counter(found.values())
    wrong = {name: what for name, what in found.items() if what != "right"}
    assert counts["accused"] == counts["healthy"] == 0, wrong
    assert counts["right"] >= LEAST_RIGHT[kind], wrong
