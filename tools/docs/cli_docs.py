"""Generate docs/cli.md from the commands' `--help`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from unittest.mock import patch

WIDTH = 100
HEAD = """\
# titan-ckpt on the command line

Written by `make docs` from the commands' own `--help`.

## Exit codes

| code | meaning |
|---|---|
| 0 | fine |
| 1 | a finding: a difference, a problem, a fault |
| 2 | the command line or a config is wrong; nothing was attempted |
| 3 | the operation failed |
| 4 | `debug`: the evidence does not decide |
| 5 | `debug`: the job runs, or has just stopped |
| 70 | a bug of titan-ckpt; the message names the file with the traceback |
| 130 | interrupted |
| 141 | whoever read the output closed it, as `head` does |
"""


def reference() -> str:
    """The whole page."""
    sections = [HEAD]
    with patch.dict(os.environ, COLUMNS=str(WIDTH)):
        from titan_ckpt.cli.main import build_parser  # argparse reads COLUMNS when a parser is created

        for parser in (*walk(build_parser()), *verbs()):
            sections.append(f"## {parser.prog}\n\n```\n{parser.format_help().rstrip()}\n```\n")
    return "\n".join(sections)


def walk(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and all its subparsers, in order."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from walk(child)


def verbs() -> Iterator[argparse.ArgumentParser]:
    """The verbs of `debug`, which have parsers of their own."""
    from titan_ckpt.debug.cli import verb_parsers

    yield from verb_parsers()
