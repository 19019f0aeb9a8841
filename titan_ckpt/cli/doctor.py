"""`titan-ckpt doctor`: would saving, training and debugging work here? Imports no torch itself."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict

from titan_ckpt.cli.examine import machine, stores, torch_runtime
from titan_ckpt.cli.examine.finding import Finding
from titan_ckpt.console.command import Command, add_json_flag
from titan_ckpt.console.escapes import escape_line
from titan_ckpt.console.output import write_json, write_text
from titan_ckpt.errors import UsageError
from titan_ckpt.location import redact, run_location, scheme
from titan_ckpt.store.open import can_open

EPILOG = """\
A store is examined with a few objects of random names, which are deleted again. Exit code 1 if something would fail.

examples:
  titan-ckpt doctor
  titan-ckpt doctor s3://bucket/run           # write, list, read, conditional writes, clock, rate
  titan-ckpt doctor --json
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("urls", nargs="*", metavar="URL", help="stores to examine")
    add_json_flag(parser)


def run(arguments: Namespace) -> int:
    """Print each finding as soon as it is known; 1 if one of them is a failure."""
    for url in arguments.urls:
        # A mistyped URL is an error of the command line, not of the machine.
        if not can_open(run_location(url).url):
            raise UsageError(
                f"{redact(url)}: no client knows {scheme(url)}://; write s3://, gs://, az:// or another of fsspec's"
            )
    findings = []
    for finding in _examine(arguments.urls):
        findings.append(finding)
        if not arguments.json:
            write_text(_line(finding))
    if arguments.json:
        write_json([asdict(finding) for finding in findings])
    else:
        write_text(_summary(findings))
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def _examine(urls: list[str]) -> Iterator[Finding]:
    yield from machine.examine()
    yield from torch_runtime.examine()
    for url in urls:
        yield from stores.examine(url)


def _line(finding: Finding) -> str:
    line = f"{finding.level:<4}  {finding.subject:<18}  {escape_line(finding.found)}"
    return f"{line}\n{'':26}-> {escape_line(finding.mend)}" if finding.mend else line


def _summary(findings: list[Finding]) -> str:
    failures, warnings = (sum(finding.level == level for finding in findings) for level in ("fail", "warn"))
    if failures:
        return f"{failures} of {len(findings)} would fail"
    return f"nothing would fail; {warnings} to know about" if warnings else "nothing would fail"


DOCTOR = Command(configure=configure, run=run)
