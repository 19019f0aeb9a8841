"""What a command of `titan-ckpt` is; each room owns its own, `titan_ckpt.cli.main` only names them."""

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
    """`--json`, which every command that reads has."""
    parser.add_argument("--json", action="store_true", help="facts as JSON on stdout")


def run_location(url: str) -> Location:
    """The run that `url` names; UsageError where it names one of its steps."""
    location = parse_location(url)
    if location.step is not None:
        raise UsageError(f"{location}: give the URL of the run, without a step")
    return location
