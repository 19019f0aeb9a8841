"""`make matrix`: install and try the project on every Python of this machine, without torch and with each torch."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tools.matrix import debian
from tools.matrix.cells import ROOT, Cell, State, try_full, try_laptop
from tools.matrix.pythons import Python, find_pythons, torch_build, torch_versions

WORK = ROOT / ".matrix"
COLUMNS = ("Python", "torch", "state", "detail")


def supported_torch() -> tuple[str, str]:
    """The oldest torch that pyproject.toml admits, and the one that CI runs."""
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    pinned = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if oldest is None or pinned is None:
        raise SystemExit("no bound of torch in pyproject.toml, or no version in constraints.txt")
    return oldest[1], pinned[1]


def full_cells(python: Python, tests: Sequence[str], *, with_cuda: bool) -> Iterator[Cell]:
    """The newest torch, with the newest of all else, CI's and the oldest one; CUDA builds only if asked for.

    No `tests`: all quick ones."""
    oldest, pinned = supported_torch()
    versions = torch_versions(python.program, oldest)
    if not versions:
        yield _left_out(python, "any", f"`{python.program} -m pip index versions torch` lists none from {oldest} on")
    wanted = [version for version in versions if version in (versions[0], pinned, versions[-1])]
    for version in wanted:
        build = torch_build(python.program, version)
        if build is None:
            yield _left_out(python, version, "the registry has no build for this Python and system")
        elif build.is_cuda and not with_cuda:
            yield _left_out(python, version, "only a CUDA build of several GB (--cuda takes it)")
        else:
            yield try_full(python, build.version, WORK, tests, is_newest=version == versions[0])


def _left_out(python: Python, torch: str, why: str) -> Cell:
    return Cell(python=python.version, torch=torch, state=State.LEFT_OUT, detail=why)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Every cell in turn, as it ends."""
    pythons, missing = find_pythons()
    for python in pythons:
        if options.python in (None, python.minor):
            yield try_laptop(python, WORK)
            if not options.laptop:
                yield from full_cells(python, options.tests, with_cuda=options.cuda)
    for minor in missing:
        if options.python not in (None, minor):
            continue
        if options.fetch:
            yield from debian.cells_of(minor, WORK, _passed_on(options))
        else:
            detail = "this Python is not on this machine, or lacks venv (--fetch gets it)"
            yield Cell(python=minor, torch="any", state=State.LEFT_OUT, detail=detail)


def _passed_on(options: argparse.Namespace) -> list[str]:
    """The options that hold in a fetched system too."""
    tests = ["--tests", *options.tests] if options.tests else []
    return [*(["--laptop"] if options.laptop else []), *(["--cuda"] if options.cuda else []), *tests]


def table(rows: Sequence[Cell]) -> str:
    """The cells as a Markdown table."""
    body = [COLUMNS, ("---",) * 4, *((cell.python, cell.torch, str(cell.state), cell.detail) for cell in rows)]
    widths = [max(len(row[column]) for row in body) for column in range(len(COLUMNS))]
    padded = (
        [text.ljust(width, "-" if text == "---" else " ") for text, width in zip(row, widths, strict=True)]
        for row in body
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__)
    parser.add_argument("--laptop", action="store_true", help="only the installs without torch")
    parser.add_argument("--python", metavar="3.X", help="only this Python")
    parser.add_argument(
        "--fetch", action="store_true", help="get a Python that is missing from Debian's packages (root, debootstrap)"
    )
    parser.add_argument("--cuda", action="store_true", help="also take torch builds that bring CUDA, several GB each")
    parser.add_argument(
        "--tests", nargs="+", default=(), metavar="PATH", help="quick tests in these files or folders alone"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells here too")
    options = parser.parse_args(arguments)
    done = []
    for cell in cells(options):
        sys.stderr.write(f"{cell.python} torch {cell.torch}: {cell.state} ({cell.duration_s:.0f} s) {cell.detail}\n")
        done.append(cell)
    sys.stdout.write(table(done) + "\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) for cell in done], indent=1) + "\n")
    return int(any(cell.state is State.FAILED for cell in done))


if __name__ == "__main__":
    sys.exit(main())
