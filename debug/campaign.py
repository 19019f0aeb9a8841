"""`python -m titan_ckpt.debug.campaign`: inject every case for real, diagnose what it left, compare with the truth."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.debug.diagnosis import diagnose
from titan_ckpt.debug.inject import CASES, inject
from titan_ckpt.debug.reader import open_run
from titan_ckpt.errors import TitanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One injected case and what the analyzer made of it."""

    case: str
    ranks: int
    is_right: bool
    found: str
    seconds: float


def run_case(case: str, ranks: int, folder: Path) -> Result:
    """Inject, diagnose, compare."""
    started = time.monotonic()
    try:
        inject(case, folder, ranks=ranks)
    except TitanError as error:
        return Result(case=case, ranks=ranks, is_right=False, found=str(error), seconds=time.monotonic() - started)
    seconds = time.monotonic() - started
    top = diagnose(open_run(str(folder)))[0]
    truth = CASES[case]
    is_right = top.verdict == truth.verdict and top.culprits == truth.culprits(ranks)
    is_right = is_right and truth.subtype in (None, top.subtype)
    found = f"{top.verdict}/{top.subtype} {list(top.culprits)} {top.confidence:.2f} {top.headline}"
    return Result(case=case, ranks=ranks, is_right=is_right, found=found, seconds=seconds)


def main(words: Sequence[str] | None = None) -> int:
    """All cases (or those named), at all sizes asked for, as often as asked for; exit 1 if any was diagnosed wrong."""
    parser = argparse.ArgumentParser(prog="python -m titan_ckpt.debug.campaign", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", default=[], help="default: all")
    parser.add_argument("--ranks", default="4", help="sizes, for example 2,4,8")
    parser.add_argument("--runs", type=int, default=1, help="how often each")
    parser.add_argument("--keep", type=Path, help="leave the incidents in this folder")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        root = given.keep or Path(scratch)
        results = [
            _told(run_case(case, ranks, root / f"{case}-{ranks}-{number}"))
            for ranks in map(int, given.ranks.split(","))
            for number in range(given.runs)
            for case in given.cases or CASES
            if ranks >= CASES[case].least_ranks
        ]
    wrong = [result for result in results if not result.is_right]
    sys.stdout.write(f"{len(results) - len(wrong)} of {len(results)} right\n")
    return 1 if wrong else 0


def _told(result: Result) -> Result:
    mark = "ok   " if result.is_right else "WRONG"
    sys.stdout.write(f"{mark} {result.case:18} {result.ranks} ranks {result.seconds:5.1f} s  {result.found}\n")
    sys.stdout.flush()
    return result


if __name__ == "__main__":
    sys.exit(main())
