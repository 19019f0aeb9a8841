"""A seeded sample of `make hostile`: process tables and planted links."""

from __future__ import annotations

import pytest

from tools.hostile import processes
from tools.hostile.evidence_links import run_evidence_links


def test_planted_links_are_followed_nowhere() -> None:
    outcome = run_evidence_links(seed=3, seconds=0.5)
    assert outcome.failures == []
    assert outcome.counts["refused"]
    assert outcome.counts["written"]


def test_no_process_of_any_table_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        processes, "REAL", {kind: processes.REAL[kind] for kind in ("recorder stopped", "handler replaced")}
    )
    outcome = processes.run_processes(seed=3, seconds=2)
    assert outcome.failures == []
    assert outcome.cases
