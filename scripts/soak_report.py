"""Write the results of a soak into docs/reliability.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from tools.paths import DOCS
from tools.report import replace_section

RELIABILITY = DOCS / "reliability.md"
INTRODUCTION = """\
`make soak` trains a small model with real ranks, saves behind training, kills, resumes on other meshes, reshards, copies, prunes
and verifies in an order drawn from a seed, against a real S3 server behind a proxy that breaks requests. After every action a
ledger that reads the server directly goes through every checkpoint, value by value. A run without interruption gives the losses
that must come; what follows from the same values on the same mesh must repeat bit for bit, whatever way the values went."""


def publish(facts: Mapping[str, Any]) -> None:
    """Write the section `soak` from a soak's facts; an optional `note` explains its problems."""
    replace_section(RELIABILITY, "soak", section(facts))


def section(facts: Mapping[str, Any]) -> str:
    """The section's text."""
    counts = facts["counts"]
    rows = [
        ("time, seed", f"{facts['minutes']:.0f} minutes, seed {facts['seed']}"),
        ("jobs", f"{sum(facts['actions'].values())}: {_listed(facts['actions'])}"),
        ("killed", f"{sum(facts['kills'].values())}: {_listed(facts['kills'])}"),
        ("ended with an error of the store", f"{sum(facts['failed'].values())}: {_listed(facts['failed'])}"),
        ("requests of the jobs", f"{facts['requests']:,}"),
        ("faults injected", f"{sum(facts['faults'].values()):,}: {_listed(facts['faults'])}"),
        ("training steps, runs without interruption beside", f"{facts['steps']:,}, {facts['generations']}"),
        ("checkpoints committed", f"{counts['committed']:,}, of which {counts['pruned']:,} were pruned later as promised"),
        ("checkpoints read whole by the ledger", f"{counts['deep_looks']:,} times"),
        ("resumes", f"{counts['resumes']:,}"),
        ("losses compared with the run without interruption", f"{counts['losses']:,}, largest relative difference "
         f"{counts['worst_loss']:.1e} (sums on another mesh)"),
        ("losses compared bit for bit", f"{counts['losses_bit_equal']:,}"),
        ("**lost**", f"**{counts['lost']}**"),
        ("**wrong**", f"**{counts['wrong']}**"),
        ("other problems (unclear error, hang, process left behind)",
         len(facts["problems"]) - counts["lost"] - counts["wrong"]),
    ]  # fmt: skip
    table = tabulate(rows, headers=["what", "seen"], tablefmt="github", disable_numparse=True)
    note = f"\n\n{facts['note']}" if facts.get("note") else ""
    return f"## Soak\n\n{INTRODUCTION}\n\n{facts['date']}, torch {facts['torch']}\n\n{table}{note}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]) if count)
