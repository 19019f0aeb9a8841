"""The `Command` record. Each room defines its own commands; `titan_ckpt.cli.main` lists them."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from titan_ckpt.console.output import write_text, write_to_stderr


class ParserExit(SystemExit):
    """`--help`, `--version` or a wrong argument ends the program; other SystemExits come from libraries.

    `wrong`: what is wrong with the arguments; "" if nothing is.
    """

    def __init__(self, status: int, wrong: str = "") -> None:
        super().__init__(status)
        self.wrong = wrong


class Parser(ArgumentParser):
    """An argument parser that prints through the console."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if not message:
            return
        if file is sys.stdout:
            write_text(message)
        else:
            write_to_stderr(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Print `message` to stderr and end the program."""
        self._print_message(message or "")
        raise ParserExit(status, (message or "").partition(": error: ")[2].strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`configure` adds the arguments; `run` does the work and returns the exit code (0 fine, 1 a finding)."""

    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def add_json_flag(parser: ArgumentParser) -> None:
    """Add `--json`, which every command that reads has."""
    parser.add_argument("--json", action="store_true", help="facts as JSON on stdout")
