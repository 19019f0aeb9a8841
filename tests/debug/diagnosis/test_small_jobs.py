"""The first verdict on jobs of a few operations, whole: who did what, who waits for whom, how sure."""

from __future__ import annotations

import re

import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import diagnose
from titan_ckpt.debug.incident.records import Verdict
from tools.paths import DATA

JOBS = {
    name: (text, expected)
    for name, text, expected in re.findall(
        r"^## (.+)\n((?:[^=].*\n)+)= (.+)$", (DATA / "small_jobs.txt").read_text(), re.M
    )
}


def told(verdict: Verdict) -> str:
    """Its verdict, culprits and victims, operation, confidence, [waiter>awaited ...], evidence and headline."""
    kind = "/".join(part for part in (verdict.verdict, verdict.subtype) if part)
    who, victims = (",".join(map(str, ranks)) or "-" for ranks in (verdict.culprits, verdict.victims))
    chain = " ".join(f"{waiter}>{awaited}" for waiter, awaited in verdict.chain)
    what = f"#{verdict.seq} {verdict.group or '-'} {verdict.op or '-'}"
    facts = ",".join("-" if item.rank is None else str(item.rank) for item in verdict.evidence)
    return f"{kind} {who} of {victims} {what} {verdict.confidence:.3f} [{chain}] by {facts or '-'}: {verdict.headline}"


def test_all_jobs_of_the_file_are_read() -> None:
    assert len(JOBS) == (DATA / "small_jobs.txt").read_text().count("## ")


@pytest.mark.parametrize("name", JOBS)
def test_first_verdict_on_a_small_job(name: str) -> None:
    text, expected = JOBS[name]
    assert told(diagnose(job(text))[0]) == expected
