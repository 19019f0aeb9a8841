"""The `Command` record. Each room defines its own commands; `titan_ckpt.cli.main` lists them."""

from __future__ import annotations

import sys
from argparse import Action, ArgumentError, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from titan_ckpt.arguments import nearest
from titan_ckpt.console.output import are_events_wanted, write_coloured, write_error, write_to_stderr


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
            write_coloured(message)  # our own words, in which nothing is secret
        else:
            write_to_stderr(message)

    def _check_value(self, action: Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise ArgumentError(action, f"no choice {value!r}; {nearest(value, known)}use one of {', '.join(known)}")

    def error(self, message: str) -> NoReturn:
        """One line that says what is wrong; `--help` shows the rest."""
        self.exit(2, f"{self.prog}: error: {message}; {self._meant(message)}`{self.prog} --help` shows how\n")

    def _meant(self, message: str) -> str:
        """The option that an unknown one is most like."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        return nearest(unknown[0].partition("=")[0], _options(self)) if unknown and unknown[0].startswith("-") else ""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Print `message` to stderr and end the program."""
        wrong = (message or "").partition(": error: ")[2].strip()
        if wrong and are_events_wanted():
            write_error(wrong)
        else:
            self._print_message(message or "")
        raise ParserExit(status, wrong)


def _options(parser: ArgumentParser) -> list[str]:
    """The options of a parser and of the sub-parsers whose arguments are loaded."""
    found = list(parser._option_string_actions)
    for action in parser._actions:
        for child in action.choices.values() if isinstance(action, _SubParsersAction) else ():
            found += _options(child)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`configure` adds the arguments; `run` does the work and returns the exit code (0 fine, 1 a finding)."""

    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def add_json_flag(parser: ArgumentParser) -> None:
    """Add `--json`, which every command that reads has."""
    parser.add_argument("--json", action="store_true", help="facts as JSON on stdout")
