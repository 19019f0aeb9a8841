"""python -m tools.peer_tests [--tests FOLDER]: PyTorch's tests with its own storage and with ours; exit code 1 if ours fails."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from tools.peer_tests.accepted import ACCEPTED
from tools.peer_tests.running import PASSED, Outcome, run_file
from tools.peer_tests.sources import download
from tools.peer_tests.storages import STORAGES

Outcomes = Mapping[str, Sequence[Outcome]]
"""What became of each test, by storage."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and print the report."""
    parser = argparse.ArgumentParser(prog="python -m tools.peer_tests", description=__doc__)
    parser.add_argument(
        "--tests", type=Path, help="folder with test_*.py; without it, Debian's source package of pytorch"
    )
    parser.add_argument("--part", default="", help="only tests whose name contains this")
    parser.add_argument("--seconds", type=float, default=400, help="limit of one test")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.tests or download(Path(scratch))
        outcomes = run(folder, part=options.part, timeout_s=options.seconds)
    if options.json:
        options.json.write_text(
            json.dumps({name: [asdict(each) for each in found] for name, found in outcomes.items()})
        )
    sys.stdout.write(report(outcomes) + "\n")
    return 1 if unexplained(outcomes) else 0


def run(folder: Path, *, part: str, timeout_s: float) -> dict[str, list[Outcome]]:
    """Run every test in the files of `folder` with each storage."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in STORAGES}
    for path in sorted(folder.rglob("test_*.py")):
        for name, found in outcomes.items():
            found += run_file(path, storage=name, part=part, timeout_s=timeout_s)
            sys.stderr.write(f"\r{path.name:<50}{name:<8}")
    sys.stderr.write("\n")
    return outcomes


def differences(outcomes: Outcomes) -> dict[tuple[str, str], str]:
    """The tests that pass with torch's storage and not with another: what went wrong, by storage and test."""
    passed = {each.test for each in outcomes["torch"] if each.result == PASSED}
    return {
        (name, each.test): f"{each.result}: {each.detail}"
        for name, found in outcomes.items()
        for each in found
        if each.test in passed and each.result != PASSED
    }


def unexplained(outcomes: Outcomes) -> dict[tuple[str, str], str]:
    """The differences for which no reason is written down."""
    return {key: detail for key, detail in differences(outcomes).items() if key not in ACCEPTED}


def report(outcomes: Outcomes) -> str:
    """A table of counts, a line for each difference, and the tests that do not pass with torch's storage either."""
    rows = [_row(name, found) for name, found in outcomes.items()]
    lines = [tabulate(rows, headers="keys", tablefmt="github"), ""]
    for (name, test), detail in differences(outcomes).items():
        reason = ACCEPTED.get((name, test))
        lines.append(f"{name} {test}: accepted: {reason}" if reason else f"DIFFERS {name} {test}: {detail}")
    lines += [
        f"not run: {each.test}: {each.result}: {each.detail[:200]}"
        for each in outcomes["torch"]
        if each.result != PASSED
    ]
    return "\n".join(lines)


def _row(name: str, found: Sequence[Outcome]) -> dict[str, object]:
    counts = Counter(each.result for each in found)
    used = sum(each.uses > 0 for each in found if each.result == PASSED)
    what = {"torch": "torch's", "ours": "ours", "mixed": "our writer, torch's reader"}[name]
    return {
        "storage": what, "tests": len(found), "passed": counts[PASSED], "of these used our storage": used,
        "skipped": counts["skipped"], "failed": len(found) - counts[PASSED] - counts["skipped"],
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
