"""`make mutants`: a seeded sample of mutants over all rooms, each against the quick tests that run its line."""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from tabulate import tabulate

from tools.mutants import coverage_of_tests
from tools.mutants.coverage_of_tests import CoveringTests
from tools.mutants.mutations import Mutation, find_mutations
from tools.mutants.trees import Outcome, mutated, run_tests
from tools.paths import ROOT
from tools.quick_tests import copy_sources

FOLDERS = ("titan_ckpt", "trainer", "debug", "tui", "converters")
TESTS_S = 60.0
"""Each mutant runs the fastest tests that cover it, up to this many seconds in all."""
WORK = ROOT / ".mutants"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A mutation of a file, and the tests that run it."""

    file: str
    mutation: Mutation
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The folder of the file, the rooms of the core without `titan_ckpt/`."""
        return str(Path(self.file).parent).removeprefix("titan_ckpt/")

    @property
    def folder(self) -> str:
        """The first folder of the file."""
        return Path(self.file).parts[0]

    def difference(self, root: Path) -> str:
        """The change as a unified diff without context."""
        before = (root / self.file).read_text()
        lines = difflib.unified_diff(before.splitlines(), self.mutation.apply(before).splitlines(), n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A mutant and what its tests made of it."""

    mutant: Mutant
    outcome: Outcome
    difference: str


def all_mutants(root: Path, covering: CoveringTests) -> Iterator[Mutant]:
    """Every mutant that a test runs, in the order of files and lines."""
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("**/*.py")):
            file = str(path.relative_to(root))
            if any(parent.is_symlink() for parent in path.parents) or file not in covering.by_line:
                continue
            for mutation in find_mutations(path.read_text()):
                if tests := covering.of(file, mutation.line, mutation.end_line):
                    yield Mutant(file=file, mutation=mutation, tests=tuple(covering.within(tests, TESTS_S)))


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` mutants at random, the rooms in turn so that each is in the sample."""
    by_room: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_room[mutant.room].append(mutant)
    chance = random.Random(seed)
    rooms = sorted(by_room)
    chance.shuffle(rooms)
    for room in rooms:
        chance.shuffle(by_room[room])
    turns = itertools.zip_longest(*(by_room[room] for room in rooms))
    return [mutant for turn in turns for mutant in turn if mutant is not None][:count]


def run_all(mutants: Sequence[Mutant], covering: CoveringTests, jobs: int) -> list[Result]:
    """Run each mutant in one of `jobs` copies of the measured tree."""
    trees: SimpleQueue[Path] = SimpleQueue()
    for number in range(jobs):
        copy_sources(WORK / "measured", WORK / f"tree-{number}")
        trees.put(WORK / f"tree-{number}")

    def run(mutant: Mutant) -> Result:
        tree = trees.get()
        try:
            file = tree / mutant.file
            with mutated(file, mutant.mutation.apply(file.read_text())):
                outcome = run_tests(tree, mutant.tests, sum(covering.seconds[test] for test in mutant.tests))
            result = Result(mutant=mutant, outcome=outcome, difference=mutant.difference(tree))
        finally:
            trees.put(tree)
        sys.stderr.write(f"{outcome:10} {mutant.file}:{mutant.mutation.line} {mutant.mutation.kind}\n")
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, mutants))


def table(results: Sequence[Result], place: Callable[[Mutant], str]) -> str:
    """Killed (by a failure or by the time limit) and survived, per place and in all."""
    places: dict[str, Counter[Outcome]] = defaultdict(Counter)
    for result in results:
        places[place(result.mutant)][result.outcome] += 1
        places["all"][result.outcome] += 1
    rows = [_row(name, places[name]) for name in sorted(places, key=lambda name: (name == "all", name))]
    return tabulate(rows, ["place", "mutants", "killed", "survived", "killed of all"], tablefmt="github")


def _row(name: str, outcomes: Counter[Outcome]) -> list[object]:
    total, survived = outcomes.total(), outcomes[Outcome.SURVIVED]
    return [name, total, total - survived, survived, f"{1 - survived / total:.0%}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when the sample ran."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="mutants to run (40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (0)")
    parser.add_argument(
        "--only", default="", metavar="PREFIX", help="only files whose path begins so, e.g. debug/diagnosis"
    )
    parser.add_argument("--tests", default="", metavar="FOLDER", help="only the tests there, e.g. tests/debug")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--keep", action="store_true", help="use the coverage and the sources of the last run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result here too")
    options = parser.parse_args(arguments)
    if not (options.keep and (WORK / "tests.xml").exists()):
        coverage_of_tests.measure(ROOT, WORK, options.tests)
    covering = coverage_of_tests.read(WORK)
    mutants = [each for each in all_mutants(WORK / "measured", covering) if each.file.startswith(options.only)]
    results = run_all(sample(mutants, options.count, options.seed), covering, options.jobs)
    for result in results:
        if result.outcome is Outcome.SURVIVED:
            place = f"{result.mutant.file}:{result.mutant.mutation.line}"
            sys.stdout.write(f"\n{place} survived {len(result.mutant.tests)} tests\n{result.difference}\n")
    sys.stdout.write(f"\n{len(results)} of {len(mutants)} mutants, seed {options.seed}\n")
    sys.stdout.write(f"\n{table(results, lambda mutant: mutant.room)}\n")
    sys.stdout.write(f"\n{table(results, lambda mutant: mutant.folder)}\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
