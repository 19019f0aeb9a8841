"""Confidences: a single table, every entry used and shown in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

from titan_ckpt.debug.incident.confidence import Basis
from titan_ckpt.debug.incident.kinds import VerdictKind
from tools.docs.confidence_docs import with_table
from tools.paths import DOCS

DIAGNOSIS = Path(__file__).parents[2] / "debug" / "diagnosis"


def test_hangs_page_shows_the_table_of_confidences() -> None:
    page = (DOCS / "hangs.md").read_text()
    assert with_table(page) == page, "run `python -m scripts.write_docs`"


def test_every_verdict_has_a_confidence_with_a_basis() -> None:
    based = {verdict for basis in Basis for verdict in basis.verdicts}
    assert based == set(VerdictKind) - {VerdictKind.CALLSITE_DIVERGENCE}  # a mismatch traced back to its cause


def test_every_basis_is_used_by_a_detector() -> None:
    code = "\n".join(path.read_text() for path in DIAGNOSIS.rglob("*.py"))
    assert [basis.name for basis in Basis if f"Basis.{basis.name}" not in code] == []


def test_no_detector_has_a_confidence_of_its_own() -> None:
    bare = re.compile(r"confidence(?::\s*float)?\s*[=*]\s*\d")
    found = [path.name for path in DIAGNOSIS.rglob("*.py") if bare.search(path.read_text())]
    assert found == []
