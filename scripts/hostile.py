"""Campaigns against hostile surroundings: nothing may be deleted, ended, leaked or read wrongly (docs/reliability.md).

    python -m scripts.hostile deletion --minutes 5     one part
    python -m scripts.hostile --seed 7                 all parts

Each part is a function of tools/hostile, `(seed, seconds) -> Outcome`. Prints one JSON line per part; exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from tools.faults.dead_endpoints import run_dead_endpoints
from tools.hostile.deletion import deletion
from tools.hostile.evidence_links import run_evidence_links
from tools.hostile.model_folders import run_models
from tools.hostile.odd_files import run_odd_files
from tools.hostile.outcome import Outcome
from tools.hostile.overlap import run_overlaps
from tools.hostile.processes import run_processes
from tools.hostile.s3_campaign import run_server
from tools.hostile.secrets import run_secrets

Part = Callable[[int, float], Outcome]
PARTS: dict[str, Part] = {
    "deletion": deletion,
    "models": run_models,
    "server": run_server,
    "processes": run_processes,
    "links": run_evidence_links,
    "secrets": run_secrets,
    "overlap": run_overlaps,
    "odd files": run_odd_files,
    "dead endpoints": run_dead_endpoints,
}
SHOWN_FAILURES = 20


def main() -> int:
    """Run the chosen parts, each for `--minutes`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one or more of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0, help="of each part")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; use {', '.join(PARTS)}")
    logging.getLogger("titan_ckpt").setLevel(logging.CRITICAL)  # every fault is one that was made on purpose
    outcomes = [_run(name, arguments.seed, arguments.minutes * 60) for name in arguments.parts or PARTS]
    return 1 if any(outcome.failures for outcome in outcomes) else 0


def _run(name: str, seed: int, seconds: float) -> Outcome:
    started = time.monotonic()
    outcome = PARTS[name](seed, seconds)
    outcome.seconds = round(time.monotonic() - started, 1)
    shown = {
        **asdict(outcome),
        "counts": dict(outcome.counts),  # asdict makes a Counter of pairs of it
        "failures": outcome.failures[:SHOWN_FAILURES],
        "failed": len(outcome.failures),
    }
    sys.stdout.write(json.dumps(shown) + "\n")
    return outcome


if __name__ == "__main__":
    sys.exit(main())
