"""The `Command` record. Each room defines its own commands; `titan_ckpt.cli.main` lists them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from titan_ckpt.errors import UsageError
from titan_ckpt.location import Location, parse_location


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`configure` adds the arguments; `run` does the work and returns the exit code (0 fine, 1 a finding)."""

    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def add_json_flag(parser: ArgumentParser) -> None:
    """Add `--json`, which every command that reads has."""
    parser.add_argument("--json", action="store_true", help="facts as JSON on stdout")


def run_location(url: str) -> Location:
    """Parse the URL of a run; UsageError if it has a step."""
    location = parse_location(url)
    if location.step is not None:
        raise UsageError(f"{location}: give the URL of the run, without a step")
    return location
