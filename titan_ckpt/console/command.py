"""The `Command` record. Each room defines its own commands; `titan_ckpt.cli.main` lists them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`configure` adds the arguments; `run` does the work and returns the exit code (0 fine, 1 a finding)."""

    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def add_json_flag(parser: ArgumentParser) -> None:
    """Add `--json`, which every command that reads has."""
    parser.add_argument("--json", action="store_true", help="facts as JSON on stdout")
