"""The `Command` record. Each room defines its own commands; `titan_ckpt.cli.main` lists them."""

from __future__ import annotations

import re
import sys
from argparse import Action, ArgumentError, ArgumentParser, Namespace, RawDescriptionHelpFormatter
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


_STARTS_WITH_A_NUMBER = re.compile(r"-\.?\d")
_NOT_A = {"int": "a whole number", "float": "a number"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """`option` has no effect without one of `needed`, or beside one of `excluded`."""

    option: str
    needed: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


class Parser(ArgumentParser):
    """An argument parser that prints through the console, and refuses options that would have no effect.

    Options are named by their long form, positional arguments by their metavar. A namespace that it returns has `given`, the
    names of all arguments that were on the line.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": RawDescriptionHelpFormatter, **options})
        self._negative_number_matcher = _STARTS_WITH_A_NUMBER  # argparse's own takes -1GB for an option
        self.rules: list[_Rule] = []
        self._given: set[str] = set()

    def needs(self, option: str, *others: str) -> None:
        """Refuse `option` where none of `others` is given."""
        self.rules.append(_Rule(option=option, needed=others))

    def excludes(self, option: str, *others: str) -> None:
        """Refuse `option` beside one of `others`."""
        self.rules.append(_Rule(option=option, excluded=others))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ArgumentParser's; the rules are applied when every argument is known."""
        self._given = set(getattr(namespace, "given", ()))
        found, unknown = super().parse_known_args(args, namespace)
        found.given = self._given | getattr(found, "given", set())
        if not unknown:
            self._apply_rules(found.given)
        return found, unknown

    def _get_values(self, action: Action, arg_strings: list[str]) -> Any:
        if action.option_strings or arg_strings:
            self._given.add(action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest))
        return super()._get_values(action, arg_strings)

    def _apply_rules(self, given: set[str]) -> None:
        for rule in self.rules:
            if rule.option not in given:
                continue
            if rule.needed and not given.intersection(rule.needed):
                others = " or ".join(rule.needed)
                self.error(f"{rule.option} has no effect without {others}; leave it out, or add {others}")
            if beside := next((other for other in rule.excluded if other in given), None):
                self.error(f"{rule.option} has no effect with {beside}; leave one of them out")

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
        for kind, meaning in _NOT_A.items():
            message = re.sub(rf"invalid {kind} value: (.*)", rf"\1 is not {meaning}", message)
        self.exit(2, f"{self.prog}: error: {message}; {self._meant(message)}`{self.prog} --help` shows how\n")

    def _meant(self, message: str) -> str:
        """The option that an unknown one is most like, or the one that takes settings or their values."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown and unknown[0].startswith("-"):
            return nearest(unknown[0].partition("=")[0], self._option_string_actions)
        for option, mark in (("--set", "="), ("--explain", "")):
            if unknown and mark in unknown[0] and option in self._option_string_actions:
                return f"did you mean {option} {unknown[0]}? "
        return ""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Print `message` to stderr and end the program."""
        wrong = (message or "").partition(": error: ")[2].strip()
        if wrong and are_events_wanted():
            write_error(wrong)
        else:
            self._print_message(message or "")
        raise ParserExit(status, wrong)


class CommandParser(Parser):
    """The parser of a command: it refuses an argument that it does not know itself, and so names the command and its help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As Parser's, but all arguments must be known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`configure` adds the arguments; `run` does the work and returns the exit code (0 fine, 1 a finding)."""

    configure: Callable[[Parser], None]
    run: Callable[[Namespace], int]


def add_json_flag(parser: ArgumentParser) -> None:
    """Add `--json`, which every command that reads has."""
    parser.add_argument("--json", action="store_true", help="facts as JSON on stdout")
