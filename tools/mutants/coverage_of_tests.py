"""Which quick tests run each line, and how long each test takes."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from coverage import CoverageData

from tools.mutants.trees import environment_of
from tools.quick_tests import QUICK, copy_sources


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveringTests:
    """Tests by file and line, and the seconds of each; a test that fails without any mutation is in neither."""

    by_line: Mapping[str, Mapping[int, frozenset[str]]]
    seconds: Mapping[str, float]

    def of(self, file: str, line: int, end_line: int) -> frozenset[str]:
        """The tests that run any of these lines."""
        lines = self.by_line.get(file, {})
        return frozenset().union(*(lines.get(each, frozenset()) for each in range(line, end_line + 1)))

    def within(self, tests: Iterable[str], budget_s: float) -> list[str]:
        """The fastest of `tests` that fit the budget together, one at least."""
        chosen: list[str] = []
        for test in sorted(tests, key=lambda name: (self.seconds[name], name)):
            budget_s -= self.seconds[test]
            if chosen and budget_s < 0:
                break
            chosen.append(test)
        return chosen


def measure(root: Path, folder: Path, tests: str = "") -> None:
    """Run the quick tests under coverage in a copy of the project, and leave the data in `folder`.

    `tests`: only those in this folder.
    """
    tree = folder / "measured"
    copy_sources(root, tree)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", QUICK, *([tests] if tests else []),
        "--cov", "--cov-context=test", "--cov-report=", "--cov-fail-under=0",
        f"--junitxml={folder / 'tests.xml'}", "-o", "junit_family=xunit1", "-o", "junit_duration_report=total",
    ]  # fmt: skip
    environment = environment_of(tree) | {"COVERAGE_FILE": str(folder / "coverage.sqlite")}
    done = subprocess.run(command, cwd=tree, env=environment, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the quick tests did not run: exit code {done.returncode} of {' '.join(command)}")


def read(folder: Path) -> CoveringTests:
    """What `measure` left in `folder`."""
    seconds = _seconds_of_passed(folder / "tests.xml")
    data = CoverageData(str(folder / "coverage.sqlite"))
    data.read()
    by_line: dict[str, dict[int, frozenset[str]]] = defaultdict(dict)
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            names = {context.rpartition("|")[0] for context in contexts}
            by_line[file][line] = frozenset(names & seconds.keys())
    return CoveringTests(by_line=by_line, seconds=seconds)


def _seconds_of_passed(report: Path) -> dict[str, float]:
    """Seconds of each test that passed, by node id."""
    seconds = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file, name = case.get("file"), case.get("name", "")
        if file and not any(case.find(state) is not None for state in ("failure", "error", "skipped")):
            owner = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
            seconds["::".join(part for part in (file, *owner.split("."), name) if part)] = float(case.get("time", 0))
    return seconds
