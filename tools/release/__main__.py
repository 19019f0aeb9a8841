"""`make release`: check, build and try out a release. Publishes nothing; prints the commands that would."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from titan_ckpt.version import __version__
from tools.paths import ROOT
from tools.release import checks
from tools.release.build import build, smoke_test, test_source_archive, unpack

WORK = ROOT / ".release"
DIST = ROOT / "dist"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if anything stands against the release."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("--no-tests", action="store_true", help="do not run the quick tests from the source archive")
    options = parser.parse_args(arguments)
    WORK.mkdir(exist_ok=True)

    problems = [*checks.project_problems(ROOT, __version__), *checks.git_problems(ROOT, __version__)]
    archives = build(ROOT, WORK, DIST)
    problems += checks.sdist_problems(ROOT, archives.sdist)
    for wheel in dict.fromkeys([archives.wheel, archives.pure_wheel]):
        problems += checks.wheel_problems(wheel)
    source = unpack(archives.sdist, WORK)
    smoke_test(archives.wheel, __version__, source, WORK)
    if not options.no_tests:
        test_source_archive(source, WORK)

    for path in sorted(DIST.iterdir()):
        sys.stdout.write(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes\n")
    if problems:
        sys.stdout.write("not ready:\n" + "".join(f"  {problem}\n" for problem in problems))
        return 1
    if options.no_tests:
        sys.stdout.write("ready but for the tests: make release\n")
        return 0
    sys.stdout.write(f"ready; next: git tag -a v{__version__} -m 'titan-ckpt {__version__}' && twine upload dist/*\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
