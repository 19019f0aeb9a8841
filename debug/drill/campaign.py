"""`python -m titan_ckpt.debug.drill.campaign`: inject every case for real, diagnose what it left, compare with the truth.

With `--keep FOLDER` an incident that is already there is diagnosed again instead of injected: a campaign that was cut goes on
where it stopped, and a changed analyzer is tried on all incidents in seconds.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from titan_ckpt.console.output import flush, write_text
from titan_ckpt.debug.diagnosis.diagnose import diagnose
from titan_ckpt.debug.drill.inject import CASES, TRUTH, inject, is_possible
from titan_ckpt.debug.read.reader import open_run
from titan_ckpt.errors import TitanError

_OWN = re.compile(r"(?:\.tmp-.*|rank_\d{5}\..*|exits\.json|s)\Z")  # names of what a drill writes


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One injected case and what the analyzer made of it."""

    case: str
    ranks: int
    is_right: bool
    found: str
    seconds: float


def run_case(case: str, ranks: int, folder: Path) -> CaseResult:
    """Inject (unless that was done before), diagnose, compare."""
    started = time.monotonic()
    try:
        if not (folder / TRUTH).exists():
            _remove_own(folder)
            inject(case, folder, ranks=ranks)
    except TitanError as error:
        return CaseResult(case=case, ranks=ranks, is_right=False, found=str(error), seconds=time.monotonic() - started)
    seconds = time.monotonic() - started
    top = diagnose(open_run(str(folder)))[0]
    truth = CASES[case]
    is_right = top.verdict == truth.verdict and top.culprits == truth.culprits(ranks)
    is_right = is_right and truth.subtype in (None, top.subtype)
    found = f"{top.verdict}/{top.subtype} {list(top.culprits)} {top.confidence:.2f} {top.headline}"
    return CaseResult(case=case, ranks=ranks, is_right=is_right, found=found, seconds=seconds)


def _remove_own(folder: Path) -> None:
    """Remove what a drill that was cut left; TitanError if `folder` has anything else."""
    others = [path for path in folder.rglob("*") if _OWN.match(path.name) is None] if folder.is_dir() else []
    if others or folder.is_symlink():
        raise TitanError(f"{folder}: {others[0] if others else folder} is not of a drill; give another --keep")
    if folder.exists():
        shutil.rmtree(folder)


def run_campaign(words: Sequence[str] | None = None) -> int:
    """All cases (or those named), at all sizes asked for, as often as asked for; exit 1 if any was diagnosed wrong."""
    parser = argparse.ArgumentParser(prog="python -m titan_ckpt.debug.drill.campaign", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", default=[], help="default: all")
    parser.add_argument("--ranks", default="4", help="sizes, for example 2,4,8")
    parser.add_argument("--runs", type=int, default=1, help="how often each")
    parser.add_argument("--keep", type=Path, help="leave the incidents in this folder, and use those that are there")
    parser.add_argument(
        "--table", type=Path, help="put the results into this Markdown file, in place of the former ones"
    )
    given = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # so that the job under way is ended too
    with tempfile.TemporaryDirectory() as scratch:
        root = given.keep or Path(scratch)
        results = [
            _reported(run_case(case, ranks, root / f"{case}-{ranks}-{number}"))
            for ranks in map(int, given.ranks.split(","))
            for number in range(given.runs)
            for case in given.cases or CASES
            if is_possible(case, ranks)
        ]
    wrong = [result for result in results if not result.is_right]
    write_text(f"{len(results) - len(wrong)} of {len(results)} right")
    if given.table:
        put_table(given.table, results)
    return 1 if wrong else 0


def _reported(result: CaseResult) -> CaseResult:
    mark = "ok   " if result.is_right else "WRONG"
    write_text(f"{mark} {result.case:18} {result.ranks} ranks {result.seconds:5.1f} s  {result.found}")
    flush()
    return result


_BEGIN, _END = "<!-- begin injected -->", "<!-- end injected -->"


def put_table(page: Path, results: Sequence[CaseResult]) -> None:
    """Replace what `page` holds between the markers `begin injected` and `end injected`."""
    pattern = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
    page.write_text(pattern.sub(lambda _: f"{_BEGIN}\n{table(results)}\n{_END}", page.read_text()))


def table(results: Sequence[CaseResult]) -> str:
    """Cases by numbers of ranks as `right/run`, and each wrong diagnosis in a line."""
    sizes = sorted({result.ranks for result in results})
    cases = list(dict.fromkeys(result.case for result in results))
    rows = [
        [f"`{case}`", CASES[case].text, _expected(case), *(_count(results, case, size) for size in sizes)]
        for case in cases
    ]
    wrong = [result for result in results if not result.is_right]
    lines = [f"- `{result.case}`, {result.ranks} ranks: {result.found}" for result in wrong]
    return "\n".join(
        [
            f"{time.strftime('%Y-%m-%d')}: {len(results) - len(wrong)} of {len(results)} right (right / run):",
            "",
            tabulate(
                rows, headers=["case", "what goes wrong", "expected", *(f"{n} ranks" for n in sizes)], tablefmt="github"
            ),
            "",
            *(["Wrong:", "", *lines] if wrong else ["Wrong: none."]),
        ]
    )


def _expected(case: str) -> str:
    truth = CASES[case]
    return f"{truth.verdict} ({truth.subtype})" if truth.subtype else truth.verdict


def _count(results: Sequence[CaseResult], case: str, size: int) -> str:
    mine = [result.is_right for result in results if (result.case, result.ranks) == (case, size)]
    return f"{sum(mine)}/{len(mine)}" if mine else "-"


if __name__ == "__main__":
    sys.exit(run_campaign())
